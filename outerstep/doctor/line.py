"""The line to the coordinator, measured, and what a round's exchange takes of it."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from outerstep import plan, rest
from outerstep.common.quantities import bytes_text, count_text, share_text
from outerstep.doctor.finding import Finding, fine, warning
from outerstep.doctor.step import duration, inner_steps
from protocol.messages import LINE_CHECK_BYTES, RunDetail

LEAST_BYTES = 1 << 18
WANTED_S = 4.0  # of a measurement: as many bytes as that takes, up to LINE_CHECK_BYTES
MOST_SHARE = 0.2  # of a round's time that communication may take without a word

_LEAST_S = 1e-6


@dataclass(frozen=True)
class Line:
    """Bits per second, and seconds of a round trip."""

    up: float
    down: float
    latency_s: float

    def held_to(self, max_up: float | None, max_down: float | None) -> "Line":
        """Return the line as a worker uses it that may take no more than so many bits per second."""
        return Line(min(self.up, max_up or math.inf), min(self.down, max_down or math.inf), self.latency_s)


def look(client: rest.Client, *, clock: Callable[[], float] = time.monotonic) -> Line:
    """Measure the line, by a connection that is there already. Raises what `rest.Client` does."""

    def took_s(call: Callable[[], object]) -> float:
        begun = clock()
        call()
        return clock() - begun

    latency_s = min(took_s(lambda: client.line_check_down(0)) for _ in range(4))
    noise = os.urandom(LINE_CHECK_BYTES)
    up = _rate(lambda count: took_s(lambda: client.line_check_up(noise[:count])), latency_s)
    down = _rate(lambda count: took_s(lambda: client.line_check_down(count)), latency_s)
    return Line(up, down, latency_s)


def _rate(seconds_of: Callable[[int], float], latency_s: float) -> float:
    """Return bits per second: of few bytes first, then of as many as a good measurement needs."""

    def rate(count: int) -> float:
        return 8 * count / max(seconds_of(count) - latency_s, _LEAST_S)

    first = rate(LEAST_BYTES)
    more = min(int(first / 8 * WANTED_S), LINE_CHECK_BYTES)
    return rate(more) if more > LEAST_BYTES else first


def judge(seen: Line, run: RunDetail | None, elements: int | None, step_s: float | None) -> list[Finding]:
    """`elements` that are trained, and the seconds of an inner step; None where it is not known."""
    said = (
        f"{count_text(seen.up)}bit/s up, {count_text(seen.down)}bit/s down, {duration(seen.latency_s)} for a round trip"
    )
    if run is None or elements is None:
        return [fine("line", said)]
    sync = run.spec.sync
    workload = plan.Workload(
        parameters=elements,
        up=seen.up,
        down=seen.down,
        step_s=step_s or 1.0,
        workers=max(run.live_workers, run.spec.members.min_workers, 1),
        latency_s=seen.latency_s,
        steps=run.spec.total_inner_steps,
    )
    moved = plan.sync_cost(
        workload, sync.upload_codec, sync.download_codec, zstd=sync.zstd, fragment=sync.fragment_elements
    )
    said += (
        f". A round's upload ({sync.upload_codec}) of {bytes_text(moved.upload_bytes)} takes "
        f"{duration(8 * moved.upload_bytes / seen.up)}, its download ({sync.download_codec}) of "
        f"{bytes_text(moved.download_bytes)} {duration(8 * moved.download_bytes / seen.down)}"
    )
    if step_s is None:
        return [fine("line", said)]
    setting = plan.setting(workload, moved, inner_steps(run.spec, step_s))
    share = 1 - setting.utilisation
    said += f", both with all around them {duration(moved.sync_s)}"
    if sync.overlap and setting.overlap is not None and (sync.overlap == "eager" or _covers(sync.overlap, setting)):
        return [fine("line", f"{said}, which sync.overlap = {sync.overlap!r} hides behind the training")]
    said += f": {share_text(share)} of a round is communication"
    if share <= MOST_SHARE:
        return [fine("line", said)]
    remedy = (
        f"a run suits this line whose codec, H or overlap is another: outerstep plan --params {elements} "
        f"--up {seen.up / 1e6:.4g}mbit --down {seen.down / 1e6:.4g}mbit --step-time {step_s:.3g} "
        f"--latency {1e3 * seen.latency_s:.3g}ms"
    )
    return [warning("line", said, remedy)]


def _covers(overlap: int, setting: plan.Setting) -> bool:
    return isinstance(setting.overlap, int) and setting.overlap <= overlap
