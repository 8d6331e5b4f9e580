"""The network connection to the coordinator, measured, and what a round's sync takes of it."""

import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from outerstep import plan, rest
from outerstep.common.connections import KEEP_WINDOWS, set_congestion_control
from outerstep.common.quantities import bytes_text, count_text, share_text
from outerstep.doctor.examination import Finding, fine, warning
from outerstep.doctor.trial import duration
from protocol.messages import LINE_CHECK_BYTES, RunDetail

LEAST_BYTES = 1 << 18
WANTED_S = 4.0  # target duration of a measurement, limited to LINE_CHECK_BYTES
MOST_SHARE = 0.2  # share of a round's time for communication above which a warning is given

_LEAST_S = 1e-6


def look_at_tcp() -> str:
    """Return the congestion control that a worker's connections get here."""
    with socket.socket() as unconnected:
        return set_congestion_control(unconnected)


def judge_tcp(congestion_control: str, slow_start: bool | None) -> list[Finding]:
    """`slow_start`: what `starts_slowly_after_silence` returns."""
    if slow_start is None:
        return [fine("tcp", f"the congestion control is {congestion_control}")]
    if not slow_start:
        return [fine("tcp", f"connections keep their rate over the silence between syncs ({congestion_control})")]
    return [
        warning(
            "tcp",
            f"uploads begin with slow start after each silence ({congestion_control}, "
            "net.ipv4.tcp_slow_start_after_idle = 1), which makes syncs over long lines slower",
            f"as root: {KEEP_WINDOWS} (docs/deployment.md, Lines); on the coordinator's machine it does the same for "
            "downloads",
        )
    ]


@dataclass(frozen=True)
class Connection:
    """Bits per second, and the round-trip time in seconds."""

    up: float
    down: float
    latency_s: float

    def limited_to(self, max_up: float | None, max_down: float | None) -> "Connection":
        """Return the connection as used by a worker with these limits, in bits per second."""
        return Connection(min(self.up, max_up or math.inf), min(self.down, max_down or math.inf), self.latency_s)


def measure(client: rest.Client, *, clock: Callable[[], float] = time.monotonic) -> Connection:
    """Measure the network over an already open TCP connection. Raises what `rest.Client` raises."""

    def took_s(call: Callable[[], object]) -> float:
        begun = clock()
        call()
        return clock() - begun

    latency_s = min(took_s(lambda: client.line_check_down(0)) for _ in range(4))
    noise = os.urandom(LINE_CHECK_BYTES)
    up = _rate(lambda count: took_s(lambda: client.line_check_up(noise[:count])), latency_s)
    down = _rate(lambda count: took_s(lambda: client.line_check_down(count)), latency_s)
    return Connection(up, down, latency_s)


def _rate(seconds_of: Callable[[int], float], latency_s: float) -> float:
    """Return bits per second, measured with few bytes first, then with as many as a good measurement needs."""

    def rate(count: int) -> float:
        return 8 * count / max(seconds_of(count) - latency_s, _LEAST_S)

    first = rate(LEAST_BYTES)
    more = min(int(first / 8 * WANTED_S), LINE_CHECK_BYTES)
    return rate(more) if more > LEAST_BYTES else first


def judge_connection(
    seen: Connection, run: RunDetail | None, elements: int | None, step_s: float | None
) -> list[Finding]:
    """Judge the connection for a run. `elements`: trained elements; `step_s`: seconds per inner step; None if
    unknown."""
    said = f"{count_text(seen.up)}bit/s up, {count_text(seen.down)}bit/s down, round trip {duration(seen.latency_s)}"
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
    setting = plan.setting(workload, moved, run.spec.sync.inner_steps)
    share = 1 - setting.utilisation
    said += f", the whole sync {duration(moved.sync_s)}"
    if sync.wait == "never" and moved.sync_s <= sync.most_steps_of(sync.inner_steps) * step_s:
        return [fine("line", f"{said}, during which a worker trains on if its memory suffices")]
    if sync.overlap and setting.overlap is not None and (sync.overlap == "eager" or _covers(sync.overlap, setting)):
        return [fine("line", f"{said}, which sync.overlap = {sync.overlap!r} hides behind training")]
    said += f": {share_text(share)} of a round is communication"
    if share <= MOST_SHARE:
        return [fine("line", said)]
    remedy = (
        f"another codec, H or overlap would suit this connection better: outerstep plan --params {elements} "
        f"--up {seen.up / 1e6:.4g}mbit --down {seen.down / 1e6:.4g}mbit --step-time {step_s:.3g} "
        f"--latency {1e3 * seen.latency_s:.3g}ms"
    )
    return [warning("line", said, remedy)]


def _covers(overlap: int, setting: plan.Setting) -> bool:
    return isinstance(setting.overlap, int) and setting.overlap <= overlap
