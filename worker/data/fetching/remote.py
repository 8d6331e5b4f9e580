"""Files behind a URL, read in pieces from any byte on: what `data.source` may name instead of a directory.

    https://, http://       any server of files; one that knows no ranges sends a file from its beginning on each try
    hf://datasets/A/B@REV/… a repository of the Hugging Face hub, which is https with that one's addresses and token
    s3://, gs://, az://     an object store, by obstore (the extra `remote`), with the credentials of its environment

Faults are of two kinds: Transient, which another try may mend, and DataError, which none does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import quote

import httpx

from outerstep.common.answers import check_not_encoded, header_number, read_body
from outerstep.common.connections import error_text
from protocol.errors import BeyondLimits, Transient
from worker.errors import DataError

HTTP, HUB, STORES = ("https://", "http://"), ("hf://",), ("s3://", "gs://", "az://")

_RANGE_BYTES = 8 << 20  # of an object store: what is in memory at once
_TIMEOUT = httpx.Timeout(30.0, pool=None)  # of silence, not of a transfer
_BUSY = {408, 425, 429}  # beside 5xx: what another try may mend
_CLOSED = {401, 403}
_AGAIN = "it was cut or altered; put the set there again"


class Remote(Protocol):
    """The files below one URL. Any thread may read."""

    def url(self, name: str) -> str:
        """Return the address of file `name`, as people are told."""

    def read(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes [start, stop) of file `name`; fewer where the connection ends before. Raises Transient, and
        DataError, also where the file ends before."""

    def whole(self, name: str, limit_bytes: int) -> bytes:
        """Return file `name`. Raises Transient, and DataError, also where it has more than `limit_bytes`."""


def is_remote(source: str) -> bool:
    """Return True if `data.source` is a URL."""
    return source.startswith((*HTTP, *HUB, *STORES))


def open_remote(source: str) -> Remote:
    """Return the files below the URL `source`. Raises DataError if what it needs is not installed."""
    if source.startswith(HTTP):
        return HttpFiles(source)
    return _hub(source) if source.startswith(HUB) else StoreFiles(source)


class HttpFiles:
    """The files below `base`. `shown` is what people know it by."""

    def __init__(self, base: str, *, headers: dict[str, str] | None = None, shown: str | None = None) -> None:
        self._base, self._shown = base.rstrip("/"), (shown or base).rstrip("/")
        headers = {**(headers or {}), "Accept-Encoding": "identity"}
        self._http = httpx.Client(headers=headers, timeout=_TIMEOUT, follow_redirects=True)

    def url(self, name: str) -> str:
        return f"{self._shown}/{name}"

    def read(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        with self._get(name, {"Range": f"bytes={start}-{stop - 1}"}) as answer:
            check_not_encoded(answer)
            ranged = answer.status_code == 206
            size = (
                answer.headers.get("Content-Range", "").rpartition("/")[2]
                if ranged
                else answer.headers.get("Content-Length", "")
            )
            if (known := header_number(size)) is not None and known < stop:
                raise _ends_early(self.url(name), known, stop)
            position = start if ranged else 0  # a server that knows no ranges sends the whole file
            for piece in answer.iter_raw():
                ours = piece[max(start - position, 0) : max(stop - position, 0)]
                if ours:
                    yield ours
                position += len(piece)
                if position >= stop:
                    return

    def whole(self, name: str, limit_bytes: int) -> bytes:
        with self._get(name, {}) as answer:
            return read_body(answer, limit_bytes)

    @contextmanager
    def _get(self, name: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
        try:
            with self._http.stream("GET", f"{self._base}/{quote(name)}", headers=headers) as answer:
                self._check(name, answer)
                yield answer
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise DataError(f"{self.url(name)} cannot be fetched: {error}") from error
        except httpx.TransportError as error:
            raise Transient(f"{self.url(name)} cannot be fetched: {error_text(error)}") from error
        except (httpx.RequestError, BeyondLimits) as error:  # too many redirects; no token set's answer
            raise DataError(f"{self.url(name)} cannot be fetched: {error}") from error

    def _check(self, name: str, answer: httpx.Response) -> None:
        status, url = answer.status_code, self.url(name)
        if status in (200, 206):
            return
        if status in _BUSY or status >= 500:
            asked = header_number(answer.headers.get("Retry-After", ""))
            raise Transient(f"{url} answers {status}", retry_after_s=asked)
        if status == 416:
            raise DataError(f"{url} ends before what its index names: {_AGAIN}")
        if status in _CLOSED:
            raise DataError(
                f"{url} answers {status}: this machine may not read it; make it public, or where it is hf:// log in "
                "with `hf auth login` or set HF_TOKEN"
            )
        raise _missing(url, str(status))


def _hub(source: str) -> HttpFiles:
    """Return the files of hf://[datasets/]ORGANISATION/NAME[@REVISION][/FOLDER]."""
    path = source.removeprefix("hf://")
    kind = "dataset" if path.startswith("datasets/") else "model"
    organisation, _, rest = path.removeprefix("datasets/").strip("/").partition("/")
    repository, _, folder = rest.partition("/")
    name, _, revision = repository.partition("@")
    if not organisation or not name:
        raise DataError(f"data.source = {source!r} is no repository of the hub: hf://datasets/NAME/SET[@REV][/FOLDER]")
    from huggingface_hub import get_token, hf_hub_url

    file = f"{folder}/x" if folder else "x"  # the library wants one
    address = hf_hub_url(f"{organisation}/{name}", file, repo_type=kind, revision=revision or None)
    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return HttpFiles(address.removesuffix("/x"), headers=headers, shown=source)


class StoreFiles:
    """The files below the URL of an object store."""

    def __init__(self, source: str) -> None:
        try:
            from obstore import exceptions, store
        except ImportError as error:
            raise DataError(f"data.source = {source!r} needs obstore: pip install 'outerstep[remote]'") from error
        self._source, self._errors = source.rstrip("/"), exceptions
        options: Any = {
            "connect_timeout": timedelta(seconds=10),
            "read_timeout": timedelta(seconds=30),
            "timeout": timedelta(minutes=10),
            "allow_http": True,  # where AWS_ENDPOINT_URL or its like says so: a store of one's own
        }
        try:
            from_url: Any = store.from_url  # its annotations are of one store or another, this is of any
            self._store = from_url(
                self._source,
                client_options=options,
                retry_config={"max_retries": 0},  # the caller tries again, and says so
            )
        except (exceptions.BaseError, ValueError) as error:
            raise DataError(f"data.source = {source!r} cannot be opened: {_first_line(error)}") from error

    def url(self, name: str) -> str:
        return f"{self._source}/{name}"

    def read(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        import obstore

        with self._telling(name):
            size = obstore.head(self._store, name)["size"]
            if size < stop:
                raise _ends_early(self.url(name), size, stop)
            for at in range(start, stop, _RANGE_BYTES):
                yield bytes(obstore.get_range(self._store, name, start=at, end=min(at + _RANGE_BYTES, stop)))

    def whole(self, name: str, limit_bytes: int) -> bytes:
        import obstore

        with self._telling(name):
            size = obstore.head(self._store, name)["size"]
            if size > limit_bytes:
                raise _too_long(self.url(name), limit_bytes)
            return bytes(obstore.get_range(self._store, name, start=0, end=size)) if size else b""

    @contextmanager
    def _telling(self, name: str) -> Iterator[None]:
        """Raise what the store raises as the two kinds of faults."""
        url, errors = self.url(name), self._errors
        try:
            yield
        except FileNotFoundError as error:
            raise _missing(url, "the store") from error
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
            raise DataError(f"{url}: this machine may not read it: {_first_line(error)}") from error
        except errors.BaseError as error:
            raise Transient(f"{url} cannot be fetched: {_first_line(error)}") from error


def _missing(url: str, answer: str) -> DataError:
    return DataError(f"{url} is not there ({answer}); compare data.source with where the token set was put")


def _ends_early(url: str, size: int, wanted: int) -> DataError:
    return DataError(f"{url} has {size} bytes, the index of its set names {wanted}: {_AGAIN}")


def _too_long(url: str, limit_bytes: int) -> DataError:
    return DataError(f"{url} has more than {limit_bytes} bytes: it is not the index of a token set")


def _first_line(error: Exception) -> str:
    """Return what the store says; what follows is for its makers."""
    return str(error).partition("\n")[0]
