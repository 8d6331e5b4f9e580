"""The coordinator's address: its host, the connection, TLS, that a coordinator answers there, and its clock."""

import ipaddress
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

from outerstep.common.answers import ERROR_BYTES, beginning, raise_for_problem, read_message
from outerstep.common.connections import Proxy, causes_of, check_address, error_text, proxy_of
from outerstep.common.quantities import duration_text
from outerstep.doctor.examination import Finding, fine, warning, wrong
from protocol.errors import NoCoordinator, NotUnderstood, OuterstepError, Transient
from protocol.messages import Health
from protocol.versions import OURS, Version, incompatibility

ENDS_SOON_DAYS = 14

_DNS = "check this machine's DNS (/etc/resolv.conf)"


@dataclass(frozen=True)
class Greeting:
    """The first response from the address. `certificate`: from `ssl.SSLSocket.getpeercert`; None without TLS. `at`:
    this machine's time (seconds since 1970) in the middle of the request."""

    answer: httpx.Response
    certificate: dict[str, Any] | None
    at: float
    took_s: float


def resolve(url: str) -> list[str] | OSError:
    """Return the IP addresses of the URL's or the proxy's host, or the error."""
    proxy = proxy_of(url)
    parts = urlsplit(url if proxy is None else proxy.url)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except OSError as error:
        return error
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def judge_host(url: str, proxy: Proxy | None, resolved: list[str] | OSError) -> list[Finding]:
    host = urlsplit(url if proxy is None else proxy.url).hostname or ""
    through = "" if proxy is None else f", the proxy of {proxy},"
    if isinstance(resolved, OSError):
        unknown = isinstance(resolved, socket.gaierror) and resolved.errno == socket.EAI_NONAME
        remedy = "fix the URL, or this machine's DNS" if unknown else _DNS
        if proxy is not None:
            remedy = _without(proxy, url)
        return [wrong("host", f"{host}{through} was not found: {resolved.strerror}", remedy, passing=True)]
    if resolved == [host]:
        return [fine("host", f"{host}{through.rstrip(',')}")]
    return [fine("host", f"{host}{through} is {', '.join(resolved[:4])}")]


def _without(proxy: Proxy, url: str) -> str:
    variable = proxy.variable or "the system's proxy settings"
    return f"fix {variable}, or connect without the proxy: NO_PROXY={urlsplit(url).hostname}"


def greet(
    http: httpx.Client, *, now: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic
) -> Greeting:
    """Send a request that needs no token. Raises httpx.HTTPError."""
    begun, at = clock(), now()
    with http.stream("GET", "/healthz") as response:
        took_s = clock() - begun
        socket_ = response.extensions["network_stream"].get_extra_info("ssl_object")
        body = beginning(response, ERROR_BYTES)
        answer = httpx.Response(response.status_code, headers=response.headers, content=body, request=response.request)
    return Greeting(answer, None if socket_ is None else socket_.getpeercert(), at + took_s / 2, took_s)


def judge_connection(url: str, seen: Greeting | httpx.TransportError) -> list[Finding]:
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    where = f"{parts.hostname}:{port}"
    if isinstance(seen, Greeting):
        return [fine("connection", f"{where} answers within {1000 * seen.took_s:.0f} ms")]
    try:
        check_address(url, seen)
    except NoCoordinator as error:
        said, _, remedy = str(error).partition("; ")
        return [wrong("connection", said, remedy)]
    if (proxy := proxy_of(url)) is not None:
        return [wrong("connection", f"{where}: {error_text(seen)}", _without(proxy, url), passing=True)]
    causes = list(causes_of(seen))
    if any(isinstance(each, ConnectionRefusedError) for each in causes):
        remedy = (
            "start `outerstep coordinator` there, with --host 0.0.0.0 if it is another machine, or fix host and port"
        )
        return [wrong("connection", f"{where} refuses the connection: nothing listens there", remedy, passing=True)]
    if isinstance(seen, httpx.TimeoutException):
        remedy = "check that the machine is on, and that firewalls there and here allow this port"
        return [wrong("connection", f"{where} does not answer: {type(seen).__name__}", remedy, passing=True)]
    said = f"{where} cannot be reached: {error_text(seen)}"
    return [wrong("connection", said, "check the network in between", passing=True)]


def judge_tls(url: str, seen: Greeting, now: float) -> list[Finding]:
    """Judge the certificate; without TLS, judge whether it is needed."""
    if seen.certificate is None:
        host = urlsplit(url).hostname or ""
        if _is_near(host):
            return [fine("TLS", "none; this address is not on the internet")]
        said = "none: anyone on the network path can read the token and change the data"
        return [warning("TLS", said, "give the coordinator a certificate (--tls-certificate), and use https://")]
    ends = ssl.cert_time_to_seconds(str(seen.certificate["notAfter"]))
    issuer = dict(pair[0] for pair in seen.certificate.get("issuer", ()))
    signed_by = issuer.get("organizationName") or issuer.get("commonName") or "an unnamed issuer"
    said = f"signed by {signed_by}, expires {datetime.fromtimestamp(ends, UTC):%Y-%m-%d}"
    days = (ends - now) / 86400
    if days < ENDS_SOON_DAYS:
        return [warning("TLS", f"{said}, in {days:.1f} days", "renew it, or workers can no longer connect")]
    return [fine("TLS", said)]


def _is_near(host: str) -> bool:
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return host == "localhost" or "." not in host


def judge_coordinator(url: str, seen: Greeting, own_version: str) -> list[Finding]:
    try:
        raise_for_problem(seen.answer)
        health = read_message(Health, seen.answer)
        # The body is checked too, because a proxy may have removed the headers.
        if (difference := incompatibility(OURS, Version(str(health.protocol), health.version))) is not None:
            raise NotUnderstood(difference)
    except Transient as error:
        return [wrong("coordinator", str(error), "a proxy answers, but the server behind it does not", passing=True)]
    except NotUnderstood as error:
        said, _, remedy = str(error).rpartition(": ")
        return [wrong("coordinator", said, remedy)]
    except OuterstepError as error:
        return [wrong("coordinator", f"something else answers at {url}: {error}")]
    if health.version == own_version:
        return [fine("coordinator", f"an Outerstep coordinator, version {health.version} as here")]
    both = f"version {health.version}, here {own_version}"
    return [fine("coordinator", f"an Outerstep coordinator, {both}; both speak protocol {health.protocol}")]


def judge_dns(seconds: float) -> Finding:
    return wrong("host", f"no name server answers within {duration_text(seconds)}", _DNS, passing=True)


def judge_silence(seconds: float) -> Finding:
    said = f"no complete response within {duration_text(seconds)}"
    return wrong("connection", said, "check for a very slow connection, or another kind of server there", passing=True)


TOLERATED_S = 5.0
_HALF_A_SECOND = 0.5  # Date is in whole seconds, rounded down


def clock_offset_s(seen: Greeting) -> float | None:
    """Return the seconds that this machine's clock is ahead of the coordinator's; None if the response has no Date."""
    try:
        date = parsedate_to_datetime(seen.answer.headers["Date"])
    except (KeyError, ValueError):
        return None
    return seen.at - (date.timestamp() + _HALF_A_SECOND)


def judge_clock(ahead_s: float | None) -> list[Finding]:
    if ahead_s is None:
        return [warning("clock", "the response has no Date to compare this machine's clock with")]
    if abs(ahead_s) <= TOLERATED_S:
        return [fine("clock", f"within {TOLERATED_S:.0f} s of the coordinator's")]
    which = "ahead of" if ahead_s > 0 else "behind"
    said = (
        f"{duration_text(abs(ahead_s))} {which} the coordinator's: certificates may look expired or not yet valid, "
        "object stores (s3://, gs://) reject signed requests, and logs of several machines do not match. Leases are "
        "not affected: they use only the coordinator's clock"
    )
    return [warning("clock", said, "use NTP on both machines: timedatectl set-ntp true")]
