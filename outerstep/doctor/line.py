"""The way to the coordinator: the address, the certificate, its clock, and how long a sync takes over the line."""

import ipaddress
import math
import os
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import httpx

from outerstep import __version__, plan, rest
from outerstep.common.answers import read_message
from outerstep.common.connections import causes_of, proxy_of
from outerstep.common.quantities import bytes_text, count_text, duration_text, share_text
from outerstep.doctor.findings import Judgement, State
from outerstep.doctor.steps import short_duration
from protocol.errors import NoCoordinator, NotUnderstood, Transient, UnexpectedAnswer
from protocol.messages import LINE_CHECK_BYTES, Health, RunDetail
from protocol.versions import OURS, Version, incompatibility

ENDS_SOON_DAYS = 14
TOLERATED_S = 5.0
_HALF_A_SECOND = 0.5  # Date is in whole seconds, rounded down


# --- the address ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Greeting:
    """A coordinator's first answer. `certificate`: from `ssl.SSLSocket.getpeercert`, None without TLS; `ahead_s`: how
    far this machine's clock is ahead of the coordinator's, None if unknown; `took_s`: the time of the request."""

    version: str
    certificate: dict[str, Any] | None
    ahead_s: float | None
    took_s: float


def greet(
    client: rest.Client, *, now: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic
) -> Greeting:
    """Send a request that needs no token. Raises NoCoordinator, NotUnderstood, Problem and Transient."""
    url, begun, at = str(client.http.base_url), clock(), now()

    def read(response: httpx.Response) -> Greeting:
        took_s = clock() - begun
        tls = response.extensions["network_stream"].get_extra_info("ssl_object")
        health = read_message(Health, response)
        # The body is checked too, because a proxy may have removed the headers.
        if (difference := incompatibility(OURS, Version(str(health.protocol), health.version))) is not None:
            raise NotUnderstood(difference)
        ahead_s = clock_offset_s(response.headers.get("Date"), at + took_s / 2)
        return Greeting(health.version, None if tls is None else tls.getpeercert(), ahead_s, took_s)

    try:
        return client.health(read)
    except Transient as error:
        raise Transient(f"{error}{_advice(url, error)}") from error
    except (NoCoordinator, NotUnderstood):
        raise
    except UnexpectedAnswer as error:
        raise NoCoordinator(f"something else answers at {url}: {error}") from error


def _advice(url: str, error: Transient) -> str:
    """Return what to do about a connection that failed; nothing for a proxy's answer, which says it."""
    causes = list(causes_of(error))
    if not any(isinstance(each, httpx.TransportError) for each in causes):
        return ""
    if (proxy := proxy_of(url)) is not None:
        variable = proxy.variable or "the system's proxy settings"
        return f"; fix {variable}, or connect without the proxy: NO_PROXY={urlsplit(url).hostname}"
    if any(isinstance(each, ConnectionRefusedError) for each in causes):
        return (
            ": nothing listens there; start `outerstep coordinator` there, with --host 0.0.0.0 if it is another "
            "machine, or fix host and port"
        )
    if any(isinstance(each, socket.gaierror) for each in causes):
        return "; fix the URL, or this machine's DNS (/etc/resolv.conf)"
    return "; check that the machine is on, and that firewalls there and here allow this port"


def judge_greeting(seen: Greeting) -> Judgement:
    both = f"version {seen.version}, here {__version__}"
    return State.FINE, f"an Outerstep coordinator, {both}; it answers within {1000 * seen.took_s:.0f} ms"


def judge_tls(url: str, seen: Greeting, now: float) -> Judgement:
    """Judge the certificate; without TLS, judge whether it is needed."""
    if seen.certificate is None:
        if _is_near(urlsplit(url).hostname or ""):
            return State.FINE, "none; this address is not on the internet"
        return State.WARNING, (
            "none: anyone on the network path can read the token and change the data; give the coordinator a "
            "certificate (--tls-certificate), and use https://"
        )
    ends = ssl.cert_time_to_seconds(str(seen.certificate["notAfter"]))
    issuer = dict(pair[0] for pair in seen.certificate.get("issuer", ()))
    signed_by = issuer.get("organizationName") or issuer.get("commonName") or "an unnamed issuer"
    said, days = f"signed by {signed_by}, expires {datetime.fromtimestamp(ends, UTC):%Y-%m-%d}", (ends - now) / 86400
    if days < ENDS_SOON_DAYS:
        return State.WARNING, f"{said}, in {days:.1f} days: renew it, or workers can no longer connect"
    return State.FINE, said


def _is_near(host: str) -> bool:
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return host == "localhost" or "." not in host


def clock_offset_s(date: str | None, at: float) -> float | None:
    """Return how many seconds `at`, this machine's time, is ahead of an answer's Date; None if there is none."""
    try:
        return None if date is None else at - (parsedate_to_datetime(date).timestamp() + _HALF_A_SECOND)
    except ValueError:
        return None


def judge_clock(seen: Greeting) -> Judgement:
    if seen.ahead_s is None:
        return State.WARNING, "the response has no Date to compare this machine's clock with"
    if abs(seen.ahead_s) <= TOLERATED_S:
        return State.FINE, f"within {TOLERATED_S:.0f} s of the coordinator's"
    which = "ahead of" if seen.ahead_s > 0 else "behind"
    return State.WARNING, (
        f"{duration_text(abs(seen.ahead_s))} {which} the coordinator's: certificates may look expired or not yet "
        "valid, and object stores (s3://, gs://) reject signed requests; use NTP on both machines: timedatectl "
        "set-ntp true"
    )


# --- the line -------------------------------------------------------------------------------------------------------

LEAST_BYTES = 1 << 18
WANTED_S = 4.0  # target duration of a measurement, limited to LINE_CHECK_BYTES
MOST_SHARE = 0.2  # share of a round's time for communication above which a warning is given

_LEAST_S = 1e-6


@dataclass(frozen=True)
class Line:
    """Bits per second, and the round-trip time in seconds."""

    up: float
    down: float
    latency_s: float


def measure(
    client: rest.Client,
    max_up: float | None = None,
    max_down: float | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Line:
    """Measure the line over an open connection, as far as the limits let a worker use it. Raises what `rest.Client`
    raises."""

    def took_s(call: Callable[[], object]) -> float:
        begun = clock()
        call()
        return clock() - begun

    latency_s = min(took_s(lambda: client.line_check_down(0)) for _ in range(4))
    noise = os.urandom(LINE_CHECK_BYTES)
    up = _rate(lambda count: took_s(lambda: client.line_check_up(noise[:count])), latency_s)
    down = _rate(lambda count: took_s(lambda: client.line_check_down(count)), latency_s)
    return Line(min(up, max_up or math.inf), min(down, max_down or math.inf), latency_s)


def _rate(seconds_of: Callable[[int], float], latency_s: float) -> float:
    """Return bits per second, measured with few bytes first, then with as many as a good measurement needs."""

    def rate(count: int) -> float:
        return 8 * count / max(seconds_of(count) - latency_s, _LEAST_S)

    first = rate(LEAST_BYTES)
    more = min(int(first / 8 * WANTED_S), LINE_CHECK_BYTES)
    return rate(more) if more > LEAST_BYTES else first


def judge_line(seen: Line, run: RunDetail | None, elements: int | None, step_s: float | None) -> Judgement:
    """Judge the line for a run. `elements`: trained elements; `step_s`: seconds per inner step; None if unknown."""
    said = f"{count_text(seen.up)}bit/s up, {count_text(seen.down)}bit/s down, "
    said += f"round trip {short_duration(seen.latency_s)}"
    if run is None or elements is None:
        return State.FINE, said
    sync, workers = run.spec.sync, max(run.live_workers, run.spec.members.min_workers, 1)
    steps = run.spec.total_inner_steps
    workload = plan.Workload(elements, seen.up, seen.down, step_s or 1.0, workers, seen.latency_s, steps)
    codecs = sync.upload_codec, sync.download_codec
    moved = plan.sync_cost(workload, *codecs, zstd=sync.zstd, fragment=sync.fragment_elements)
    said += (
        f". A round's sync, {bytes_text(moved.upload_bytes)} up ({codecs[0]}) and {bytes_text(moved.download_bytes)} "
        f"down ({codecs[1]}), takes {short_duration(moved.sync_s)}"
    )
    if step_s is None:
        return State.FINE, said
    setting = plan.setting(workload, moved, sync.inner_steps)
    share, hidden = 1 - setting.utilisation, setting.overlap
    if sync.wait == "never" and moved.sync_s <= sync.most_steps_of(sync.inner_steps) * step_s:
        return State.FINE, f"{said}, during which a worker trains on if its memory suffices"
    covers = isinstance(sync.overlap, int) and isinstance(hidden, int) and hidden <= sync.overlap
    if sync.overlap and hidden is not None and (covers or sync.overlap == "eager"):
        return State.FINE, f"{said}, which sync.overlap = {sync.overlap!r} hides behind training"
    said += f": {share_text(share)} of a round is communication"
    if share <= MOST_SHARE:
        return State.FINE, said
    return State.WARNING, (
        f"{said}. Another codec, H or overlap would suit this line better: outerstep plan --params {elements} "
        f"--up {seen.up / 1e6:.4g}mbit --down {seen.down / 1e6:.4g}mbit --step-time {step_s:.3g} "
        f"--latency {1e3 * seen.latency_s:.3g}ms"
    )
