"""Files below a URL: what `data.source` may name instead of a directory.

    https://, http://       any file server
    hf://datasets/A/B@REV/… a repository of the Hugging Face hub: https with the hub's addresses and its token
    s3://, gs://, az://, s3+https://
                            an object store (outerstep/common/objects.py; the extra `remote`)

There are two kinds of faults: Transient, which retrying may fix, and DataError, which it does not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol
from urllib.parse import quote

import httpx

from outerstep.common.answers import check_not_encoded, header_number, read_body
from outerstep.common.connections import error_text, ssl_context
from protocol.errors import BeyondLimits, OuterstepError, Transient
from worker.errors import DataError

HTTP, HUB = ("https://", "http://"), ("hf://",)
STORES = ("s3://", "s3+https://", "s3+http://", "gs://", "az://")

_RANGE_BYTES = 8 << 20  # read at once from an object store, and held in memory
_TIMEOUT = httpx.Timeout(30.0, pool=None)  # without any data; a transfer may take longer
_BUSY = {408, 425, 429}  # transient, like 5xx
_FORBIDDEN = {401, 403}
_AGAIN = "it was cut short or altered; upload the set again"


class RemoteFiles(Protocol):
    """The files below one URL. Thread-safe."""

    def url(self, name: str) -> str:
        """Return the address of file `name`, for messages."""

    def read(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes [start, stop) of file `name`. Raises Transient, and DataError, also if the file ends
        early."""

    def whole(self, name: str, limit_bytes: int) -> bytes:
        """Return the content of file `name`. Raises Transient, and DataError, also if it exceeds `limit_bytes`."""


def is_remote(source: str) -> bool:
    """Return True if `data.source` is a URL."""
    return source.startswith((*HTTP, *HUB, *STORES))


def open_remote(source: str) -> RemoteFiles:
    """Return the files below the URL `source`. Raises DataError if a package that it needs is not installed."""
    if source.startswith(HTTP):
        return HttpFiles(source)
    return _hub(source) if source.startswith(HUB) else StoreFiles(source)


class HttpFiles:
    """The files below `base`, an https or http URL. `shown` replaces `base` in messages."""

    def __init__(self, base: str, *, headers: dict[str, str] | None = None, shown: str | None = None) -> None:
        self._base, self._shown = base.rstrip("/"), (shown or base).rstrip("/")
        headers = {**(headers or {}), "Accept-Encoding": "identity"}
        self._http = httpx.Client(headers=headers, timeout=_TIMEOUT, follow_redirects=True, verify=ssl_context())

    def url(self, name: str) -> str:
        return f"{self._shown}/{name}"

    def read(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        with self._get(name, {"Range": f"bytes={start}-{stop - 1}"}) as answer:
            check_not_encoded(answer)
            position = start if answer.status_code == 206 else 0  # a server without range requests sends the whole file
            for chunk in answer.iter_raw():
                ours = chunk[max(start - position, 0) : max(stop - position, 0)]
                if ours:
                    yield ours
                position += len(chunk)
                if position >= stop:
                    return
        raise _ends_early(self.url(name), position, stop)

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
        except (httpx.RequestError, BeyondLimits) as error:  # too many redirects; an answer that no token set has
            raise DataError(f"{self.url(name)} cannot be fetched: {error}") from error

    def _check(self, name: str, answer: httpx.Response) -> None:
        status, url = answer.status_code, self.url(name)
        if status in (200, 206):
            return
        if status in _BUSY or status >= 500:
            asked = header_number(answer.headers.get("Retry-After", ""))
            raise Transient(f"{url}: the server answers {status}", retry_after_s=asked)
        if status == 416:
            raise DataError(f"{url} is shorter than its index requires: {_AGAIN}")
        if status in _FORBIDDEN:
            raise DataError(
                f"{url}: the server answers {status}: this machine has no permission to read it; make it public, or "
                "for hf:// log in with `hf auth login` or set HF_TOKEN"
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
        raise DataError(
            f"data.source = {source!r} is not a repository of the hub: expected hf://datasets/NAME/SET[@REV][/FOLDER]"
        )
    from huggingface_hub import get_token, hf_hub_url

    file = f"{folder}/x" if folder else "x"  # the library requires a file name
    address = hf_hub_url(f"{organisation}/{name}", file, repo_type=kind, revision=revision or None)
    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return HttpFiles(address.removesuffix("/x"), headers=headers, shown=source)


class StoreFiles:
    """The files below the URL of an object store."""

    def __init__(self, source: str) -> None:
        try:
            from outerstep.common.objects import NO_RETRIES, Objects
        except ImportError as error:
            raise DataError(f"data.source = {source!r} needs obstore: pip install 'outerstep[remote]'") from error
        try:
            self._objects = Objects(source, NO_RETRIES)  # the caller retries and logs it
        except OuterstepError as error:
            raise DataError(f"data.source = {source!r} cannot be opened: {error}") from error

    def url(self, name: str) -> str:
        return self._objects.name(name)

    def read(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        with self._translated(name):
            size = self._size(name)
            if size < stop:
                raise _ends_early(self.url(name), size, stop)
            for at in range(start, stop, _RANGE_BYTES):
                yield self._objects.read(name, at, min(at + _RANGE_BYTES, stop))

    def whole(self, name: str, limit_bytes: int) -> bytes:
        with self._translated(name):
            size = self._size(name)
            if size > limit_bytes:
                raise _too_long(self.url(name), limit_bytes)
            return self._objects.read(name, 0, size) if size else b""

    def _size(self, name: str) -> int:
        if (size := self._objects.size(name)) is None:
            raise _missing(self.url(name), "the store")
        return size

    @contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        """Raise the store's errors as Transient and DataError."""
        try:
            yield
        except FileNotFoundError as error:
            raise _missing(self.url(name), "the store") from error
        except (Transient, DataError):
            raise
        except OuterstepError as error:
            raise DataError(str(error)) from error


def _missing(url: str, answer: str) -> DataError:
    return DataError(f"{url} does not exist ({answer}); check that data.source is where the token set was uploaded")


def _ends_early(url: str, size: int, wanted: int) -> DataError:
    return DataError(f"{url} has {size} bytes, but the index of its set requires {wanted}: {_AGAIN}")


def _too_long(url: str, limit_bytes: int) -> DataError:
    return DataError(f"{url} has more than {limit_bytes} bytes: not the index of a token set")
