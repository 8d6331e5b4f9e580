"""HTTP connections, for all clients: what the environment and --ca say of them, TCP's congestion control, and errors in
words.

Libraries wrap the system's errors, and `str` of those is for programmers (`[Errno 111]`, `_ssl.c:1006`). So these
functions look for the system's own error among the causes.
"""

import importlib.util
import logging
import os
import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from outerstep.common.files import FULL, free_bytes
from outerstep.common.quantities import bytes_text
from protocol.errors import NoCoordinator, OuterstepError

CA_VARIABLE = "OUTERSTEP_CA"
CONGESTION_VARIABLE = "OUTERSTEP_TCP"  # another congestion control to request, by its name in the kernel
BBR = "bbr"
KEEP_WINDOWS = "sysctl -w net.ipv4.tcp_slow_start_after_idle=0"

KEPT_OPEN_S = 3600.0  # for an idle connection, by workers: the next transfer, a round later, begins with its window
_PROBES = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4))  # seconds, seconds, and how many

SLOW_START_AFTER_IDLE = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")

_PROBE_S = 5.0
_NOT_YET_VALID, _EXPIRED, _OTHER_HOST, _OTHER_ADDRESS = 9, 10, 62, 64  # OpenSSL's X509_V_ERR_…
_FOR_PROGRAMMERS = re.compile(r"^\[[^]]*\] *|^_ssl\.c:\d+: *|:? *\(_ssl\.c:\d+\)")
_WITHOUT_MESSAGE = {
    "ConnectTimeout": "no connection in time",
    "ReadTimeout": "no answer in time",
    "WriteTimeout": "it accepts no more bytes",
}


class WrongVariable(OuterstepError):
    """An environment variable has a value with which HTTP libraries cannot make any connection."""


def ssl_context(ca: Path | None = None, *, trust_env: bool = True) -> ssl.SSLContext | bool:
    """Return what httpx takes as `verify`: the certificates in the PEM file `ca` are trusted besides the usual ones.
    Every HTTP client is made with it. Raises ValueError if the file has none, and WrongVariable, unless `trust_env` is
    False, if the environment names certificates or a proxy that cannot be used."""
    if trust_env:
        _check_environment()
    if ca is None:
        return True
    context = ssl.create_default_context()
    if (fault := _fault_of_certificates(ca, context)) is not None:
        raise ValueError(f"{ca}: {fault}")
    return context


def _fault_of_certificates(file: Path, context: ssl.SSLContext) -> str | None:
    try:
        context.load_verify_locations(file)
    except ssl.SSLError:
        return "it has no certificate in PEM"
    except OSError as error:
        return error.strerror
    return None


# --- what the environment says ------------------------------------------------------------------------------------

_PROXY_SCHEMES = ("http", "https", "socks5", "socks5h")


class Proxy(NamedTuple):
    """A proxy, and the environment variable that names it ("" if the system's settings do)."""

    variable: str
    value: str

    @property
    def url(self) -> str:
        return self.value if "://" in self.value else f"http://{self.value}"

    def __str__(self) -> str:
        """The variable with its value, without the user's name and password."""
        shown = re.sub(r"[^/]*@", "…@", self.value, count=1)
        return f"{self.variable}={shown}" if self.variable else shown


def proxy_of(url: str) -> Proxy | None:
    """Return the proxy through which HTTP clients request `url`, None without one."""
    parts = urlsplit(url)
    if proxy_bypass(parts.hostname or ""):
        return None
    found = _proxies()
    return found.get(parts.scheme) or found.get("all")


def _proxies() -> dict[str, Proxy]:
    """Return the proxies for http, https and all addresses."""
    found = {}
    for scheme, value in getproxies().items():
        if scheme in ("http", "https", "all"):
            names = (name for name in os.environ if name.lower() == f"{scheme}_proxy" and os.environ[name] == value)
            found[scheme] = Proxy(next(names, ""), value)
    return found


def _check_environment() -> None:
    """Raise WrongVariable if a client could not even be made, or would trust no certificate at all."""
    for proxy in _proxies().values():
        if (fault := _fault_of_proxy(proxy)) is not None:
            raise WrongVariable(f"{proxy}: {fault}")
    if file := os.environ.get("SSL_CERT_FILE"):
        if (fault := _fault_of_certificates(Path(file), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))) is not None:
            raise WrongVariable(f"SSL_CERT_FILE={file}: {fault}")
    elif (folders := os.environ.get("SSL_CERT_DIR")) and not any(map(os.path.isdir, folders.split(os.pathsep))):
        raise WrongVariable(f"SSL_CERT_DIR={folders}: no such directory")


def _fault_of_proxy(proxy: Proxy) -> str | None:
    parts = urlsplit(proxy.url)
    try:
        has_address = bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port
        has_address = False
    if not has_address:
        return "it is not the address of a proxy, such as http://proxy.example.org:3128"
    if parts.scheme not in _PROXY_SCHEMES:
        return f"a proxy is used by http, https or socks5, not by {parts.scheme}"
    if parts.scheme.startswith("socks") and importlib.util.find_spec("socksio") is None:
        return "a SOCKS proxy needs the package socksio; run: pip install 'httpx[socks]'"
    return None


# --- TCP ----------------------------------------------------------------------------------------------------------


def set_congestion_control(opened: socket.socket) -> str:
    """Request BBR on a socket, or on a listening socket for all connections that it accepts. Return what the kernel
    granted.

    BBR keeps up the rate of a long-distance connection through packet loss and after idle times, where CUBIC, Linux's
    default, falls to a fraction of it (Cardwell et al. 2016). Requesting it needs no sysctl, but some kernels lack
    it or allow it to root only.
    """
    option = getattr(socket, "TCP_CONGESTION", None)
    if option is None:
        return "the system's own"
    with suppress(OSError):  # the kernel lacks it, or allows it to root only
        opened.setsockopt(socket.IPPROTO_TCP, option, os.environ.get(CONGESTION_VARIABLE, BBR).encode())
    return opened.getsockopt(socket.IPPROTO_TCP, option, 16).rstrip(b"\0").decode()


def probe_when_idle(opened: socket.socket) -> None:
    """Have the kernel probe the other side of a socket, or of all connections that a listening socket accepts, after
    30 s of silence and every 10 s from then on. Routers forget silent connections: after two hours at the earliest
    according to RFC 5382, but many do within minutes. A connection whose other side has not answered for 70 s is
    closed."""
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES:
        if (option := getattr(socket, name, None)) is not None:  # Linux
            opened.setsockopt(socket.IPPROTO_TCP, option, value)


def starts_slowly_after_silence(congestion_control: str) -> bool | None:
    """Return True if the kernel shrinks the window of a connection with this congestion control that was idle for
    longer than its retransmission timeout, so that each sync begins with slow start again; None if it does not say.

    It is a setting of this process's network namespace (RFC 2861; on by default), and BBR is not affected.
    """
    if congestion_control == BBR:
        return False
    try:
        return SLOW_START_AFTER_IDLE.read_text().strip() != "0"
    except OSError:  # not Linux
        return None


def congestion_text(congestion_control: str) -> str:
    """Return the congestion control, and what it does after a silence, for the log."""
    match starts_slowly_after_silence(congestion_control):
        case True:
            return f"{congestion_control}; each sync begins with slow start, which this avoids: {KEEP_WINDOWS}"
        case False:
            return f"{congestion_control}, which keeps its rate over the silence between syncs"
        case None:
            return congestion_control


# --- errors in words ----------------------------------------------------------------------------------------------


def error_text(error: BaseException, *, trust_env: bool = True) -> str:
    """Return why a request failed, in the words of the system error that caused `error`. If the request went through a
    proxy, this names it. `trust_env`: whether the client uses the environment's proxies."""
    proxy = proxy_of(url) if trust_env and (url := _requested(error)) is not None else None
    return _reason(error) if proxy is None else f"through the proxy {proxy}: {_reason(error)}"


def _requested(error: BaseException) -> str | None:
    """Return the address of the request that ended with this error of httpx; None for any other error."""
    request = getattr(error, "_request", None)  # `request` raises RuntimeError if there is none
    return None if request is None else str(request.url)


def _reason(error: BaseException) -> str:
    for each in causes_of(error):
        if isinstance(each, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted: {each.verify_message.rstrip('.')}"
        if isinstance(each, socket.gaierror):
            return "its name is not known here: " + (each.strerror or "unknown").lower()
        if isinstance(each, FileExistsError | NotADirectoryError):
            return f"{each.filename} is not a directory"
        if isinstance(each, OSError) and not isinstance(each, ssl.SSLError) and each.errno:
            return (f"{each.filename}: " if each.filename else "") + _in_a_sentence(each) + _room(each)
    message = _FOR_PROGRAMMERS.sub("", str(error)).rstrip(".")
    return message or _WITHOUT_MESSAGE.get(type(error).__name__, type(error).__name__)


def _in_a_sentence(error: OSError) -> str:
    text = os.strerror(error.errno or 0)
    if error.strerror and text.lower() not in error.strerror.lower():  # asyncio and others put words around it
        text = error.strerror
    return text[:1].lower() + text[1:]


def _room(error: OSError) -> str:
    """Return how much room the disk of the error's file has, if it is full."""
    if error.errno not in FULL or not error.filename:
        return ""
    with suppress(OSError):
        return f" ({bytes_text(free_bytes(Path(error.filename)))} free there)"
    return ""


def check_address(url: str, error: BaseException) -> None:
    """Raise NoCoordinator if every request to `url` would fail as this one did, with `error`."""
    origin = urlsplit(url)
    address = f"{origin.scheme}://{origin.netloc}"
    proxy = proxy_of(url)
    through = "" if proxy is None else f" (through the proxy {proxy})"
    for each in causes_of(error):
        if isinstance(each, ssl.SSLCertVerificationError):
            raise NoCoordinator(
                f"the certificate of {address} is not trusted{through}: "
                f"{each.verify_message.rstrip('.')}{_advice(each)}"
            ) from error
        if isinstance(each, ssl.SSLError) and each.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
            if proxy is not None and urlsplit(proxy.url).scheme == "https":  # clients speak TLS with the proxy, too
                raise NoCoordinator(f"the proxy {proxy} does not speak HTTPS; most have an http:// address") from error
            raise NoCoordinator(f"{address} does not speak HTTPS{through}; give http://{origin.netloc}") from error
    # A TLS server closes the connection when it receives plain HTTP.
    if type(error).__name__ == "RemoteProtocolError" and origin.scheme == "http" and _speaks_tls(origin):
        raise NoCoordinator(f"{address} speaks only HTTPS; give https://{origin.netloc}") from error


def _advice(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in (_OTHER_HOST, _OTHER_ADDRESS):
        return "; use the name that the certificate is for"
    if error.verify_code in (_NOT_YET_VALID, _EXPIRED):
        return f"; this machine's clock says {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, set it if that is wrong"
    advice = f"; give the certificate, or its issuer's, by --ca FILE or {CA_VARIABLE}"
    for variable in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        if value := os.environ.get(variable):
            return f"{advice} ({variable}={value} replaces the usual certificates)"
    return advice


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, the exception that it was raised from, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _speaks_tls(origin: SplitResult) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it only probes for TLS and sends nothing
    try:
        with socket.create_connection((origin.hostname, origin.port or 80), timeout=_PROBE_S) as connection:
            context.wrap_socket(connection, server_hostname=origin.hostname).close()
    except OSError:
        return False
    return True


def keep_urls_out_of_logs() -> None:
    """Have the HTTP libraries log warnings only: at lower levels they log addresses with signatures."""
    for name in ("httpx", "httpcore", "botocore"):
        logger = logging.getLogger(name)
        logger.setLevel(max(logger.level, logging.WARNING))
