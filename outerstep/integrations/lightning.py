"""DiLoCo in Lightning: add a callback; nothing else in the script changes.

    trainer = lightning.Trainer(callbacks=[DiLoCoCallback("my-run")])
    trainer.fit(module, loader)

The steps of the module's optimizers are the inner steps, including gradient accumulation. The data are the
script's, shuffled in a different order on each worker. It trains until the run is over, whenever this worker joins,
with the learning rate of the run's step. Several processes (`strategy="ddp"`) are one worker. Needs
`pip install 'outerstep[lightning]'`.
"""

import logging
import os
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import RandomSampler
from torch.utils.data.distributed import DistributedSampler

from outerstep.integrations.run_worker import RunWorker
from worker.errors import BoxError

log = logging.getLogger(__name__)


class DiLoCoCallback(RunWorker, Callback):
    """One worker of the run `run`. `options` are those of `DiLoCo.connect`.

    The run decides how long to train: `max_steps` becomes its inner steps, so that schedules have that length, and
    `max_epochs` is disabled. Raises what `DiLoCo.connect` raises, and BoxError for a learning rate scheduled by epoch,
    and if a step takes a different number of rows than the run's `inner.batch_size`.
    """

    _order: int | None = None  # seed of the data order in all processes of this worker, if it has several

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set the length of training to the run's, for the schedules that the module configures next."""
        trainer.fit_loop.epoch_loop.max_steps = self.spec.total_inner_steps
        trainer.fit_loop.max_epochs = -1

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the run, before the loaders begin to draw."""
        trainer.fit_loop.epoch_loop.max_steps = -1  # training ends with the run: a round may be trained again
        for config in trainer.lr_scheduler_configs:
            if config.interval != "step":
                raise BoxError(
                    'the learning rate is scheduled by epoch, but each worker has its own epochs: return "interval": '
                    '"step" with the scheduler in configure_optimizers'
                )
        diloco = self._join(pl_module, trainer.optimizers, [each.scheduler for each in trainer.lr_scheduler_configs])
        trainer.should_stop = diloco.finished
        torch.manual_seed(diloco.data_seed)  # seeds shuffling loaders; seed_everything made all workers equal
        if trainer.world_size > 1:  # they share an order, which Lightning seeds with this 32-bit number
            self._order = diloco.ranks.on_first(lambda: diloco.data_seed) % (1 << 32)
            os.environ["PL_GLOBAL_SEED"] = str(self._order)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the batch size. Warn if the order of the data does not depend on `data_seed`."""
        size = getattr(trainer.train_dataloader, "batch_size", None)
        if size is not None:
            self._check_batch(
                ("the loader's batch_size", size),
                ("accumulate_grad_batches", trainer.accumulate_grad_batches),
                ("processes", trainer.world_size),
            )
        sampler = getattr(trainer.train_dataloader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            own_order = sampler.shuffle and sampler.seed == self._order
        else:
            own_order = isinstance(sampler, RandomSampler) and sampler.generator is None
        if not own_order:
            log.warning(
                "Outerstep cannot set the order of the training data (%s; it needs shuffle=True without a generator): "
                "give each worker different data, or all of them train on the same",
                type(sampler).__name__,
            )

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Report the training loss."""
        self.diloco.report_loss(loss.detach() * trainer.accumulate_grad_batches)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Stop if the run is over or this worker is asked to stop."""
        trainer.should_stop = trainer.should_stop or self.diloco.finished

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the run. If it is over, the model equals its export."""
        if not self.diloco.finished:
            log.warning("the Trainer ended at step %d; the run continues", self.diloco.global_step)
        self._leave(None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the run without contributing."""
        self._leave(exception)
