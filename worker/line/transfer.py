"""Transfers of payloads, whole or in parts, each part tried until it succeeds: uploads, and downloads that resume.

Parts go over as many connections at once as the line rewards (way.py), in order. Of an upload the coordinator keeps
the parts that have arrived, so that a connection which breaks costs one; a part of a download goes on where it broke
off. The digest of the whole is checked at the end: that finds every fault.

Uploads are streams because httpcore's cost for one big `bytes` body grows with the square of its size; a generator
costs a quarter of it at 100 MB, and the least if what it yields stays in the cache. Downloads read the socket's own
chunks into memory that was allocated once.
"""

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import numpy as np
from blake3 import blake3

from outerstep.common.answers import (
    ERROR_BYTES,
    beginning,
    check_not_encoded,
    header_number,
    raise_for_problem,
    read_message,
)
from protocol import wire
from protocol.digest import Buffer, content_digest
from protocol.errors import BeyondLimits, Problem, Transient, UnexpectedAnswer
from protocol.messages import PartReply, Stage
from protocol.versions import Version, coordinator_version
from worker.accounts.stages import Stages, Traffic
from worker.errors import Stopped
from worker.line.line import Line, Range, Turn
from worker.line.retry import Retry, Signal

SEND_BYTES = 1 << 15
_RANGE = re.compile(r"bytes (?:([0-9]{1,18})-([0-9]{1,18})|\*)/([0-9]{1,18})")
# Shorter than the 30 s that the coordinator allows, so that a worker that is asked to stop is gone soon.
LONG_POLL_S = 5
CONNECT_S = 5.0
DOWNLOAD_TIMEOUT = httpx.Timeout(CONNECT_S, read=LONG_POLL_S + 10, pool=None)  # of silence, not of a transfer
LEAVING_TIMEOUT = httpx.Timeout(2.0, pool=None)  # once asked to stop


def memory(size: int) -> memoryview:
    """Return `size` bytes of uninitialised memory."""
    return np.empty(size, np.uint8).data


@dataclass(frozen=True)
class Channel:
    """The way to the coordinator, which the requests and transfers of a client share.

    stop        set once the worker is asked to stop: then answers are waited for LEAVING_TIMEOUT only
    until       ends a transfer in its middle, with Stopped
    retry       of every part; until the same signal
    silence_s   for how long an answer is waited for; None: as long as `http` says
    """

    http: httpx.Client
    line: Line
    traffic: Traffic
    stages: Stages
    stop: Signal
    until: Signal
    retry: Retry
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

    @property
    def extensions(self) -> dict[str, Any]:
        """What every request is sent with."""
        return {"trace": self.line.connections.trace}

    def sent(self, pieces: Iterable[bytes], turn: Turn) -> Iterator[bytes]:
        """Yield the pieces of a body, and count them. The turn is over with the last one."""
        for piece in pieces:
            self._pause(self.line.up.pace.delay_s(len(piece)))
            self.check()
            self.traffic.add(up=len(piece))
            turn.moved(len(piece))
            yield piece
        turn.over()

    def received(self, response: httpx.Response, turn: Turn) -> Iterator[bytes]:
        """Yield the body as it arrives, and count it."""
        for chunk in self.stages.during(Stage.DOWNLOAD, response.iter_raw()):
            self.traffic.add(down=len(chunk))
            turn.moved(len(chunk))
            yield chunk
            self._pause(self.line.down.pace.delay_s(len(chunk)))
            self.check()

    def _pause(self, seconds: float) -> None:
        if seconds:
            self.until.wait(seconds)


class Upload:
    """The upload of one payload. `on_line` is called when it has the line: what takes its turn after that is next."""

    def __init__(
        self,
        channel: Channel,
        path: str,
        headers: dict[str, str],
        buffers: Sequence[Buffer],
        on_line: Callable[[], object] = lambda: None,
    ) -> None:
        self._channel, self._path, self._on_line = channel, path, on_line
        self._buffers = [memoryview(each).cast("B") for each in buffers]
        self._size, hasher = sum(len(each) for each in self._buffers), blake3()
        for each in self._buffers:
            hasher.update(each)
        self._digest = content_digest(hasher.digest())
        self._headers = headers | {"Content-Type": wire.MEDIA_TYPE}
        self._beginning = threading.Lock()
        self._begun = False
        self._missing: list[Range] = []  # as it was told last
        self._accepted = self._refused = False

    def __call__(self) -> None:
        """Send the payload; it is durable when this returns. Raises Problem, UnexpectedAnswer or Stopped."""
        way, missing = self._channel.line.up, [(0, self._size)]
        while not self._accepted:
            parts = [(start + a, start + b) for start, stop in missing for a, b in way.cut(stop - start)]
            way.carry([partial(self._carry, part) for part in parts])
            if not self._accepted:  # it was restarted meanwhile, and has lost some: the last one again tells which
                self._carry(parts[-1])
                missing = self._missing

    def _carry(self, part: Range) -> None:
        if self._refused or self._accepted:
            return
        try:
            self._channel.retry(lambda: self._attempt(*part))
        except BaseException:
            self._refused = True
            raise

    def _attempt(self, start: int, stop: int) -> None:
        """Send a part, once. Raises Problem, Transient, httpx.TransportError, UnexpectedAnswer or Stopped."""
        channel, pieces = self._channel, self._pieces(start, stop)
        with channel.line.up.turn() as turn, channel.line.stalls.watched():
            self._note_begun()
            with channel.http.stream(
                "PUT",
                self._path,
                content=channel.sent(map(bytes, pieces), turn),
                headers=self._headers | self._described(start, stop, pieces),
                timeout=channel.timeout(),
                extensions=channel.extensions,
            ) as answer:
                raise_for_problem(answer)
                if answer.status_code == 202:
                    self._missing = read_message(PartReply, answer).missing
                else:
                    beginning(answer, ERROR_BYTES)  # it says nothing; once it is read, the connection is free
                    self._accepted = True

    def _note_begun(self) -> None:
        with self._beginning:
            first, self._begun = not self._begun, True
        if first:
            self._on_line()

    def _described(self, start: int, stop: int, pieces: Sequence[memoryview]) -> dict[str, str]:
        length = {"Content-Length": str(stop - start)}
        if stop - start == self._size:
            return length | {"Content-Digest": self._digest}
        hasher = blake3()
        for piece in pieces:
            hasher.update(piece)
        return length | {
            "Content-Digest": content_digest(hasher.digest()),
            "Content-Range": f"bytes {start}-{stop - 1}/{self._size}",
            "Repr-Digest": self._digest,
        }

    def _pieces(self, start: int, stop: int) -> list[memoryview]:
        """Return bytes [start, stop) of the payload, in pieces of SEND_BYTES at most."""
        pieces, begin = [], 0
        for view in self._buffers:
            first, last = max(start - begin, 0), min(stop - begin, len(view))
            pieces += [view[at : min(at + SEND_BYTES, last)] for at in range(first, last, SEND_BYTES)]
            begin += len(view)
        return pieces


class Download:
    """The download of one immutable blob.

    path             to ask next
    limit_bytes      is compared with the announced size before memory is allocated
    expected_bytes   about the size
    digest           the blob's, BLAKE3 in hexadecimal; None: as its ETag says
    again            whether to ask again though it is not there, as a problem says

    `path` is the one asked first, `coordinator` what the answer said of its sender.
    """

    def __init__(
        self,
        channel: Channel,
        path: Callable[[], str],
        headers: dict[str, str],
        limit_bytes: int,
        expected_bytes: int,
        digest: str | None = None,
        again: Callable[[Problem], bool] = lambda problem: False,
    ) -> None:
        self._channel, self._path_now, self._limit_bytes, self._digest = channel, path, limit_bytes, digest
        self.path, self._expected_bytes, self._again = path(), expected_bytes, again
        self._headers = {**headers, "Accept-Encoding": "identity"}
        self.coordinator = Version(None)
        self._lock = threading.Lock()
        self._etag, self._data = "", memory(0)
        self._not_published: Problem | None = None

    def __call__(self) -> memoryview:
        """Return the blob. Raises Problem, UnexpectedAnswer or Stopped."""
        return self._channel.retry(self._fetch)

    def _fetch(self) -> memoryview:
        self._etag, self._data = "", memory(0)
        ranges = self._channel.line.down.cut(self._expected_bytes)
        missing = [_Part(start, None if start == ranges[-1][0] else stop) for start, stop in ranges]
        while missing:
            self._channel.line.down.carry([partial(self._carry, part) for part in missing])
            missing = [part for part in missing if not part.complete]
            if missing and not self._etag:
                assert self._not_published is not None
                raise self._not_published
        # Of parts of several blobs, too, the digest is wrong.
        if blake3(self._data).hexdigest() != (self._digest or self._etag.strip('"')):
            raise Transient(f"{self.path}: the bytes that arrived are not those of its digest")
        return self._data

    def _carry(self, part: "_Part") -> None:
        while not part.complete:
            try:
                self._channel.retry(lambda: self._attempt(part))
            except Problem as problem:
                if problem.slug != "not-published":
                    raise
                self._not_published = problem
                if not self._etag and not self._again(problem):  # of another part it may have been there
                    return

    def _attempt(self, part: "_Part") -> None:
        """Fetch what is missing of a part, once. Raises Problem, Transient, httpx.TransportError, UnexpectedAnswer or
        Stopped."""
        channel, headers = self._channel, self._headers | part.wanted(self._etag)
        with (
            channel.line.down.turn() as turn,
            channel.line.stalls.watched(),
            channel.http.stream(
                "GET", self._path_now(), headers=headers, timeout=DOWNLOAD_TIMEOUT, extensions=channel.extensions
            ) as answer,
        ):
            if answer.status_code == 416:
                self._check_behind(answer, part)
                return
            raise_for_problem(answer)
            self.coordinator = coordinator_version(answer.headers)
            at, stop = self._begin(answer, part)
            for chunk in channel.received(answer, turn):
                part.take(self._data, chunk, at)
                at += len(chunk)
                if part.complete and answer.status_code == 200:
                    return  # all else is of other parts
                if at > stop:  # where its length is not that of its headers
                    raise Transient(f"{self.path} answered with more bytes than it announced")
        if not part.complete:
            raise Transient(f"{self.path} broke off at byte {part.next} of {part.stop}")

    def _begin(self, answer: httpx.Response, part: "_Part") -> tuple[int, int]:
        """Return where in the blob the answer begins and ends; make memory for the blob if there is none."""
        check_not_encoded(answer)
        etag, length = answer.headers.get("ETag", ""), header_number(answer.headers.get("Content-Length", ""))
        if not etag or length is None:
            raise UnexpectedAnswer(
                f"{self.path} answered without ETag or Content-Length: not a coordinator, or a proxy that alters it"
            )
        start, stop, total = 0, length, length  # a proxy that knows no ranges sends all of it
        if answer.status_code == 206:
            start, stop, total = _range_of(answer)
            if start != part.next or stop - start != length:
                raise Transient(f"{self.path} answered another range than the one asked for")
        elif answer.status_code != 200:
            raise Transient(f"{self.path} answered {answer.status_code} to a request for bytes")
        if total > self._limit_bytes:
            raise BeyondLimits(f"{self.path} announces {total} bytes, at most {self._limit_bytes} can be right")
        with self._lock:
            if etag != self._etag or total != len(self._data):
                self._etag, self._data = etag, memory(total)
                if start == 0:
                    part.restart()
        part.end_at(total)
        return start, stop

    def _check_behind(self, answer: httpx.Response, part: "_Part") -> None:
        """Return where a part begins behind the end of the blob; Transient where it does not."""
        total = _range_of(answer)[2]
        if part.start < total:
            part.restart()
            raise Transient(f"{self.path} changed while it was fetched")
        part.stop = part.next


class _Part:
    """What one connection fetches of a blob: bytes [start, stop), to the end where `stop` is None. Those before `next`
    have arrived."""

    def __init__(self, start: int, stop: int | None) -> None:
        self.start = self.next = start
        self.stop = self._wanted_stop = stop

    @property
    def complete(self) -> bool:
        return self.next == self.stop

    def wanted(self, etag: str) -> dict[str, str]:
        """Return the headers that ask for what is missing, of the blob `etag` if there is one."""
        if self.next == 0 and self._wanted_stop is None:  # all of it
            return {}
        last = "" if self.stop is None else self.stop - 1
        return {"Range": f"bytes={self.next}-{last}"} | ({"If-Range": etag} if etag else {})

    def restart(self) -> None:
        self.next = self.start

    def end_at(self, total: int) -> None:
        self.stop = total if self._wanted_stop is None else min(self._wanted_stop, total)

    def take(self, data: memoryview, chunk: bytes, at: int) -> None:
        """Take its own bytes of a chunk that begins at byte `at` of the blob."""
        assert self.stop is not None
        ours = memoryview(chunk)[max(self.next - at, 0) : max(self.stop - at, 0)]
        data[self.next : self.next + len(ours)] = ours
        self.next += len(ours)


def _range_of(answer: httpx.Response) -> tuple[int, int, int]:
    """Return what Content-Range says: a half-open range and the size of the whole; Transient where it does not."""
    match = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    if match is None:
        raise Transient(f"{answer.request.url} answered {answer.status_code} without saying which range it is")
    first, last, total = (int(digits or 0) for digits in match.groups())
    return first, last + 1, total
