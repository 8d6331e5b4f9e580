"""The coordinator's address: its host, the connection, TLS, and that a coordinator answers there."""

import ipaddress
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from outerstep.common.answers import ERROR_BYTES, beginning, raise_for_problem, read_message
from outerstep.common.connections import causes_of, check_address, error_text
from outerstep.common.quantities import duration_text
from outerstep.doctor.finding import Finding, fine, warning, wrong
from protocol.errors import NoCoordinator, NotUnderstood, OuterstepError, Transient
from protocol.messages import Health
from protocol.versions import OURS, Version, incompatibility

ENDS_SOON_DAYS = 14

_DNS = "look at this machine's DNS (/etc/resolv.conf)"


@dataclass(frozen=True)
class Greeting:
    """The first answer from the address. `certificate`: as `ssl.SSLSocket.getpeercert` has it; None without TLS. `at`:
    this machine's time, seconds since 1970, in the middle of the request."""

    answer: httpx.Response
    certificate: dict[str, Any] | None
    at: float
    took_s: float


def proxy_of(url: str) -> str | None:
    """Return the proxy that the environment names for `url`, or None."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)


def resolve(url: str) -> list[str] | OSError:
    """Return the IP addresses of the URL's host, or of the proxy's; or why there are none."""
    parts = urlsplit(proxy_of(url) or url)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except OSError as error:
        return error
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def judge_host(url: str, proxy: str | None, resolved: list[str] | OSError) -> list[Finding]:
    host = urlsplit(proxy or url).hostname or ""
    if isinstance(resolved, OSError):
        unknown = isinstance(resolved, socket.gaierror) and resolved.errno == socket.EAI_NONAME
        remedy = "mend the URL, or this machine's DNS" if unknown else _DNS
        return [wrong("host", f"{host} is not found: {resolved.strerror}", remedy, passing=True)]
    through = "" if proxy is None else f", the proxy that the environment names ({proxy})"
    if resolved == [host]:
        return [fine("host", f"{host}{through}")]
    return [fine("host", f"{host}{through} is {', '.join(resolved[:4])}")]


def greet(
    http: httpx.Client, *, now: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic
) -> Greeting:
    """Ask what needs no token. Raises httpx.HTTPError."""
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
    causes = list(causes_of(seen))
    if any(isinstance(each, ConnectionRefusedError) for each in causes):
        remedy = (
            "start `outerstep coordinator` there, with --host 0.0.0.0 if it is another machine, or mend host and port"
        )
        return [wrong("connection", f"{where} refuses the connection: nothing listens there", remedy, passing=True)]
    if isinstance(seen, httpx.TimeoutException):
        remedy = "is the machine on, and does a firewall let this port through, there and here?"
        return [wrong("connection", f"{where} does not answer: {type(seen).__name__}", remedy, passing=True)]
    told = f"{where} cannot be reached: {error_text(seen)}"
    return [wrong("connection", told, "look at the network between", passing=True)]


def judge_tls(url: str, seen: Greeting, now: float) -> list[Finding]:
    """... and where there is none, whether there should be."""
    if seen.certificate is None:
        host = urlsplit(url).hostname or ""
        if _is_near(host):
            return [fine("TLS", "none; this address is not on the internet")]
        said = "none: whoever lies between can read the token and change what is sent"
        return [warning("TLS", said, "let the coordinator have a certificate (--tls-certificate), and give https://")]
    ends = ssl.cert_time_to_seconds(str(seen.certificate["notAfter"]))
    issuer = dict(pair[0] for pair in seen.certificate.get("issuer", ()))
    signed_by = issuer.get("organizationName") or issuer.get("commonName") or "somebody without a name"
    said = f"signed by {signed_by}, ends {datetime.fromtimestamp(ends, UTC):%Y-%m-%d}"
    days = (ends - now) / 86400
    if days < ENDS_SOON_DAYS:
        return [warning("TLS", f"{said}, in {days:.1f} days", "renew it, or no worker reaches the coordinator")]
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
        # The body says it too: a proxy may have removed the headers.
        if (difference := incompatibility(OURS, Version(str(health.protocol), health.version))) is not None:
            raise NotUnderstood(difference)
    except Transient as error:
        return [wrong("coordinator", str(error), "a proxy answers, and what is behind it does not", passing=True)]
    except NotUnderstood as error:
        said, _, remedy = str(error).rpartition(": ")
        return [wrong("coordinator", said, remedy)]
    except OuterstepError as error:
        return [wrong("coordinator", f"something else answers at {url}: {error}")]
    if health.version == own_version:
        return [fine("coordinator", f"an Outerstep coordinator, {health.version} as here")]
    both = f"{health.version}, and here is {own_version}"
    return [fine("coordinator", f"an Outerstep coordinator, {both}; both speak protocol {health.protocol}")]


def judge_dns(seconds: float) -> Finding:
    return wrong("host", f"no name server answers within {duration_text(seconds)}", _DNS, passing=True)


def judge_silence(seconds: float) -> Finding:
    said = f"no whole answer within {duration_text(seconds)}"
    return wrong("connection", said, "is the line very slow, or something else than a coordinator there?", passing=True)
