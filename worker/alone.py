"""A worker that trains alone, without a coordinator: the baseline without communication.

It does what one worker of the run would do: as many rounds of as many inner steps, on the first units in the run's
order, but without outer steps. So its held-out loss by round can be compared with the run's.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from outerstep.common.quantities import UNKNOWN
from protocol.digest import digest
from worker.accounts.progress import Progress, speed_text
from worker.accounts.stages import Stages, Traffic
from worker.accounts.step_log import StepLog
from worker.box import Box
from worker.errors import BoxError, ModelError, Stopped
from worker.state.parameters import trainable_parameters
from worker.state.snapshot import read_document, write_document
from worker.state.state_dir import StateDir
from worker.train import train

_SNAPSHOT = "alone.pt"
_EVALUATED = "alone-evaluated.pt"
_VERSION = 1

log = logging.getLogger(__name__)


def train_alone(box: Box, name: str, files: StateDir, stop: threading.Event, step_log: StepLog | None = None) -> None:
    """Train all rounds of the run, from the snapshot in `files` if there is one. Raises Stopped once `stop` is set,
    ModelError if the training diverges, BoxError for a snapshot of something else, and OSError."""
    steps = AloneSteps(box, name, files, stop, step_log)
    hook = box.optimizers[-1].register_step_post_hook(steps.count)
    try:
        train(steps, box, step_log)
    finally:
        hook.remove()
    if stop.is_set() and not steps.over:
        raise Stopped("asked to stop")


class AloneSteps:
    """Counts inner steps and rounds. Between two rounds it evaluates, logs and saves."""

    def __init__(
        self,
        box: Box,
        name: str,
        files: StateDir,
        stop: threading.Event,
        step_log: StepLog | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._box, self.name, self._files, self._stop, self._log = box, name, files, stop, step_log
        self._parameters = trainable_parameters(box.model)
        self._owner = digest(f"{box.spec.model_dump_json()}\n{name}".encode()).hex()
        self._progress = Progress(Traffic(), Stages(clock), clock, box.use)
        self.round = self.inner_step = self._unit = 0
        self.warmup_scale = 1.0

    @property
    def global_step(self) -> int:
        """Inner steps so far."""
        return self.round * self._box.spec.sync.inner_steps + self.inner_step

    @property
    def over(self) -> bool:
        """True once the last round is over."""
        return self.round == self._box.spec.sync.rounds

    def count(self, *_: Any) -> None:
        """Count one inner step, as the optimizer's hook."""
        self.inner_step += 1
        self._progress.step(self.inner_step)

    def report_loss(self, loss: Tensor) -> None:
        self._progress.report_loss(loss)

    def units(self) -> Iterator[int]:
        """Yield the number of the unit of every inner step, until the last round is over."""
        sync = self._box.spec.sync
        self._resume()
        while self.round < sync.rounds:
            self._evaluate()
            self._progress.begin_round(self.round)
            first = self.round * sync.inner_steps
            for self._unit in range(first, first + sync.inner_steps):
                if self._stop.is_set():
                    return
                yield self._unit
                self._progress.skip()  # the loss of a skipped step
            self._end_round()
        self._evaluate()

    def upcoming(self) -> Iterator[int]:
        """Yield the numbers of the units after the current one, up to the end of the next round. Not of all units:
        shards that are expected are fetched and kept in the cache."""
        sync = self._box.spec.sync
        return iter(range(self._unit + 1, min(self.round + 2, sync.rounds) * sync.inner_steps))

    def _end_round(self) -> None:
        loss = self._progress.end_inner_steps(self.inner_step, self.inner_step * self._box.spec.unit_tokens)
        shown = UNKNOWN if loss is None else f"{loss:.4f}"  # None if all steps were skipped
        log.info("round %d: loss %s, %s", self.round, shown, speed_text(self._progress.metrics()))
        if loss is not None and not math.isfinite(loss):
            raise ModelError(f"round {self.round}: the training has diverged: loss {loss}; lower the learning rate")
        self.round, self.inner_step, scaler = self.round + 1, 0, self._box.step.scaler
        document = {
            "parameters": {name: parameter.detach() for name, parameter in self._parameters.items()},
            "inner_optimizers": [each.state_dict() for each in self._box.optimizers],
            "scaler": None if scaler is None else scaler.state_dict(),
        }
        self._save(_SNAPSHOT, document)

    def _save(self, file: str, document: dict[str, Any]) -> None:
        """Write a document about the state `round`."""
        document = {"version": _VERSION, "identity": self._owner, "round": self.round} | document
        self._files.replace(file, partial(write_document, document))

    def _saved(self, file: str) -> dict[str, Any] | None:
        path = self._files.path / file
        return read_document(path, self._owner, _VERSION) if path.exists() else None

    def _resume(self) -> None:
        path = self._files.path / _SNAPSHOT
        if not path.exists():
            return
        found = self._saved(_SNAPSHOT)
        if found is None:  # there is no coordinator to recover from, and the next round would overwrite it
            raise BoxError(
                f"{path} is damaged, or belongs to another spec or name than this training: delete it to start "
                "again, or give another --state-dir; a spec that relies on defaults may differ in another version"
            )
        for name, parameter in self._parameters.items():
            parameter.data.copy_(found["parameters"][name])
        for optimizer, state in zip(self._box.optimizers, found["inner_optimizers"], strict=True):
            optimizer.load_state_dict(state)
        scaler, saved = self._box.step.scaler, found["scaler"]
        if scaler is not None and saved is not None:
            scaler.load_state_dict(saved)
        self.round = found["round"]
        log.info("resuming at round %d", self.round)

    def _evaluate(self) -> None:
        """Measure the held-out loss when the run would, as often and after the last round; not again for a state that
        was measured before a restart."""
        spec, measure = self._box.spec, self._box.evaluate
        if measure is None or (self.round % spec.evaluation.every_rounds and self.round < spec.sync.rounds):
            return
        evaluated = self._saved(_EVALUATED)
        if evaluated is not None and evaluated["round"] == self.round:
            return
        report = measure()
        log.info("state %d: held-out loss %.4f", self.round, report.loss)
        if self._log is not None:
            self._log.write(round=self.round, held_out_loss=report.loss, held_out_tokens=report.tokens)
        self._save(_EVALUATED, {})
