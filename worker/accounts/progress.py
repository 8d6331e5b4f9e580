"""A worker's own measurements: for the heartbeat, for the report on each round, and for the round's log line.

The phases of the training loop are stages that follow one another. What happens on other threads meanwhile is measured
there, by `Stages`.
"""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from outerstep.common.quantities import PACE_ROUNDS, UNKNOWN, duration_text, learning_rate_text, remaining_s, sparkline
from protocol.messages import Metrics, RoundReport, Stage, added
from worker.accounts.machine import DeviceUse
from worker.accounts.stages import Stages, Traffic
from worker.ranks import ALONE, Ranks

log = logging.getLogger(__name__)


class Progress:
    """Counts and times one worker's rounds. `clock` gives seconds. Written by the training loop, read by the
    heartbeat."""

    def __init__(
        self,
        traffic: Traffic,
        stages: Stages,
        clock: Callable[[], float],
        use: DeviceUse | None = None,
        ranks: Ranks = ALONE,
        rounds: int = 0,
    ) -> None:
        self._rounds = rounds  # of the run; 0 if unknown
        self._rate: float | Tensor | None = None
        self._began: float | None = None  # start of this worker's first round
        self._ended = 0.0  # end of its last round; before that, start of the first
        self._lengths: deque[float] = deque(maxlen=PACE_ROUNDS)
        self._losses_by_round: list[float | None] = []  # of its rounds; the last ones are shown
        self._ranks = ranks
        self._others = (
            0,
            0,
        )  # bytes up and down that this worker's other processes had moved by the end of the last round
        self._traffic, self._stages, self._clock = traffic, stages, clock
        self._use = use or DeviceUse(torch.device("cpu"))
        self._lock = threading.Lock()
        self._phase = Stage.JOIN
        stages.move(None, self._phase)
        self._shown = Metrics(phase="join")
        self._held_by: str | None = None
        self._inner_step: int | None = None
        self._losses: Tensor | None = None  # the sum over the inner steps
        self._reports = 0  # inner steps whose loss was reported
        self._of_step: list[Tensor] = []  # reported since the last inner step
        self._warned_same_rows = False
        self._started = clock()
        self._first_step: float | None = None  # end of this process's first inner step, which compiles and allocates
        self._bytes_before = (0, 0)
        self._round = 0  # that the next report is about
        self._dropped_steps = 0  # since the last report
        self._unsent: deque[RoundReport] = deque()

    def phase(self, name: str, **values: object) -> None:
        """Enter a phase of the training loop; `values` are shown with it."""
        self._stages.move(self._phase, Stage(name))
        self._phase = Stage(name)
        with self._lock:
            self._shown = self._shown.model_copy(update={"phase": name, **values})

    def hold(self, reason: str | None) -> None:
        """Show `reason` instead of the phase, in which the worker can do nothing because of it; None: show the phase
        again."""
        with self._lock:
            self._held_by = reason

    def begin_round(self, round_number: int) -> None:
        self._losses, self._reports, self._of_step = None, 0, []
        self._round, self._started = round_number, self._clock()
        self._inner_step = 0
        if self._began is None:
            self._began = self._ended = self._started
        self.phase("train", round=round_number)

    def step(self, inner_step: int, rate: float | Tensor | None = None) -> None:
        """Note that this many inner steps of the round are done, the last one at the learning rate `rate` (None if its
        optimizer has none). Cheap, because steps are many."""
        self._inner_step, self._rate = inner_step, rate
        if self._first_step is None:
            self._first_step = self._clock()
        if self._of_step:
            loss = self._of_step[0] if len(self._of_step) == 1 else _mean_of_finite(self._of_step)
            self._losses = loss if self._losses is None else self._losses + loss
            self._reports += 1
            self._of_step = []

    def skip(self) -> None:
        """Drop the loss reported for a step that was skipped, as a GradScaler skips a gradient that overflowed: the
        loss may be infinite, and nothing was learned from it."""
        self._of_step = []

    def report_loss(self, loss: Tensor) -> None:
        """Note the mean loss of the next step, nats per token; several reports are averaged. The tensor stays on its
        device, so no step waits for it."""
        self._of_step.append(loss.detach().float().clone())

    def mean_loss(self) -> float | None:
        """Return the mean loss of the round so far, over all processes; None if the training loop has reported none.
        All processes call it at once."""
        own = None if self._losses is None else float(self._losses) / self._reports
        reported = [each for each in self._ranks.all(own) if each is not None]
        if len(reported) > 1 and len(set(reported)) == 1 and not self._warned_same_rows and self._ranks.is_first:
            self._warned_same_rows = True
            log.warning(
                "all %d processes of this worker have the same loss, as if each trained on all rows of a unit: "
                "give each process its own rows, such as rows[rank::size], or use unit_sampler() or batches(), which "
                "divide them. If the loss was averaged over the processes, report it in only one of them",
                len(reported),
            )
        return sum(reported) / len(reported) if reported else None

    def end_inner_steps(self, steps: int, tokens: int) -> float | None:
        """Report the speed of the round's inner steps, without the first one of this process if others follow. Return
        their mean loss, None if the training loop has reported none."""
        loss = self.mean_loss()
        ended, since = self._clock(), self._started
        if self._first_step is not None and self._first_step > since and steps > 1:
            steps, tokens, since = steps - 1, tokens * (steps - 1) // steps, self._first_step
        seconds = max(ended - since, 1e-9)
        finite = loss if loss is not None and math.isfinite(loss) else None
        self.phase(
            "gather",
            loss=finite,
            tokens_per_second=tokens / seconds,
            inner_steps_per_second=steps / seconds,
            mfu=self._use.utilisation(tokens / seconds),
            peak_memory_bytes=self._use.peak_memory_bytes(),
            learning_rate=None if self._rate is None else float(self._rate),
        )
        return loss

    def end_round(self, round_number: int, epoch: int) -> None:
        """Make and log the report on the round, and wait for the next one. All processes call it at once."""
        self.phase("wait")
        self._round = round_number
        moved = self._ranks.all((self._traffic.upload_bytes, self._traffic.download_bytes))
        del moved[self._ranks.rank]
        self._others = sum(up for up, _ in moved), sum(down for _, down in moved)
        report = self.report(epoch)
        self._unsent.append(report)
        self._round += 1
        metrics = self.metrics()
        self._losses_by_round.append(metrics.loss)
        now = self._clock()
        self._lengths.append(now - self._ended)
        self._ended = now
        log.info(
            "round %d: loss %s %s, rate %s, %s, %.2f MB up, %.2f MB down; elapsed %s, to go %s; seconds: %s",
            round_number,
            UNKNOWN if metrics.loss is None else f"{metrics.loss:.4f}",
            sparkline(self._losses_by_round),
            learning_rate_text(metrics.learning_rate),
            speed_text(metrics),
            report.upload_bytes / 1e6,
            report.download_bytes / 1e6,
            duration_text(now - (self._began or 0.0)),
            duration_text(remaining_s(self._lengths, self._rounds - round_number - 1)),
            ", ".join(f"{stage} {report.seconds[stage]:.2f}" for stage in Stage if stage in report.seconds),
        )

    def drop(self, steps: int) -> None:
        """Count inner steps whose work was dropped: no contribution contains it."""
        self._dropped_steps += steps

    def report(self, epoch: int) -> RoundReport:
        """Return the bytes, seconds and dropped inner steps since the last report."""
        moved = self._moved()
        up, down = (now - before for now, before in zip(moved, self._bytes_before, strict=True))
        self._bytes_before = moved
        dropped, self._dropped_steps = self._dropped_steps, 0
        return RoundReport(
            round=self._round,
            epoch=epoch,
            upload_bytes=up,
            download_bytes=down,
            seconds=self._stages.take(),
            dropped_steps=dropped,
        )

    @property
    def unsent(self) -> RoundReport | None:
        """The oldest report on a round that the coordinator does not have yet. It may be sent again."""
        return self._unsent[0] if self._unsent else None

    def note_sent(self, report: RoundReport | None) -> None:
        """The coordinator has got the report."""
        if report is not None and report is self.unsent:
            self._unsent.popleft()

    def last_report(self, epoch: int) -> RoundReport:
        """Return the report with which this worker leaves: everything that was not sent."""
        own, sums = self.report(epoch), dict[str, Any]()
        for each in (*self._unsent, own):
            sums = added(sums, each.model_dump(mode="json"))
        self._unsent.clear()
        return RoundReport(round=own.round, epoch=own.epoch, **sums)

    def _moved(self) -> tuple[int, int]:
        up, down = self._others
        return self._traffic.upload_bytes + up, self._traffic.download_bytes + down

    def metrics(self) -> Metrics:
        up, down = self._moved()
        with self._lock:
            now: dict[str, object] = {"inner_step": self._inner_step, "upload_bytes": up, "download_bytes": down}
            if self._held_by is not None:
                now["phase"] = self._held_by
            return self._shown.model_copy(update=now)


def _mean_of_finite(losses: list[Tensor]) -> Tensor:
    """Return the mean of the finite losses of one inner step; NaN if there is none. The others belong to steps that a
    GradScaler has skipped without calling the optimizer."""
    each = torch.stack(losses)
    finite = each.isfinite()
    return torch.where(finite, each, 0).sum() / finite.sum()


def speed_text(metrics: Metrics) -> str:
    """Return speed and device use as they are logged."""
    parts = [f"{metrics.tokens_per_second or 0.0:.0f} tokens/s"]
    if metrics.mfu is not None:
        parts.append(f"MFU {metrics.mfu:.1%}")
    if metrics.peak_memory_bytes is not None:
        parts.append(f"{metrics.peak_memory_bytes / 1e9:.2f} GB at most")
    return ", ".join(parts)
