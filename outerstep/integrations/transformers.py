"""DiLoCo in transformers' Trainer: a callback, and nothing else of the script changes.

    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[DiLoCoCallback("my-run")])
    trainer.train()

The Trainer's own steps are the inner steps, however many batches it accumulates for one; its data are its own, drawn in
an order that no other worker has. It trains until the run is over, wherever in it this worker joins, and its learning
rate is that of the run's step. Needs `pip install 'outerstep[trainer]'`: accelerate, as the Trainer does.
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

    `TrainingArguments.max_steps` becomes the run's inner steps, so that the Trainer's schedule is as long. Raises what
    `DiLoCo.connect` raises, and BoxError for a run whose workers have each their own H: the Trainer counts its steps
    beforehand; for `load_best_model_at_end`; and if its steps take another number of sequences than `inner.batch_size`.
    """

    def __init__(self, run: str, **options: Any) -> None:
        super().__init__(run, **options)
        if self.spec.sync.inner_steps == "auto":
            raise BoxError(
                f'the run {run} has sync.inner_steps = "auto", and the Trainer counts its steps beforehand: give '
                "the run a number of them, or train in a loop of your own"
            )

    _logged_at = 0  # the Trainer's step when it logged a loss last
    _steps_since = 0  # the steps that it has really taken since
    _steps = 0  # and since it began

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Make the Trainer's training as long as the run's."""
        if args.load_best_model_at_end:
            raise BoxError(
                "load_best_model_at_end=True would put an older model in the place of the run's before this worker "
                "leaves it: set it to False, and take the model from the run, `outerstep run export`"
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
        self._logged_at, self._steps_since = state.global_step, 0  # as the Trainer has it, and as it was
        state.global_step = diloco.global_step
        control.should_training_stop = diloco.finished
        self._draw_other_data(has["train_dataloader"])

    def _draw_other_data(self, loader: Any) -> None:
        """Let the loader draw its data in an order of this worker's own: all would have the same, by `args.seed`."""
        sampler = get_sampler(loader)
        if isinstance(sampler, SeedableRandomSampler):
            # One for all processes of this worker, which take its batches in turns. Epochs are added to it.
            sampler.initial_seed = self.diloco.ranks.on_first(lambda: self.diloco.data_seed) >> 1
        else:
            log.warning(
                "the order of the training data is not the Trainer's own (%s): give every worker other data than the "
                "rest, or all of them train on the same",
                type(sampler).__name__,
            )

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **has: Any) -> None:
        """Tell the Trainer the run's step: another than its own, if this worker joined late."""
        state.global_step = self.diloco.global_step

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **has: Any) -> None:
        """Report the training loss, as often as the Trainer logs it, averaged over its processes.

        The Trainer divides its sum by the steps that `global_step` has gone on by, which jumps where this worker joins
        late, is restarted, or trains a round anew: what it logs is put right as well.
        """
        logs: dict[str, float] = has["logs"]
        if self._diloco is None:
            return
        if "train_loss" in logs and self._steps:  # of all, at the end
            logs["train_loss"] *= state.global_step / self._steps
        if "loss" in logs and self._steps_since:
            logs["loss"] *= (state.global_step - self._logged_at) / self._steps_since
            self._logged_at, self._steps_since = state.global_step, 0
            if state.log_history and "loss" in state.log_history[-1]:
                state.log_history[-1]["loss"] = logs["loss"]
            if self.diloco.ranks.is_first:
                self.diloco.report_loss(torch.tensor(logs["loss"]))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop training where the run is over, this worker is asked to stop, or another callback wants it; but not
        because the Trainer has counted its steps: a round may be trained anew."""
        self._steps_since += 1
        self._steps += 1
        by_another = control.should_training_stop and state.global_step < state.max_steps
        control.should_training_stop = self.diloco.finished or by_another
        state.global_step = self.diloco.global_step

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Leave the run; the model is what an export of it has, if it is over."""
        if not self.diloco.finished:
            log.warning("the Trainer ended at step %d of %d: the run goes on", state.global_step, state.max_steps)
        self._leave(None)
