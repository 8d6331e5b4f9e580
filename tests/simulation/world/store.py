"""An object store as one simulated node: what is in it lasts, whoever else dies. It can be down, slow, late to show what
was just uploaded, or keep only a part of it.

The coordinator's requests to it may end with the coordinator's crash, before or after the store has acted. Workers reach
it over their own lines, with requests that the coordinator has signed; it checks what a real store checks.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx

from coordinator.store.blobs import DirectAccess, SignedRequest, StoreOutage, Uploaded
from harness.stores import WholeBlobs, bytes_of
from protocol.digest import Buffer
from tests.simulation.world.scheduler import Scheduler

if TYPE_CHECKING:
    from tests.simulation.world.machine import Machine

HOST = "store"
LATE_S = 2.0  # until an upload is shown, where the store is late
Headers = list[tuple[bytes, bytes]]
Answer = tuple[int, Headers, bytes]


@dataclass
class StoredObject:
    """`shown_at`: the coordinator does not see it before."""

    content: bytes
    shown_at: float


class StoreNode:
    """The store itself."""

    def __init__(self, scheduler: Scheduler, rng: random.Random) -> None:
        self.scheduler, self.rng = scheduler, rng
        self.objects: dict[str, StoredObject] = {}
        self.down_until = self.slow_until = 0.0
        self.late = False  # an upload may be shown only after LATE_S
        self.truncates = False  # some uploads are accepted and kept in part
        self.uploads = 0

    @property
    def up(self) -> bool:
        return self.scheduler.now >= self.down_until

    def create(self, name: str, content: bytes, *, shown_at: float = 0.0) -> bool:
        """Create an object unless it exists."""
        return name not in self.objects and self.objects.setdefault(name, StoredObject(content, shown_at)) is not None

    def read(self, name: str) -> bytes | None:
        """An object as it is now; None if there is none."""
        found = self.objects.get(name)
        return None if found is None else found.content

    def names(self, prefix: str) -> list[str]:
        """The names of the objects under `prefix`."""
        return [name for name in self.objects if name.startswith(prefix)]

    def served(self, request: httpx.Request, body: bytes) -> Answer:
        """Answer a worker's request, as a real store does."""
        if not self.up:
            return 503, [], b"SlowDown"
        parts = urlsplit(str(request.url))
        name, signed = parts.path.lstrip("/"), {key: each[0] for key, each in parse_qs(parts.query).items()}
        if signed.get("method") != request.method or float(signed["until"]) < self.scheduler.now:
            return 403, [], b""
        if request.method == "PUT":
            return self._uploaded(name, signed, request, body)
        found = self.objects.get(name)
        if found is None:
            return 404, [], b""
        first, last = (int(each) for each in request.headers["Range"].removeprefix("bytes=").split("-"))
        piece = found.content[first : last + 1]
        place = f"bytes {first}-{first + len(piece) - 1}/{len(found.content)}"
        return 206, [(b"content-range", place.encode()), (b"content-length", str(len(piece)).encode())], piece

    def _uploaded(self, name: str, signed: dict[str, str], request: httpx.Request, body: bytes) -> Answer:
        if (
            request.headers.get("x-amz-checksum-sha256") != signed["sha256"]
            or request.headers.get("if-none-match") != "*"
        ):
            return 403, [], b""
        if hashlib.sha256(body).hexdigest() != signed["sha256"]:
            return 400, [], b""
        shown_at = self.scheduler.now + LATE_S * (self.late and self.rng.random() < 0.3)
        kept = self.rng.randrange(len(body)) if self.truncates and self.rng.random() < 0.1 else len(body)
        if not self.create(name, body[:kept], shown_at=shown_at):
            return 412, [], b""
        self.uploads += 1
        return 200, [], b""


class StoreBlobs(WholeBlobs):
    """A process's blobs in the store, and its direct access. The methods are documented in `Blobs`. `leads` returns
    False once another coordinator may lead."""

    def __init__(self, node: "Machine", store: StoreNode, leads: Callable[[], bool] = lambda: True) -> None:
        self._node, self._store, self._leads = node, store, leads
        self.direct: DirectAccess | None = self
        self.bucket = None

    def ask(self) -> None:
        """Ask whether the store is there."""
        self._request()
        self._answered()

    def _request(self) -> None:
        """A request reaches the store, if it gets there."""
        node, store = self._node, self._store
        node.crash_point("before a store request")
        if not node.group.indivisible:
            slow = store.scheduler.now < store.slow_until
            store.scheduler.sleep(store.rng.uniform(0, 5.0 if slow else 0.02))
        if not store.up or node.is_cut("store"):
            raise StoreOutage("the simulated store is down")

    def _answered(self) -> None:
        self._node.crash_point("after a store request")

    def put(self, name: str, source: Buffer | Path) -> bool:
        content = bytes_of(source)
        self._request()
        created = self._store.create(name, content)
        self._answered()
        return created

    def rename(self, name: str, new_name: str) -> None:
        self.put(new_name, self._content(name))
        self.delete(name)

    def delete(self, *names: str) -> None:
        if not self._leads():
            raise StoreOutage("another coordinator leads, so this one deletes nothing")
        self._request()
        for name in names:
            self._store.objects.pop(name, None)
        self._answered()

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        self._request()
        yield from [(name, len(self._store.objects[name].content)) for name in self._store.names(prefix)]

    def stat(self, name: str) -> int | None:
        self._request()
        content = self._store.read(name)
        return None if content is None else len(content)

    def _content(self, name: str) -> bytes:
        self._request()
        content = self._store.read(name)
        if content is None:
            raise FileNotFoundError(name)
        return content

    # --- direct access --------------------------------------------------------------------------------------------

    def upload(self, name: str, sha256: bytes, expires_s: float) -> SignedRequest:
        signed = {"method": "PUT", "sha256": sha256.hex(), "until": self._store.scheduler.now + expires_s}
        headers = {"If-None-Match": "*", "x-amz-checksum-sha256": sha256.hex()}
        return SignedRequest("PUT", f"http://{HOST}/{name}?{urlencode(signed)}", headers)

    def download_url(self, name: str, expires_s: float) -> str:
        signed = {"method": "GET", "until": self._store.scheduler.now + expires_s}
        return f"http://{HOST}/{name}?{urlencode(signed)}"

    def uploaded(self, name: str) -> Uploaded | None:
        self._request()
        found = self._store.objects.get(name)
        if found is None or found.shown_at > self._store.scheduler.now:
            return None
        return Uploaded(len(found.content), hashlib.sha256(found.content).digest())

    def beginning(self, name: str, length: int) -> bytes:
        return self._content(name)[:length]
