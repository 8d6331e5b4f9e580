"""The objects below a prefix of a bucket, through obstore. Errors are translated for the operator, and large objects
are uploaded in parts.

Coordinators rely on three guarantees of object stores. An object exists completely or not at all. A read after a write
sees it. Of several concurrent attempts to create an object, or to replace the same version of it, only one succeeds.

    s3://BUCKET/PREFIX                 S3, or the endpoint in AWS_ENDPOINT_URL
    s3+https://HOST/BUCKET/PREFIX      another store with the interface of S3, such as R2, Ceph or SeaweedFS; or s3+http
    gs://BUCKET/PREFIX                 Google Cloud Storage
    az://CONTAINER/PREFIX              Azure Blob Storage
"""

import errno
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import obstore
from obstore import exceptions, store

from outerstep.common.connections import proxy_of
from protocol.digest import Buffer
from protocol.errors import OuterstepError, Transient

# The environment variables with credentials that obstore reads, by URL scheme.
SCHEMES = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "s3+https": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "s3+http": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}

PART_BYTES = 8 << 20  # per request, up and down; PARTS_AT_ONCE of an upload are in memory
PARTS_AT_ONCE = 4
MULTIPART_BYTES = PARTS_AT_ONCE * PART_BYTES  # so that no upload has more in memory
STREAM_BYTES = 1 << 20
_REMOVED_AT_ONCE = 1000  # what S3 allows in one request
_PARTS = 9_000  # most parts of one object; S3 allows 10,000
RETRIES: dict[str, Any] = {"max_retries": 10, "retry_timeout": timedelta(seconds=60)}
NO_RETRIES: dict[str, Any] = {"max_retries": 0}
# The first is for parts over the slowest usable network, the second for small requests.
_PART_TIMEOUT, _TIMEOUT = timedelta(minutes=10), timedelta(seconds=30)

Version = dict[str, str]  # an object's version, as obstore returns and accepts it

_BUSY = ("408", "409", "429")  # worth a retry, as is 5xx
_STATUS = re.compile(r"status code: (\d+)")
_UNANSWERED = re.compile(r"Error performing [A-Z]+ (\w+://[^/\s]+).* HTTP error: (.*)")
_CODE = re.compile(r"<Code>(\w+)</Code>")
# These texts are in the errors when there are no credentials: obstore then asks the cloud's metadata service, which
# machines outside the cloud do not have.
_NO_CREDENTIALS = ("/latest/api/token", "/computeMetadata/", "/metadata/identity/", "Account must be specified")
_ANOTHER_REGION = ("redirect without LOCATION", "AuthorizationHeaderMalformed")  # S3's answers


@dataclass(frozen=True)
class Bucket:
    """Where the objects below a URL are. `endpoint`: the address of the store, None for the one that the environment or
    the scheme implies. `prefix` neither begins nor ends with a slash."""

    scheme: str
    name: str
    prefix: str
    endpoint: str | None

    @classmethod
    def of(cls, url: str) -> Self:
        """Raises OuterstepError for a URL that is none of a bucket."""
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES:
            known = ", ".join(f"{each}://" for each in SCHEMES)
            raise OuterstepError(f"{url} is not the URL of a bucket, which begins with one of {known}")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise OuterstepError(
                f"the URL of a bucket has no key, query or fragment: credentials are in {SCHEMES[parts.scheme]}"
            )
        scheme, _, transport = parts.scheme.partition("+")
        path = parts.path.strip("/")
        if not transport:
            name, prefix, endpoint, form = parts.netloc, path, None, "BUCKET/PREFIX"
        else:
            name, _, prefix = path.partition("/")
            endpoint, form = f"{transport}://{parts.netloc}", "HOST/BUCKET/PREFIX"
        if not name or not parts.netloc:
            raise OuterstepError(f"{url} names no bucket: use {parts.scheme}://{form}")
        return cls(scheme, name, prefix, endpoint)

    @property
    def url(self) -> str:
        """The URL without the endpoint, as obstore reads it."""
        return f"{self.scheme}://{self.name}/{self.prefix}".rstrip("/")


class Objects:
    """The objects below a URL; `str(objects)` is the URL. Thread-safe.

    Methods raise Transient for errors worth a retry, and OuterstepError for others.
    """

    def __init__(self, url: str, retries: dict[str, Any] | None = None) -> None:
        """`retries`: obstore's retry_config; RETRIES by default."""
        self._retries = RETRIES if retries is None else retries
        self._url = url.rstrip("/")
        self.bucket = Bucket.of(self._url)
        self._credentials = SCHEMES[urlsplit(self._url).scheme]
        self._small, self._large = self._opened(_TIMEOUT), self._opened(_PART_TIMEOUT)

    def __str__(self) -> str:
        return self._url

    def name(self, path: str) -> str:
        """Return the URL of an object, for messages."""
        return f"{self._url}/{path}" if path else self._url

    # --- reading --------------------------------------------------------------------------------------------------

    def within(self, folder: str) -> Iterator[tuple[str, int]]:
        """Yield (name within `folder`, size in bytes) of each object below it."""
        with self._explained("list"):
            for batch in obstore.list(self._small, folder):
                for each in batch:
                    yield each["path"].removeprefix(f"{folder}/"), each["size"]

    def get(self, path: str) -> tuple[bytes, Version] | None:
        """Return the content and version of a small object; None if it does not exist."""
        try:
            with self._explained("read", path):
                found = obstore.get(self._small, path)
                return bytes(found.bytes()), _version(found.meta)
        except FileNotFoundError:
            return None

    def open(self, path: str) -> "ObjectReader":
        """Open an object for reading. Raises FileNotFoundError."""
        with self._explained("read", path):
            return ObjectReader(self, path, int(obstore.head(self._small, path)["size"]))

    def size(self, path: str) -> int | None:
        """Return the size of an object in bytes; None if it does not exist."""
        try:
            with self._explained("read", path):
                return int(obstore.head(self._small, path)["size"])
        except FileNotFoundError:
            return None

    def modified_at(self, path: str) -> float:
        """Return when an object was created or replaced, in seconds since 1970 by the store's clock. Raises
        FileNotFoundError."""
        with self._explained("read", path):
            return float(obstore.head(self._small, path)["last_modified"].timestamp())

    def download(self, path: str, write: Callable[[memoryview], object]) -> int:
        """Pass the whole object to `write`, in pieces. Return its size in bytes. Raises FileNotFoundError, and what
        `write` raises."""
        with self._explained("read", path):
            found = obstore.get(self._large, path)
            size, got = int(found.meta["size"]), 0
            for piece in found.stream(min_chunk_size=STREAM_BYTES):
                view = memoryview(piece)
                got += len(view)
                write(view)
        if got != size:
            raise Transient(f"{self.name(path)} broke off after {got} of {size} bytes")
        return size

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop) of an object. Raises FileNotFoundError."""
        with self._explained("read", path):
            return bytes(obstore.get_range(self._large, path, start=start, end=stop))

    def read_into(self, path: str, memory: memoryview, start: int) -> None:
        """Fill `memory` with the bytes of an object from offset `start` on. Raises FileNotFoundError."""
        with self._explained("read", path):
            found, got = obstore.get(self._large, path, options={"range": (start, start + len(memory))}), 0
            for piece in found.stream(min_chunk_size=STREAM_BYTES):
                view = memoryview(piece)[: len(memory) - got]
                memory[got : got + len(view)] = view
                got += len(view)
        if got != len(memory):
            raise Transient(f"{self.name(path)} broke off after {got} of {len(memory)} bytes")

    # --- writing --------------------------------------------------------------------------------------------------

    def create(self, path: str, content: bytes) -> Version | None:
        """Create a small object and return its version; None if it exists. If the answer to an earlier attempt was
        lost, the existing object may be the one that this call has created."""
        return self._put_if(path, content, "create")

    def create_from(self, path: str, source: Buffer | Path) -> bool:
        """Create an object from bytes or a local file. Return False if it exists, also if the answer to an earlier
        attempt was lost. More than MULTIPART_BYTES are sent in parts."""
        size = source.stat().st_size if isinstance(source, Path) else len(memoryview(source).cast("B"))
        if size > MULTIPART_BYTES:
            # obstore cannot complete an upload in parts on condition. So of two that begin at once the later one
            # replaces the earlier: callers name objects by their digest, and both have the same bytes.
            if self.size(path) is not None:
                return False
            self._put_in_parts(path, size, _input(source))
            return True
        try:
            with self._explained("write", path):
                obstore.put(self._large, path, _input(source), mode="create", use_multipart=False)
                return True
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            return False

    def replace(self, path: str, content: bytes, version: Version) -> Version | None:
        """Replace version `version` of a small object, and return the new version; None if the object no longer has
        that version."""
        return self._put_if(path, content, version)

    def _put_in_parts(self, path: str, size: int, content: Any) -> None:
        """Create or replace an object of `size` bytes."""
        try:
            with self._explained("write", path):
                part_bytes = max(PART_BYTES, -(-size // _PARTS))
                obstore.put(self._large, path, content, chunk_size=part_bytes, max_concurrency=PARTS_AT_ONCE)
        except FileNotFoundError as error:  # a lifecycle rule of the bucket or an operator has removed the parts
            raise Transient(f"the parts of {self.name(path)} were removed before the upload was complete") from error

    def copy(self, path: str, new_path: str) -> None:
        """Copy an object within the store, over an object that has the new name. Raises FileNotFoundError."""
        with self._explained("write", new_path):
            obstore.copy(self._large, path, new_path)

    def delete(self, paths: Sequence[str]) -> None:
        """Remove objects, if they exist."""
        for start in range(0, len(paths), _REMOVED_AT_ONCE):
            some = list(paths[start : start + _REMOVED_AT_ONCE])
            try:
                with self._explained("remove", some[0]):
                    obstore.delete(self._small, some)
            except FileNotFoundError:
                pass  # some stores report missing objects

    def _put_if(self, path: str, content: bytes, mode: Any) -> Version | None:
        try:
            with self._explained("write", path):
                return _version(obstore.put(self._small, path, content, mode=mode, use_multipart=False))
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError, FileNotFoundError):
            return None  # FileNotFoundError: the object was removed

    def _opened(self, timeout: timedelta) -> Any:
        options = {"connect_timeout": timedelta(seconds=10), "timeout": timeout, "allow_http": True}  # AWS_ENDPOINT_URL
        try:
            from_url: Any = store.from_url  # Any, because its annotations only allow particular stores
            of_endpoint = {} if self.bucket.endpoint is None else {"endpoint": self.bucket.endpoint}
            return from_url(self.bucket.url, client_options=options, retry_config=self._retries, **of_endpoint)
        except (exceptions.BaseError, ValueError) as error:
            if any(each in str(error) for each in _NO_CREDENTIALS):
                raise self._no_credentials() from error
            raise OuterstepError(f"{self} cannot be opened: {_first_line(str(error))}") from error

    @contextmanager
    def _explained(self, action: str, path: str = "") -> Iterator[None]:
        """Raise the store's errors with a message for the operator. For an object that does not exist, raise
        FileNotFoundError."""
        try:
            yield
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
                raise self._no_bucket() from error
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.name(path)) from error
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            raise
        except exceptions.BaseError as error:
            raise self._explain(str(error), action, self.name(path)) from error

    def _explain(self, text: str, action: str, name: str) -> OuterstepError:
        """Return an error with a message for the operator. `text`: the text of the store's error."""
        status, code = _STATUS.search(text), _CODE.search(text)
        answer = f"{status[1]}{f' {code[1]}' if code else ''}" if status else ""
        if "NoSuchBucket" in text or "ContainerNotFound" in text:
            return self._no_bucket()
        if any(each in text for each in _NO_CREDENTIALS):
            return self._no_credentials()
        if status and status[1] in ("401", "403"):
            return OuterstepError(
                f"this machine may not {action} {name} ({answer}): check that the key in {self._credentials} is right "
                "and allows it (docs/deployment.md)"
            )
        if any(each in text for each in _ANOTHER_REGION):
            return OuterstepError(
                f"the bucket of {name} is in another region than the request: set AWS_REGION to the bucket's"
            )
        if status and status[1].startswith("4") and status[1] not in _BUSY:
            return OuterstepError(f"cannot {action} {name}: the store answers {answer}")
        if status:
            return Transient(f"cannot {action} {name}: the store answers {answer}")
        if unanswered := _UNANSWERED.search(_first_line(text)):
            proxy = proxy_of(unanswered[1])
            where = unanswered[1] if proxy is None else f"{unanswered[1]}, through the proxy {proxy}"
            reached = f"nothing answers at {where} ({unanswered[2]}): check that it can be reached from here"
            return Transient(f"cannot {action} {name}: {reached}")
        return Transient(f"cannot {action} {name}: {_first_line(text)}")

    def _no_credentials(self) -> OuterstepError:
        return OuterstepError(f"there are no credentials for {self}: set {self._credentials} (docs/deployment.md)")

    def _no_bucket(self) -> OuterstepError:
        return OuterstepError(f"there is no bucket {self.bucket.name!r} for {self}: create it, or give another one")


class ObjectReader:
    """An object that is open for reading. It keeps PART_BYTES in memory."""

    def __init__(self, objects: Objects, path: str, size: int) -> None:
        self.size = size
        self._objects, self._path = objects, path
        self._lock, self._held, self._at = threading.Lock(), memoryview(b""), 0

    def read_into(self, memory: memoryview, at: int) -> int:
        wanted = max(0, min(len(memory), self.size - at))
        if wanted > PART_BYTES or wanted == self.size:  # without a copy in between
            self._objects.read_into(self._path, memory[:wanted], at)
            return wanted
        with self._lock:
            filled = 0
            while filled < wanted:
                part = self._from(at + filled)[: wanted - filled]
                memory[filled : filled + len(part)] = part
                filled += len(part)
        return wanted

    def _from(self, at: int) -> memoryview:
        """Return at least one byte from offset `at` on."""
        if not self._at <= at < self._at + len(self._held):
            self._held = memoryview(self._objects.read(self._path, at, min(at + PART_BYTES, self.size)))
            self._at = at
            if not self._held:
                raise OSError(errno.EIO, os.strerror(errno.EIO), self._objects.name(self._path))
        return self._held[at - self._at :]

    def close(self) -> None:
        self._held = memoryview(b"")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _input(source: Buffer | Path) -> Any:
    return source if isinstance(source, Path) else memoryview(source).cast("B")


def _version(meta: Any) -> Version:
    return {key: meta[key] for key in ("e_tag", "version") if meta.get(key) is not None}


def _first_line(text: str) -> str:
    """Return the first line of an error's text; the other lines are for the store's developers."""
    return text.partition("\n")[0].partition(": <")[0]
