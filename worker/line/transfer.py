"""Resumable uploads and downloads of payloads, in parts, each retried until it succeeds.

Parts go in order over as many parallel connections as pay off (line.py). The coordinator keeps the parts of an upload
that have arrived, so a broken connection costs one part; a part of a download resumes where it broke off. The digest of
the whole payload is checked at the end, which finds every fault.

Uploads are streamed because httpcore's cost for one large `bytes` body grows with the square of its size. Downloads
copy the socket's chunks into memory that was allocated once.
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
from outerstep.common.connections import error_text
from protocol import wire
from protocol.digest import Buffer, content_digest
from protocol.errors import BeyondLimits, Problem, Transient, UnexpectedAnswer
from protocol.messages import PartReply, Stage
from protocol.versions import LENGTH_HEADER, Version, coordinator_version
from worker.accounts.stages import Stages, Traffic
from worker.errors import Stopped
from worker.line.connections import Pool
from worker.line.line import Line, Range, Slot
from worker.line.retry import Retry, Signal
from worker.line.store import StorePath, check_store_url, origin

_RANGE = re.compile(r"bytes (?:([0-9]{1,18})-([0-9]{1,18})|\*)/([0-9]{1,18})")
# Shorter than the 30 s that the coordinator allows, so that a worker that is asked to stop leaves soon.
LONG_POLL_S = 5
CONNECT_S = 5.0
DOWNLOAD_TIMEOUT = httpx.Timeout(
    CONNECT_S, read=LONG_POLL_S + 10, pool=None
)  # without any byte, not for the whole transfer
LEAVING_TIMEOUT = httpx.Timeout(2.0, pool=None)  # after the worker was asked to stop


def memory(size: int) -> memoryview:
    """Return `size` bytes of uninitialised memory."""
    return np.empty(size, np.uint8).data


@dataclass(frozen=True)
class Channel:
    """What the requests and transfers of a client share.

    up, down    for transfers; they may be `http`
    store       whether payloads go to the coordinator's store directly, and from it
    stop        set once the worker is asked to stop: from then on LEAVING_TIMEOUT is the limit for an answer
    until       set to end a transfer midway, with Stopped
    retry       retries each part, until the same signal
    silence_s   timeout for an answer; None: that of `http`
    """

    http: httpx.Client
    up: httpx.Client
    down: httpx.Client
    line: Line
    traffic: Traffic
    stages: Stages
    store: StorePath
    stop: Signal
    until: Signal
    retry: Retry
    silence_s: float | None = None

    def timeout(self) -> Any:
        """Return the timeout of the next request, for httpx."""
        if self.stop.is_set():
            return LEAVING_TIMEOUT
        return httpx.USE_CLIENT_DEFAULT if self.silence_s is None else httpx.Timeout(self.silence_s, pool=None)

    def check(self) -> None:
        """Raise Stopped if `until` is set."""
        if self.until.is_set():
            raise Stopped("asked to stop in the middle of a transfer")

    def traced(self, pool: Pool) -> dict[str, Any]:
        """Return the httpx extensions of a request: by `up` and `down` for these pools, by `http` for others."""
        return self.line.connections.traced(pool)

    def sent(self, pieces: Iterable[bytes], slot: Slot) -> Iterator[bytes]:
        """Yield the pieces of a body and count them. The slot is released after the last one."""
        for piece in pieces:
            self._pause(self.line.up.limit.delay_s(len(piece)))
            self.check()
            self.traffic.add(up=len(piece))
            slot.moved(len(piece))
            yield piece
        slot.release()

    def received(self, response: httpx.Response, slot: Slot) -> Iterator[bytes]:
        """Yield the body as it arrives, and count it."""
        for chunk in self.stages.during(Stage.DOWNLOAD, response.iter_raw()):
            self.traffic.add(down=len(chunk))
            slot.moved(len(chunk))
            yield chunk
            self._pause(self.line.down.limit.delay_s(len(chunk)))
            self.check()

    def _pause(self, seconds: float) -> None:
        if seconds:
            self.until.wait(seconds)


class Upload:
    """The upload of one payload. `on_line` is called when its first part gets a slot: a part that asks for one after
    that comes next."""

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
        self._missing: list[Range] = []  # as last reported by the coordinator
        self._accepted = self._refused = False

    def __call__(self) -> None:
        """Upload the payload; it is durable when this returns. Raises Problem, UnexpectedAnswer and Stopped."""
        direction, missing = self._channel.line.up, [(0, self._size)]
        while not self._accepted:
            parts = [(start + a, start + b) for start, stop in missing for a, b in direction.split(stop - start)]
            direction.run_all([partial(self._transfer, part) for part in parts])
            if (
                not self._accepted
            ):  # The coordinator was restarted and lost some parts. Sending the last one again shows which.
                self._transfer(parts[-1])
                missing = self._missing

    def _transfer(self, part: Range) -> None:
        if self._refused or self._accepted:
            return
        try:
            self._channel.retry(lambda: self._attempt(*part))
        except BaseException:
            self._refused = True
            raise

    def _attempt(self, start: int, stop: int) -> None:
        """Send one part, once. Raises Problem, Transient, httpx.TransportError, UnexpectedAnswer and Stopped."""
        channel = self._channel
        pieces = pieces_of(self._buffers, start, stop, channel.line.up.piece_bytes)
        with channel.line.up.slot() as slot, channel.line.stalls.watched():
            self._note_begun()
            with channel.up.stream(
                "PUT",
                self._path,
                content=channel.sent(map(bytes, pieces), slot),
                headers=self._headers | self._described(start, stop, pieces),
                timeout=channel.timeout(),
                extensions=channel.traced("up"),
            ) as answer:
                raise_for_problem(answer)
                if answer.status_code == 202:
                    self._missing = read_message(PartReply, answer).missing
                else:
                    beginning(answer, ERROR_BYTES)  # no content; reading it frees the connection
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


def pieces_of(buffers: Sequence[memoryview], start: int, stop: int, most: int) -> list[memoryview]:
    """Return bytes [start, stop) of the concatenated buffers, in pieces of at most `most` bytes."""
    pieces, begin = [], 0
    for view in buffers:
        first, last = max(start - begin, 0), min(stop - begin, len(view))
        pieces += [view[at : min(at + most, last)] for at in range(first, last, most)]
        begin += len(view)
    return pieces


class Download:
    """The download of one immutable blob.

        path             returns the path of the next request
        limit_bytes      compared with the announced size before memory is allocated
        expected_bytes   the approximate size
        digest           BLAKE3 of the blob in hexadecimal; None: take it from the ETag
        again            called with the problem if the blob is not published yet; True to ask again
        found            called once it is there, before it has arrived

    `path` is the path of the first request, `coordinator` the version of the coordinator that answered.
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
        found: Callable[[], None] = lambda: None,
    ) -> None:
        self._found = found
        self._channel, self._path_now, self._limit_bytes, self._digest = channel, path, limit_bytes, digest
        self.path, self._expected_bytes, self._again = path(), expected_bytes, again
        self._headers = {**headers, "Accept-Encoding": "identity"}
        self.coordinator = Version(None)
        self._lock = threading.Lock()
        self._etag, self._data = "", memory(0)
        self._redirect: str | None = None  # the blob's address at the store
        self._not_published: Problem | None = None

    def __call__(self) -> memoryview:
        """Return the blob. Raises Problem, UnexpectedAnswer and Stopped."""
        return self._channel.retry(self._fetch)

    def _fetch(self) -> memoryview:
        self._etag, self._data, self._redirect = "", memory(0), None
        missing = self._found_at_store() if self._channel.store.usable else self._split(self._expected_bytes)
        while missing:
            self._channel.line.down.run_all([partial(self._transfer, part) for part in missing])
            missing = [part for part in missing if not part.complete]
            if missing and not self._etag:
                assert self._not_published is not None
                raise self._not_published
        # Parts of different blobs have a wrong digest, too.
        if blake3(self._data).hexdigest() != (self._digest or self._etag.strip('"')):
            if self._redirect is not None:
                self._channel.store.failed(f"the store at {origin(self._redirect)} has sent other bytes than published")
            raise Transient(f"{self.path}: the bytes received do not match their digest")
        if self._redirect is not None:
            self._channel.store.worked(self._redirect)
        return self._data

    def _split(self, size: int) -> "list[_BlobRange]":
        """Return the parts that fetch a blob of about `size` bytes."""
        ranges = self._channel.line.down.split(size)
        return [_BlobRange(start, None if start == ranges[-1][0] else stop) for start, stop in ranges]

    def _found_at_store(self) -> "list[_BlobRange]":
        """Ask where the store has the blob, with one request for all parts. Return the parts that are to be fetched:
        all, or what is missing if the coordinator has answered with the blob itself."""
        whole = _BlobRange(0, None)
        while not whole.complete and self._redirect is None:
            try:
                self._channel.retry(partial(self._ask, whole))
            except Problem as problem:
                if problem.slug != "not-published" or not self._again(problem):
                    raise
        return self._split(len(self._data)) if self._redirect is not None else []

    def _transfer(self, part: "_BlobRange") -> None:
        while not part.complete:
            try:
                self._channel.retry(lambda: self._attempt(part))
            except Problem as problem:
                if problem.slug != "not-published":
                    raise
                self._not_published = problem
                if not self._etag and not self._again(problem):  # other parts may already have found it
                    return

    def _attempt(self, part: "_BlobRange") -> None:
        """Fetch what is missing of a part, once: from the store if the coordinator has redirected there. Raises
        Problem, Transient, httpx.TransportError, UnexpectedAnswer and Stopped."""
        redirect = self._redirect
        if redirect is None:
            self._ask(part)
            return
        try:
            self._fetch_from_store(part, redirect)
        except (httpx.TransportError, Transient) as error:
            self._redirect = None  # it may have expired
            if isinstance(error, httpx.TransportError):
                error = Transient(f"the store at {origin(redirect)} cannot be reached: {error_text(error)}")
            self._channel.store.failed(str(error))
            raise error from None

    def _ask(self, part: "_BlobRange") -> None:
        """Fetch what is missing of a part from the coordinator, or note where the store has the blob."""
        channel, headers, path = self._channel, self._headers | part.range_header(self._etag), self._path_now()
        if channel.store.usable:
            path += "&direct=true" if "?" in path else "?direct=true"
        with (
            channel.line.down.slot() as slot,
            channel.line.stalls.watched(),
            channel.down.stream(
                "GET", path, headers=headers, timeout=DOWNLOAD_TIMEOUT, extensions=channel.traced("down")
            ) as answer,
        ):
            if answer.status_code == 307:
                self._note_redirect(answer, part)
                return
            if answer.status_code == 416:
                self._check_behind(answer, part)
                return
            raise_for_problem(answer)
            self.coordinator = coordinator_version(answer.headers)
            at, stop = self._begin(answer, part)
            for chunk in channel.received(answer, slot):
                part.store(self._data, chunk, at)
                at += len(chunk)
                if part.complete and answer.status_code == 200:
                    return  # the rest belongs to other parts
                if at > stop:  # if the body is longer than its headers say
                    raise Transient(f"{self.path} answered with more bytes than it announced")
        if not part.complete:
            raise Transient(f"{self.path} broke off at byte {part.next} of {part.stop}")

    def _note_redirect(self, answer: httpx.Response, part: "_BlobRange") -> None:
        url, etag = answer.headers.get("Location", ""), answer.headers.get("ETag", "")
        total = header_number(answer.headers.get(LENGTH_HEADER, ""))
        if not etag or total is None:
            raise UnexpectedAnswer(f"{self.path} answered with a redirect without ETag or {LENGTH_HEADER}")
        try:
            check_store_url(url, self._channel.http.base_url)
        except UnexpectedAnswer as error:
            self._channel.store.avoid(str(error))
            return  # the next request asks the coordinator for the bytes
        self._allocate(etag, total, part)
        self._redirect = url

    def _fetch_from_store(self, part: "_BlobRange", url: str) -> None:
        """Fetch what is missing of a part from the store. Raises Transient, httpx.TransportError and Stopped."""
        channel, total = self._channel, len(self._data)
        if part.start >= total:
            part.stop = part.next
            return
        part.end_at(total)
        assert part.stop is not None
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={part.next}-{part.stop - 1}"}
        with (
            channel.line.down.slot() as slot,
            channel.line.stalls.watched(),
            channel.down.stream(
                "GET", url, headers=headers, timeout=DOWNLOAD_TIMEOUT, extensions=channel.traced("down")
            ) as answer,
        ):
            if answer.status_code not in (200, 206):
                raise Transient(f"the store at {origin(url)} answers {answer.status_code} to a download")
            at, stop = part.next, part.stop
            if answer.status_code == 200:
                at, stop = 0, total
            elif _range_of(answer) != (at, stop, total):
                raise Transient(f"the store at {origin(url)} answered with another range than requested")
            for chunk in channel.received(answer, slot):
                if at + len(chunk) > stop:
                    raise Transient(f"the store at {origin(url)} answered with more bytes than were requested")
                part.store(self._data, chunk, at)
                at += len(chunk)
        if not part.complete:
            raise Transient(f"the store at {origin(url)} broke off at byte {part.next} of {part.stop}")

    def _begin(self, answer: httpx.Response, part: "_BlobRange") -> tuple[int, int]:
        """Return the byte range of the blob that the answer has. Allocate memory for the blob if it is a new one."""
        check_not_encoded(answer)
        etag, length = answer.headers.get("ETag", ""), header_number(answer.headers.get("Content-Length", ""))
        if not etag or length is None:
            raise UnexpectedAnswer(
                f"{self.path} answered without ETag or Content-Length: this is no coordinator, or a proxy changes "
                "its answers"
            )
        start, stop, total = 0, length, length  # without ranges, a proxy sends the whole blob
        if answer.status_code == 206:
            start, stop, total = _range_of(answer)
            if start != part.next or stop - start != length:
                raise Transient(f"{self.path} answered with another range than requested")
        elif answer.status_code != 200:
            raise Transient(f"{self.path} answered {answer.status_code} to a request for bytes")
        self._allocate(etag, total, part, begins=start == 0)
        part.end_at(total)
        return start, stop

    def _allocate(self, etag: str, total: int, part: "_BlobRange", *, begins: bool = False) -> None:
        """Allocate memory for the blob, unless it is there. `begins`: the answer has the blob from its first byte."""
        if total > self._limit_bytes:
            raise BeyondLimits(f"{self.path} announces {total} bytes; at most {self._limit_bytes} are possible")
        with self._lock:
            if etag != self._etag or total != len(self._data):
                self._etag, self._data = etag, memory(total)
                self._found()
                if begins:
                    part.restart()

    def _check_behind(self, answer: httpx.Response, part: "_BlobRange") -> None:
        """Return if the part begins beyond the end of the blob. Raises Transient if it does not."""
        total = _range_of(answer)[2]
        if part.start < total:
            part.restart()
            raise Transient(f"{self.path} changed during the download")
        part.stop = part.next


class _BlobRange:
    """The range of a blob that one connection fetches: bytes [start, stop), to the end if `stop` is None. Bytes before
    `next` have arrived."""

    def __init__(self, start: int, stop: int | None) -> None:
        self.start = self.next = start
        self.stop = self._wanted_stop = stop

    @property
    def complete(self) -> bool:
        return self.next == self.stop

    def range_header(self, etag: str) -> dict[str, str]:
        """Return the headers that request what is missing, of the blob `etag` if one has answered."""
        if self.next == 0 and self._wanted_stop is None:  # the whole blob
            return {}
        last = "" if self.stop is None else self.stop - 1
        return {"Range": f"bytes={self.next}-{last}"} | ({"If-Range": etag} if etag else {})

    def restart(self) -> None:
        self.next = self.start

    def end_at(self, total: int) -> None:
        self.stop = total if self._wanted_stop is None else min(self._wanted_stop, total)

    def store(self, data: memoryview, chunk: bytes, at: int) -> None:
        """Copy this range's bytes out of a chunk that begins at byte `at` of the blob."""
        assert self.stop is not None
        ours = memoryview(chunk)[max(self.next - at, 0) : max(self.stop - at, 0)]
        data[self.next : self.next + len(ours)] = ours
        self.next += len(ours)


def _range_of(answer: httpx.Response) -> tuple[int, int, int]:
    """Return the half-open range and the total size given by Content-Range. Raises Transient without one."""
    match = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    if match is None:
        url = answer.request.url.copy_with(query=None)  # the store's has a signature
        raise Transient(f"{url} answered {answer.status_code} without a valid Content-Range")
    first, last, total = (int(digits or 0) for digits in match.groups())
    return first, last + 1, total
