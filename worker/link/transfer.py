"""Uploads as streams of bytes, and downloads that resume, whole or in parts.

Uploads are streams because httpcore's cost for one big `bytes` body grows with the square of its size; a generator
costs a quarter of it at 100 MB, and the least if what it yields stays in the cache. Downloads read the socket's own
chunks into memory that was allocated once.
"""

from collections.abc import Iterator, Sequence

import httpx
import numpy as np
from blake3 import blake3

from protocol.answers import raise_for_problem
from protocol.digest import Buffer
from protocol.errors import Transient, UnexpectedAnswer
from protocol.messages import Stage
from worker.accounts.stages import Stages
from worker.accounts.traffic import Traffic
from worker.errors import Stopped
from worker.link.grace import Signal

SEND_BYTES = 1 << 18
PART_BYTES = 8 << 20


def memory(size: int) -> memoryview:
    """Return `size` bytes of uninitialised memory."""
    return np.empty(size, np.uint8).data


def stream(buffers: Sequence[Buffer], traffic: Traffic, stop: Signal) -> Iterator[bytes]:
    """Yield the buffers' bytes, at most SEND_BYTES at a time, and count them. Raises Stopped once `stop` is set."""
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        for start in range(0, len(view), SEND_BYTES):
            part = view[start : start + SEND_BYTES]
            _check(stop)
            traffic.add(up=len(part))
            yield bytes(part)


def _check(stop: Signal) -> None:
    if stop.is_set():
        raise Stopped("asked to stop in the middle of a transfer")


class Download:
    """The download of one immutable blob: call `attempt` until it returns; each goes on where the last one broke off.

    `limit_bytes` is compared with the announced size before memory is allocated.
    """

    def __init__(
        self,
        http: httpx.Client,
        path: str,
        headers: dict[str, str],
        limit_bytes: int,
        traffic: Traffic,
        stages: Stages,
        stop: Signal,
    ) -> None:
        self._http, self._path, self._headers = http, path, headers
        self._limit_bytes, self._traffic, self._stages, self._stop = limit_bytes, traffic, stages, stop
        self._restart()

    def _restart(self) -> None:
        self._etag = ""
        self._data = memory(0)
        self._received = 0

    def attempt(self) -> memoryview:
        """Fetch the blob, or what is missing of it; return all of it, its BLAKE3 equal to its ETag. Raises Problem,
        Transient, httpx.TransportError or UnexpectedAnswer."""
        headers = {**self._headers, "Accept-Encoding": "identity"}
        if self._received:
            headers |= {"Range": f"bytes={self._received}-", "If-Range": self._etag}
        with self._http.stream("GET", self._path, headers=headers) as response:
            if response.status_code == 416:
                self._restart()
                raise Transient(f"{self._path} changed while it was fetched")
            raise_for_problem(response)
            self._start(response)
            for chunk in self._stages.during(Stage.DOWNLOAD, response.iter_raw()):
                end = self._received + len(chunk)
                if end > len(self._data):
                    self._restart()
                    raise Transient(f"{self._path} sends more bytes than it announced")
                self._data[self._received : end] = chunk
                self._received = end
                self._traffic.add(down=len(chunk))
                _check(self._stop)
        if self._received < len(self._data):
            raise Transient(f"{self._path} broke off after {self._received} of {len(self._data)} bytes")
        data, etag = self._data, self._etag.strip('"')
        if blake3(data).hexdigest() != etag:
            self._restart()
            raise Transient(f"{self._path}: the bytes that arrived are not those of its ETag")
        return data

    def _start(self, response: httpx.Response) -> None:
        """Go on after the bytes received so far if the server does, else begin anew."""
        etag, length = response.headers.get("ETag", ""), response.headers.get("Content-Length", "")
        if not etag or not length.isdigit():
            raise UnexpectedAnswer(
                f"{self._path} answered without ETag or Content-Length: not a coordinator, or a proxy that alters it"
            )
        if response.status_code == 206 and self._received and etag == self._etag:
            if int(length) == len(self._data) - self._received:
                return
            self._restart()
            raise Transient(f"{self._path} answered another range than the one asked for")
        self._restart()
        if response.status_code != 200:
            raise Transient(f"{self._path} answered {response.status_code} to a request for the whole")
        if int(length) > self._limit_bytes:
            raise UnexpectedAnswer(f"{self._path} announces {length} bytes, at most {self._limit_bytes} can be right")
        self._etag, self._data = etag, memory(int(length))


class Part:
    """The download of PART_BYTES of one blob, from `start` on, into their place in `data`, the memory of the whole.

    Call `attempt` until it returns; each goes on where the last one broke off. The caller checks the digest of the
    whole: that finds every fault, also that of a blob that changed.
    """

    def __init__(
        self,
        http: httpx.Client,
        path: str,
        headers: dict[str, str],
        data: memoryview,
        start: int,
        traffic: Traffic,
        stages: Stages,
        stop: Signal,
    ) -> None:
        self._http, self._path, self._headers, self._data = http, path, headers, data
        self._next, self._end = start, min(start + PART_BYTES, len(data))
        self._traffic, self._stages, self._stop = traffic, stages, stop

    def attempt(self) -> None:
        """Fetch what is missing. Raises Problem, Transient, httpx.TransportError or UnexpectedAnswer."""
        headers = {**self._headers, "Accept-Encoding": "identity", "Range": f"bytes={self._next}-{self._end - 1}"}
        with self._http.stream("GET", self._path, headers=headers) as response:
            raise_for_problem(response)
            # A proxy that knows no ranges sends the whole blob, of which this part is taken.
            position = self._next if response.status_code == 206 else 0
            for chunk in self._stages.during(Stage.DOWNLOAD, response.iter_raw()):
                self._take(memoryview(chunk), position)
                position += len(chunk)
                if self._next == self._end:
                    return
                _check(self._stop)
        raise Transient(f"{self._path} broke off at byte {position} of {self._end}")

    def _take(self, chunk: memoryview, position: int) -> None:
        ours = chunk[max(self._next - position, 0) : max(self._end - position, 0)]
        self._data[self._next : self._next + len(ours)] = ours
        self._next += len(ours)
        self._traffic.add(down=len(chunk))
