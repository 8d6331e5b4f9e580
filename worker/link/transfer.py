"""Transfers of payloads, each tried until it succeeds: uploads, and downloads that resume, whole or in parts.

Uploads are streams because httpcore's cost for one big `bytes` body grows with the square of its size; a generator
costs a quarter of it at 100 MB, and the least if what it yields stays in the cache. Downloads read the socket's own
chunks into memory that was allocated once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from blake3 import blake3

from protocol import wire
from protocol.answers import header_number, raise_for_problem
from protocol.digest import Buffer, content_digest
from protocol.errors import Transient, UnexpectedAnswer
from protocol.messages import Stage
from worker.accounts.stages import Stages
from worker.accounts.traffic import Traffic
from worker.errors import Stopped
from worker.link.line import Line
from worker.link.retry import Signal

SEND_BYTES = 1 << 18
PART_BYTES = 8 << 20
LEAVING_TIMEOUT = httpx.Timeout(2.0, pool=None)  # once asked to stop


def memory(size: int) -> memoryview:
    """Return `size` bytes of uninitialised memory."""
    return np.empty(size, np.uint8).data


@dataclass(frozen=True)
class Channel:
    """The way to the coordinator, which the requests and transfers of a client share.

    stop        set once the worker is asked to stop: then answers are waited for LEAVING_TIMEOUT only
    until       ends a transfer in its middle, with Stopped
    silence_s   for how long an answer is waited for; None: as long as `http` says
    """

    http: httpx.Client
    line: Line
    traffic: Traffic
    stages: Stages
    stop: Signal
    until: Signal
    silence_s: float | None = None

    def timeout(self) -> Any:
        """Return the timeouts of the next request, as httpx takes them."""
        if self.stop.is_set():
            return LEAVING_TIMEOUT
        return httpx.USE_CLIENT_DEFAULT if self.silence_s is None else httpx.Timeout(self.silence_s, pool=None)

    def check(self) -> None:
        """Raise Stopped once `until` is set."""
        if self.until.is_set():
            raise Stopped("asked to stop in the middle of a transfer")

    def received(self, response: httpx.Response) -> Iterator[bytes]:
        """Yield the body as it arrives, and count it."""
        for chunk in self.stages.during(Stage.DOWNLOAD, response.iter_raw()):
            self.traffic.add(down=len(chunk))
            yield chunk
            self.check()


class Upload:
    """The upload of one payload: call `attempt` until it returns. `on_line` is called when it has the line."""

    def __init__(
        self,
        channel: Channel,
        path: str,
        headers: dict[str, str],
        buffers: Sequence[Buffer],
        on_line: Callable[[], object] = lambda: None,
    ) -> None:
        self._channel, self._path, self._buffers, self._on_line = channel, path, buffers, on_line
        total_bytes, hasher = 0, blake3()
        for buffer in buffers:
            total_bytes += len(buffer)
            hasher.update(buffer)
        self._headers = headers | {
            "Content-Type": wire.MEDIA_TYPE,
            "Content-Length": str(total_bytes),
            "Content-Digest": content_digest(hasher.digest()),
        }

    def attempt(self) -> None:
        """Send the payload. Raises Problem, Transient, httpx.TransportError, UnexpectedAnswer or Stopped."""
        channel = self._channel
        with channel.line.taken(self._pieces()) as body:
            self._on_line()
            answer = channel.http.put(self._path, content=body, headers=self._headers, timeout=channel.timeout())
            raise_for_problem(answer)

    def _pieces(self) -> Iterator[bytes]:
        for buffer in self._buffers:
            view = memoryview(buffer).cast("B")
            for start in range(0, len(view), SEND_BYTES):
                piece = bytes(view[start : start + SEND_BYTES])
                self._channel.check()
                self._channel.traffic.add(up=len(piece))
                yield piece


class Download:
    """The download of one immutable blob: call `attempt` until it returns; each goes on where the last one broke off.

    `limit_bytes` is compared with the announced size before memory is allocated.
    """

    def __init__(self, channel: Channel, path: str, headers: dict[str, str], limit_bytes: int) -> None:
        self._channel, self._path, self._headers, self._limit_bytes = channel, path, headers, limit_bytes
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
        with self._channel.http.stream("GET", self._path, headers=headers) as response:
            if response.status_code == 416:
                self._restart()
                raise Transient(f"{self._path} changed while it was fetched")
            raise_for_problem(response)
            self._start(response)
            for chunk in self._channel.received(response):
                end = self._received + len(chunk)
                if end > len(self._data):
                    self._restart()
                    raise Transient(f"{self._path} sends more bytes than it announced")
                self._data[self._received : end] = chunk
                self._received = end
        if self._received < len(self._data):
            raise Transient(f"{self._path} broke off after {self._received} of {len(self._data)} bytes")
        data, etag = self._data, self._etag.strip('"')
        if blake3(data).hexdigest() != etag:
            self._restart()
            raise Transient(f"{self._path}: the bytes that arrived are not those of its ETag")
        return data

    def _start(self, response: httpx.Response) -> None:
        """Go on after the bytes received so far if the server does, else begin anew."""
        etag, length = response.headers.get("ETag", ""), header_number(response.headers.get("Content-Length", ""))
        if not etag or length is None:
            raise UnexpectedAnswer(
                f"{self._path} answered without ETag or Content-Length: not a coordinator, or a proxy that alters it"
            )
        if response.status_code == 206 and self._received and etag == self._etag:
            if length == len(self._data) - self._received:
                return
            self._restart()
            raise Transient(f"{self._path} answered another range than the one asked for")
        self._restart()
        if response.status_code != 200:
            raise Transient(f"{self._path} answered {response.status_code} to a request for the whole")
        if length > self._limit_bytes:
            raise UnexpectedAnswer(f"{self._path} announces {length} bytes, at most {self._limit_bytes} can be right")
        self._etag, self._data = etag, memory(length)


class Part:
    """The download of PART_BYTES of one blob, from `start` on, into their place in `data`, the memory of the whole.

    Call `attempt` until it returns; each goes on where the last one broke off. The caller checks the digest of the
    whole: that finds every fault, also that of a blob that changed.
    """

    def __init__(self, channel: Channel, path: str, headers: dict[str, str], data: memoryview, start: int) -> None:
        self._channel, self._path, self._headers, self._data = channel, path, headers, data
        self._next, self._end = start, min(start + PART_BYTES, len(data))

    def attempt(self) -> None:
        """Fetch what is missing. Raises Problem, Transient, httpx.TransportError or UnexpectedAnswer."""
        headers = {**self._headers, "Accept-Encoding": "identity", "Range": f"bytes={self._next}-{self._end - 1}"}
        with self._channel.http.stream("GET", self._path, headers=headers) as response:
            raise_for_problem(response)
            # A proxy that knows no ranges sends the whole blob, of which this part is taken.
            position = self._next if response.status_code == 206 else 0
            for chunk in self._channel.received(response):
                self._take(memoryview(chunk), position)
                position += len(chunk)
                if self._next == self._end:
                    return
        raise Transient(f"{self._path} broke off at byte {position} of {self._end}")

    def _take(self, chunk: memoryview, position: int) -> None:
        ours = chunk[max(self._next - position, 0) : max(self._end - position, 0)]
        self._data[self._next : self._next + len(ours)] = ours
        self._next += len(ours)
