"""The objects below a prefix of a bucket, by obstore: its errors become sentences, and large objects go up in parts.

What an object store promises, and backups rest on: an object is there whole or not at all, whoever reads after it was
written sees it, and of several who create it, or put it in the place of one same version, one alone succeeds.
"""

import errno
import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self
from urllib.parse import urlsplit

import obstore
from obstore import exceptions, store

from protocol.errors import OuterstepError, Transient

# Credentials by the scheme of an address: the variables that obstore reads.
SCHEMES = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}

PART_BYTES = 8 << 20  # a request's, up and down; of those that go up, PARTS_AT_ONCE are in memory
PARTS_AT_ONCE = 4
_PARTS = 9_000  # of one object: S3 takes 10,000
RETRIES: dict[str, Any] = {"max_retries": 10, "retry_timeout": timedelta(seconds=60)}
# For the parts, over the slowest line that is worth it, and for all that is small: a removal has come to an end, one
# way or the other, long before the lock that allowed it may be another's (`lease.MARGIN_S`).
_PART_TIMEOUT, _TIMEOUT = timedelta(minutes=10), timedelta(seconds=30)

Version = dict[str, str]  # of an object, as obstore tells and takes it

_BUSY = ("408", "409", "429")  # beside 5xx: what another try may mend
_STATUS = re.compile(r"status code: (\d+)")
_UNANSWERED = re.compile(r"Error performing [A-Z]+ (\w+://[^/\s]+).* HTTP error: (.*)")
_CODE = re.compile(r"<Code>(\w+)</Code>")
# What is in the errors of who has none: without variables, the machine itself is asked, which is of a cloud or not.
_NO_CREDENTIALS = ("/latest/api/token", "/computeMetadata/", "/metadata/identity/", "Account must be specified")
_ANOTHER_REGION = ("redirect without LOCATION", "AuthorizationHeaderMalformed")  # how S3 says it


class Objects:
    """The objects below the URL `url`. Any thread may use it. `str` of it is the URL.

    Its methods raise Transient for what another try may mend, and OuterstepError for what none does.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        parts = urlsplit(self._url)
        self._bucket, self._credentials = parts.netloc, SCHEMES[parts.scheme]
        if not self._bucket:
            raise OuterstepError(f"{url} names no bucket: {parts.scheme}://BUCKET/PREFIX")
        self._small, self._large = self._opened(_TIMEOUT), self._opened(_PART_TIMEOUT)

    def __str__(self) -> str:
        return self._url

    def name(self, path: str) -> str:
        """Return the address of an object, as people are told."""
        return f"{self._url}/{path}" if path else self._url

    # --- reading --------------------------------------------------------------------------------------------------

    def within(self, folder: str) -> Iterator[tuple[str, int]]:
        """Yield the name within `folder` and the bytes of each object of which the path begins with it and `/`."""
        with self._telling("list"):
            for batch in obstore.list(self._small, folder):
                for each in batch:
                    yield each["path"].removeprefix(f"{folder}/"), each["size"]

    def top(self) -> set[str]:
        """Return the first parts of the paths of all objects."""
        with self._telling("list"):
            found = obstore.list_with_delimiter(self._small)
        return {*found["common_prefixes"], *(each["path"] for each in found["objects"])}

    def get(self, path: str) -> tuple[bytes, Version] | None:
        """Return a small object, and its version; None if it is not there."""
        try:
            with self._telling("read", path):
                found = obstore.get(self._small, path)
                return bytes(found.bytes()), _version(found.meta)
        except FileNotFoundError:
            return None

    def open(self, path: str) -> "ObjectReader":
        """Open an object to be read, as a `Reader`. Raises FileNotFoundError."""
        with self._telling("read", path):
            return ObjectReader(self, path, int(obstore.head(self._small, path)["size"]))

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Return some bytes of an object. Raises FileNotFoundError."""
        with self._telling("read", path):
            return bytes(obstore.get_range(self._large, path, start=start, end=stop))

    # --- writing --------------------------------------------------------------------------------------------------

    def create(self, path: str, content: bytes) -> Version | None:
        """Make a small object; return its version, or None if there is one. That may be this very one, where the answer
        to an earlier try was lost."""
        return self._put_if(path, content, "create")

    def replace(self, path: str, content: bytes, version: Version) -> Version | None:
        """Put a small object in the place of the one with this version; return its own, or None where that is gone."""
        return self._put_if(path, content, version)

    def upload(self, path: str, size: int, pieces: Iterable[bytes | bytearray]) -> None:
        """Make an object of `pieces`, of so many bytes. What `pieces` raises leaves none, and is raised."""
        try:
            with self._telling("write", path):
                if size <= PART_BYTES:
                    obstore.put(self._large, path, b"".join(pieces), use_multipart=False)
                    return
                part_bytes = max(PART_BYTES, -(-size // _PARTS))
                obstore.put(self._large, path, iter(pieces), chunk_size=part_bytes, max_concurrency=PARTS_AT_ONCE)
        except FileNotFoundError as error:  # a rule of the bucket, say, or an operator
            raise Transient(f"the parts of {self.name(path)} were removed before all were there") from error

    def delete(self, paths: list[str]) -> None:
        """Remove objects, if they are there."""
        try:
            with self._telling("remove", paths[0]):
                obstore.delete(self._small, paths)
        except FileNotFoundError:
            pass  # some stores tell

    def _put_if(self, path: str, content: bytes, mode: Any) -> Version | None:
        try:
            with self._telling("write", path):
                return _version(obstore.put(self._small, path, content, mode=mode, use_multipart=False))
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError, FileNotFoundError):
            return None  # the last: what was to be replaced was removed

    def _opened(self, timeout: timedelta) -> Any:
        options = {"connect_timeout": timedelta(seconds=10), "timeout": timeout, "allow_http": True}  # AWS_ENDPOINT_URL
        try:
            from_url: Any = store.from_url  # its annotations are of one store or another, this is of any
            return from_url(self._url, client_options=options, retry_config=RETRIES)
        except (exceptions.BaseError, ValueError) as error:
            if any(each in str(error) for each in _NO_CREDENTIALS):
                raise self._no_credentials() from error
            raise OuterstepError(f"{self} cannot be opened: {_first_line(str(error))}") from error

    @contextmanager
    def _telling(self, does: str, path: str = "") -> Iterator[None]:
        """Raise what the store raises as a sentence; FileNotFoundError for an object that is not there."""
        try:
            yield
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
                raise self._no_bucket() from error
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.name(path)) from error
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            raise
        except exceptions.BaseError as error:
            raise self._told(str(error), does, self.name(path)) from error

    def _told(self, said: str, does: str, name: str) -> OuterstepError:
        """Return what the store said in a sentence, with what to do."""
        status, code = _STATUS.search(said), _CODE.search(said)
        answer = f"{status[1]}{f' {code[1]}' if code else ''}" if status else ""
        if "NoSuchBucket" in said or "ContainerNotFound" in said:
            return self._no_bucket()
        if any(each in said for each in _NO_CREDENTIALS):
            return self._no_credentials()
        if status and status[1] in ("401", "403"):
            return OuterstepError(
                f"this machine may not {does} {name} ({answer}): see that the key in {self._credentials} is right, and "
                "allowed to list, read, write and remove what is there"
            )
        if any(each in said for each in _ANOTHER_REGION):
            return OuterstepError(
                f"the bucket of {name} is in another region than was asked: set AWS_REGION to its own"
            )
        if status and status[1].startswith("4") and status[1] not in _BUSY:
            return OuterstepError(f"cannot {does} {name}: the store answers {answer}")
        if status:
            return Transient(f"cannot {does} {name}: the store answers {answer}")
        if unanswered := _UNANSWERED.search(_first_line(said)):
            reached = f"nothing answers at {unanswered[1]} ({unanswered[2]}): see that it can be reached from here"
            return Transient(f"cannot {does} {name}: {reached}")
        return Transient(f"cannot {does} {name}: {_first_line(said)}")

    def _no_credentials(self) -> OuterstepError:
        return OuterstepError(f"there are no credentials here for {self}: set {self._credentials} (docs/deployment.md)")

    def _no_bucket(self) -> OuterstepError:
        return OuterstepError(f"there is no bucket {self._bucket!r} for {self}: make it, or name one that is there")


class ObjectReader:
    """An object that is open to be read, as a `Reader`: PART_BYTES of it are in memory."""

    def __init__(self, objects: Objects, path: str, size: int) -> None:
        self.size = size
        self._objects, self._path = objects, path
        self._lock, self._held, self._at = threading.Lock(), memoryview(b""), 0

    def read_into(self, memory: memoryview, at: int) -> int:
        wanted = max(0, min(len(memory), self.size - at))
        with self._lock:
            filled = 0
            while filled < wanted:
                part = self._from(at + filled)[: wanted - filled]
                memory[filled : filled + len(part)] = part
                filled += len(part)
        return wanted

    def _from(self, at: int) -> memoryview:
        """Return some bytes from `at` on."""
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


def _version(told: Any) -> Version:
    return {key: told[key] for key in ("e_tag", "version") if told.get(key) is not None}


def _first_line(said: str) -> str:
    """Return what the store said; what follows is for its makers."""
    return said.partition("\n")[0].partition(": <")[0]
