"""DiLoCo in transformers' Trainer: add a callback; nothing else in the script changes.

    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[DiLoCoCallback("my-run")])
    trainer.train()

The Trainer's steps are the inner steps, including gradient accumulation. Its data are its own, drawn in a different
order on each worker. It trains until the run is over, whenever this worker joins, with the learning rate of the run's
step. Needs `pip install 'outerstep[trainer]'`: accelerate, which the Trainer needs too.
"""

import atexit
import logging
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler, get_sampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from outerstep.integrations.run_worker import RunWorker
from worker.errors import BoxError

log = logging.getLogger(__name__)


class DiLoCoCallback(RunWorker, TrainerCallback):
    """One worker of the run `run`. `options` are those of `DiLoCo.connect`.

    `TrainingArguments.max_steps` becomes the run's inner steps, so that the Trainer's schedule has that length. Raises
    what `DiLoCo.connect` raises, and BoxError for `load_best_model_at_end`, and if its steps take a different number of
    sequences than `inner.batch_size`.
    """

    def __init__(self, run: str, **options: Any) -> None:
        # The Trainer must know how many steps it takes at most.
        super().__init__(run, **{"waits": True} | options)

    _logged_at = 0  # the Trainer's step when it last logged a loss
    _steps_since = 0  # steps that it has actually taken since then
    _steps = 0  # and since the start

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Set the length of training to the run's."""
        if args.load_best_model_at_end:
            raise BoxError(
                "load_best_model_at_end=True would replace the run's model by an older one before this worker leaves: "
                "set it to False, and get the model with `outerstep run export`"
            )
        self._check_batch(
            ("the Trainer's train_batch_size", args.train_batch_size),
            ("gradient_accumulation_steps", args.gradient_accumulation_steps),
            ("processes", 1 if getattr(args.accelerator_config, "split_batches", False) else args.world_size),
        )
        args.max_steps = self.spec.total_inner_steps

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **has: Any) -> None:
        """Join the run."""
        diloco = self._join(has["model"], has["optimizer"], has["lr_scheduler"])
        atexit.register(self._leave, RuntimeError("the training ended before its end"))
        self._logged_at, self._steps_since = state.global_step, 0  # the Trainer's own step
        state.global_step = diloco.global_step
        control.should_training_stop = diloco.finished
        self._draw_other_data(has["train_dataloader"])

    def _draw_other_data(self, loader: Any) -> None:
        """Give the loader its own data order; otherwise all workers would have the same order, from `args.seed`."""
        sampler = get_sampler(loader)
        if isinstance(sampler, SeedableRandomSampler):
            # The same seed in all processes of this worker, which take its batches in turn. The epoch is added to it.
            sampler.initial_seed = self.diloco.ranks.on_first(lambda: self.diloco.data_seed) >> 1
        else:
            log.warning(
                "the order of the training data is not set by the Trainer (%s): give each worker different data, or "
                "all of them train on the same",
                type(sampler).__name__,
            )

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **has: Any) -> None:
        """Set the Trainer's step to the run's, which differs if this worker joined late."""
        state.global_step = self.diloco.global_step

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **has: Any) -> None:
        """Report the training loss, as often as the Trainer logs it, averaged over its processes.

        The Trainer divides its sum by the increase of `global_step`, which jumps if this worker joins late, is
        restarted, or trains a round again; so the logged values are corrected too.
        """
        logs: dict[str, float] = has["logs"]
        if self._diloco is None:
            return
        if "train_loss" in logs and self._steps:  # the overall mean, at the end
            logs["train_loss"] *= state.global_step / self._steps
        if "loss" in logs and self._steps_since:
            logs["loss"] *= (state.global_step - self._logged_at) / self._steps_since
            self._logged_at, self._steps_since = state.global_step, 0
            if state.log_history and "loss" in state.log_history[-1]:
                state.log_history[-1]["loss"] = logs["loss"]
            if self.diloco.ranks.is_first:
                self.diloco.report_loss(torch.tensor(logs["loss"]))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop training if the run is over, this worker is asked to stop, or another callback wants it; but not because
        the Trainer has done all its steps: a round may be trained again."""
        self._steps_since += 1
        self._steps += 1
        by_another = control.should_training_stop and state.global_step < state.max_steps
        control.should_training_stop = self.diloco.finished or by_another
        state.global_step = self.diloco.global_step

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Leave the run. If it is over, the model equals its export."""
        if not self.diloco.finished:
            log.warning("the Trainer ended at step %d of %d; the run continues", state.global_step, state.max_steps)
        self._leave(None)
