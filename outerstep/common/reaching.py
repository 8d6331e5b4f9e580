"""The way to a coordinator: what lies in it, in words, and whose certificates are trusted. For both clients.

Libraries wrap what the system says, and `str` of it is for programmers (`[Errno 111]`, `_ssl.c:1006`): here the
system's own error is looked for in what they raised from it.
"""

import os
import re
import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from protocol.errors import NoCoordinator

CA_VARIABLE = "OUTERSTEP_CA"

_PROBE_S = 5.0
_NOT_YET_VALID, _EXPIRED, _OTHER_HOST, _OTHER_ADDRESS = 9, 10, 62, 64  # OpenSSL's X509_V_ERR_…
_FOR_PROGRAMMERS = re.compile(r"^\[[^]]*\] *|^_ssl\.c:\d+: *|:? *\(_ssl\.c:\d+\)")
_SILENT = {
    "ConnectTimeout": "no connection in time",
    "ReadTimeout": "no answer in time",
    "WriteTimeout": "it takes no more bytes",
}


def trusting(ca: Path | None) -> ssl.SSLContext | bool:
    """Return what httpx takes as `verify`: the certificates in the PEM file `ca` are trusted beside the usual ones.
    Raises ValueError for a file that has none."""
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


def in_words(error: BaseException) -> str:
    """Return why a request came to nothing, by the error of the system that it was raised from."""
    for each in causes_of(error):
        if isinstance(each, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted: {each.verify_message.rstrip('.')}"
        if isinstance(each, socket.gaierror):
            return "its name is not known here: " + (each.strerror or "unknown").lower()
        if isinstance(each, FileExistsError | NotADirectoryError):
            return f"{each.filename} is not a directory"
        if isinstance(each, OSError) and not isinstance(each, ssl.SSLError) and each.errno:
            return (f"{each.filename}: " if each.filename else "") + os.strerror(each.errno).lower()
    said = _FOR_PROGRAMMERS.sub("", str(error)).rstrip(".")
    return said or _SILENT.get(type(error).__name__, type(error).__name__)


def check_address(url: str, error: BaseException) -> None:
    """Raise NoCoordinator where another request to `url` would fail as this one did, with `error`."""
    origin = urlsplit(url)
    address = f"{origin.scheme}://{origin.netloc}"
    for each in causes_of(error):
        if isinstance(each, ssl.SSLCertVerificationError):
            raise NoCoordinator(
                f"the certificate of {address} is not trusted: {each.verify_message.rstrip('.')}{_advice(each)}"
            ) from error
        if isinstance(each, ssl.SSLError) and each.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
            raise NoCoordinator(f"{address} does not speak HTTPS; give http://{origin.netloc}") from error
    # What a server with a certificate does where it is spoken to without.
    if type(error).__name__ == "RemoteProtocolError" and origin.scheme == "http" and _speaks_tls(origin):
        raise NoCoordinator(f"{address} speaks HTTPS alone; give https://{origin.netloc}") from error


def _advice(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in (_OTHER_HOST, _OTHER_ADDRESS):
        return "; give the name that the certificate is for"
    if error.verify_code in (_NOT_YET_VALID, _EXPIRED):
        return f"; this machine's clock says {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, set it if that is wrong"
    return f"; give its own certificate, or that of who signed it, by --ca FILE or {CA_VARIABLE}"


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, what it was raised from, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _speaks_tls(origin: SplitResult) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it is asked for TLS, and told nothing
    try:
        with socket.create_connection((origin.hostname, origin.port or 80), timeout=_PROBE_S) as connection:
            context.wrap_socket(connection, server_hostname=origin.hostname).close()
    except OSError:
        return False
    return True
