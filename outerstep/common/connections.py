"""Connections to a coordinator, for both clients: trusted certificates, TCP's congestion control, and errors in words.

Libraries wrap the system's errors, and `str` of those is for programmers (`[Errno 111]`, `_ssl.c:1006`). So these
functions look for the system's own error among the causes.
"""

import logging
import os
import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from protocol.errors import NoCoordinator

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


def ssl_context(ca: Path | None) -> ssl.SSLContext | bool:
    """Return what httpx takes as `verify`: the certificates in the PEM file `ca` are trusted besides the usual ones.
    Raises ValueError if the file has none."""
    if ca is None:
        return True
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise ValueError(f"{ca} has no certificate in PEM") from error
    except OSError as error:
        raise ValueError(f"{ca}: {error.strerror}") from error
    return context


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


def error_text(error: BaseException) -> str:
    """Return why a request failed, in the words of the system error that caused `error`."""
    for each in causes_of(error):
        if isinstance(each, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted: {each.verify_message.rstrip('.')}"
        if isinstance(each, socket.gaierror):
            return "its name is not known here: " + (each.strerror or "unknown").lower()
        if isinstance(each, FileExistsError | NotADirectoryError):
            return f"{each.filename} is not a directory"
        if isinstance(each, OSError) and not isinstance(each, ssl.SSLError) and each.errno:
            return (f"{each.filename}: " if each.filename else "") + os.strerror(each.errno).lower()
    message = _FOR_PROGRAMMERS.sub("", str(error)).rstrip(".")
    return message or _WITHOUT_MESSAGE.get(type(error).__name__, type(error).__name__)


def check_address(url: str, error: BaseException) -> None:
    """Raise NoCoordinator if every request to `url` would fail as this one did, with `error`."""
    origin = urlsplit(url)
    address = f"{origin.scheme}://{origin.netloc}"
    for each in causes_of(error):
        if isinstance(each, ssl.SSLCertVerificationError):
            raise NoCoordinator(
                f"the certificate of {address} is not trusted: {each.verify_message.rstrip('.')}{_advice(each)}"
            ) from error
        if isinstance(each, ssl.SSLError) and each.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
            raise NoCoordinator(f"{address} does not speak HTTPS; give http://{origin.netloc}") from error
    # A TLS server closes the connection when it receives plain HTTP.
    if type(error).__name__ == "RemoteProtocolError" and origin.scheme == "http" and _speaks_tls(origin):
        raise NoCoordinator(f"{address} speaks only HTTPS; give https://{origin.netloc}") from error


def _advice(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in (_OTHER_HOST, _OTHER_ADDRESS):
        return "; use the name that the certificate is for"
    if error.verify_code in (_NOT_YET_VALID, _EXPIRED):
        return f"; this machine's clock says {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, set it if that is wrong"
    return f"; give the certificate, or its issuer's, by --ca FILE or {CA_VARIABLE}"


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
