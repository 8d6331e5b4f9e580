"""DiLoCo in Lightning: a callback, and nothing else of the script changes.

    trainer = lightning.Trainer(callbacks=[DiLoCoCallback("my-run")])
    trainer.fit(module, loader)

The steps of the module's optimizers are the inner steps, however many batches are accumulated for one; the data are the
script's own, shuffled in an order that no other worker has. It trains until the run is over, wherever in it this worker
joins, and the learning rate is that of the run's step. Several processes (`strategy="ddp"`) are one worker. Needs
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

    How long to train is the run's to say: `max_steps` becomes its inner steps, so that schedules are as long, and
    `max_epochs` nothing. Raises what `DiLoCo.connect` raises, and BoxError for a learning rate that is scheduled by
    epochs, and if a step takes another number of rows than the run's `inner.batch_size`.
    """

    _order: int | None = None  # what seeds the order of the data in all processes of this worker, where it has several

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make the training as long as the run, for the schedules that the module configures next."""
        trainer.fit_loop.epoch_loop.max_steps = self.spec.total_inner_steps
        trainer.fit_loop.max_epochs = -1

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the run, before the loaders begin to draw."""
        trainer.fit_loop.epoch_loop.max_steps = -1  # it ends with the run: a round may be trained anew
        for config in trainer.lr_scheduler_configs:
            if config.interval != "step":
                raise BoxError(
                    'the learning rate is scheduled by epochs, which every worker has of its own: give "interval": '
                    '"step" beside the scheduler in configure_optimizers'
                )
        diloco = self._join(pl_module, trainer.optimizers, [each.scheduler for each in trainer.lr_scheduler_configs])
        trainer.should_stop = diloco.finished
        torch.manual_seed(diloco.data_seed)  # what a shuffling loader draws from; seed_everything made all alike
        if trainer.world_size > 1:  # they share an order, which Lightning seeds by this, of 32 bits
            self._order = diloco.ranks.on_first(lambda: diloco.data_seed) % (1 << 32)
            os.environ["PL_GLOBAL_SEED"] = str(self._order)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the batch size. Warn where the order of the data is not what `data_seed` made it."""
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
                "the training data are not shuffled by shuffle=True, without a generator of its own (%s): give every "
                "worker other data than the rest, or all of them train on the same",
                type(sampler).__name__,
            )

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Report the training loss."""
        self.diloco.report_loss(loss.detach() * trainer.accumulate_grad_batches)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Stop where the run is over or this worker is asked to."""
        trainer.should_stop = trainer.should_stop or self.diloco.finished

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the run; the model is what an export of it has, if it is over."""
        if not self.diloco.finished:
            log.warning("the Trainer ended at step %d of the run, which goes on", self.diloco.global_step)
        self._leave(None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the run without handing anything in."""
        self._leave(exception)
