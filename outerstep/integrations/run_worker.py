"""A worker inside another library's trainer: it joins the run when training starts, and leaves when it ends."""

import math
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from outerstep import DiLoCo
from worker.errors import BoxError
from worker.link.client import Client, open_http
from worker.link.worker_token import token_to_read_with
from worker.settings import script_settings


class RunWorker:
    """The part of a callback that is independent of the trainer: a worker of `run`. `options` are those of
    `DiLoCo.connect`. The constructor fetches the run's `spec`, before a model exists, and raises what `DiLoCo.connect`
    raises.
    """

    def __init__(self, run: str, **options: Any) -> None:
        self._run, self._options = run, options
        self._diloco: DiLoCo | None = None
        who = script_settings(run=run, url=options.get("url"), token=options.get("token"), name=options.get("name"))
        token = token_to_read_with(who.token, run, who.name, options.get("state_dir") or who.directory)
        with open_http(who.url, who.ca) as http:
            self.spec = Client(http, run, token).run_detail().spec

    @property
    def diloco(self) -> DiLoCo:
        """The worker, while it trains. Raises RuntimeError before and after."""
        if self._diloco is None:
            raise RuntimeError("this worker is in the run only while the Trainer trains")
        return self._diloco

    def _check_batch(self, *factors: tuple[str, int]) -> None:
        """Raise BoxError unless the product of these factors, the sequences per optimizer step of the trainer, is the
        run's batch size, by which contributions are weighted."""
        sequences, unit = math.prod(factor for _, factor in factors), self.spec.inner.batch_size
        if sequences != unit:
            made_of = " * ".join(f"{factor} ({name})" for name, factor in factors)
            raise BoxError(
                f"a step of this trainer takes {sequences} sequences, {made_of}, but run {self._run} has "
                f"inner.batch_size = {unit}: make their product {unit}, or create a run with inner.batch_size = "
                f"{sequences}"
            )

    def _join(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        scheduler: LRScheduler | Sequence[LRScheduler] | None,
    ) -> DiLoCo:
        options = {"scheduler": scheduler} | self._options
        self._diloco = diloco = DiLoCo.connect(model, optimizer, run=self._run, **options)
        return diloco.__enter__()

    def _leave(self, error: BaseException | None) -> None:
        """Leave the run, once; contribute the finished work unless there was an `error`."""
        diloco, self._diloco = self._diloco, None
        if diloco is not None:
            diloco.__exit__(None if error is None else type(error), error, None)
