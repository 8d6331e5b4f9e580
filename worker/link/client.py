"""The worker's REST client (docs/rest.md): one method per request, on a given `httpx.Client`.

Every method retries transient faults indefinitely (retry.py) and raises `protocol.errors.Problem` if the coordinator
refuses. Thread-safe. Methods that act as a member take the member token; the others use the client's own token.
"""

import copy
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel

from outerstep.common.answers import ERROR_BYTES, Reply, beginning, raise_for_problem, read_body, read_message
from outerstep.common.connections import KEPT_OPEN_S, ssl_context
from protocol import messages, wire
from protocol.digest import Buffer
from protocol.errors import BeyondLimits, NotUnderstood, Problem, Transient, UnexpectedAnswer, WireError
from protocol.spec.run import MAX_SPEC_BYTES
from protocol.versions import OURS, different_builds, request_headers
from worker.accounts.stages import Stages, Traffic
from worker.line.connections import Pool
from worker.line.line import DOWN, UP, Direction, Line
from worker.line.retry import Retry, Signal
from worker.line.store import StorePath
from worker.line.store_upload import StoreUpload
from worker.line.transfer import CONNECT_S, LONG_POLL_S, Channel, Download, Upload
from worker.process import interruptible

TIMEOUT = httpx.Timeout(
    connect=CONNECT_S, read=60.0, write=60.0, pool=None
)  # without any byte, not for the whole transfer
OTHERS = 32  # connections, beside those that send or receive a transfer's bytes
LEAVE_ATTEMPTS = 3
MAX_LISTED = 1000  # items of one listing

T = TypeVar("T")

log = logging.getLogger(__name__)


class Http(httpx.Client):
    """An `httpx.Client` with two more, `up` for uploads and `down` for downloads. A request gets the oldest connection
    that is free. So within each direction a few connections carry most of the bytes, and their windows stay wide. If
    other requests shared them, transfers would begin on connections that had only carried small ones."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.up, self.down = httpx.Client(**given), httpx.Client(**given)

    def close(self) -> None:
        for each in (self.up, self.down):
            each.close()
        super().close()

    def __exit__(self, *error: Any) -> None:
        for each in (self.up, self.down):
            each.close()
        super().__exit__(*error)


def open_http(url: str, ca: Path | None = None) -> Http:
    """Return an `Http` with a worker's timeouts and connection limits. It also trusts the certificates in the file
    `ca`. Close it after use. Raises ValueError for a file without certificates, and WrongVariable."""
    most = max(UP[1], DOWN[1]) + OTHERS
    limits = httpx.Limits(max_connections=most, max_keepalive_connections=most, keepalive_expiry=KEPT_OPEN_S)
    headers = request_headers("worker")
    return Http(base_url=url, headers=headers, timeout=TIMEOUT, limits=limits, verify=ssl_context(ca))


class Client:
    """A client of one run on one coordinator. The base_url of `http` is the coordinator's address. Transfers use `up`
    and `down` of an `Http`. `max_up` and `max_down` limit payloads, in bits per second."""

    def __init__(
        self,
        http: httpx.Client,
        run: str,
        token: str,
        *,
        stop: threading.Event | None = None,
        sleep: Callable[[float], object] | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_up: float | None = None,
        max_down: float | None = None,
    ) -> None:
        self.run = run
        self.stop = stop or threading.Event()
        self.clock = clock
        self.line = Line(clock, max_up=max_up, max_down=max_down)
        self.traffic = Traffic()
        self.stages = Stages(clock)
        self._token = token
        retry = Retry(self.stop, sleep=sleep, rng=rng, clock=clock)
        self.store = StorePath(clock)
        up, down = (http.up, http.down) if isinstance(http, Http) else (http, http)
        shared = self.line, self.traffic, self.stages, self.store
        self._channel = Channel(http, up, down, *shared, stop=self.stop, until=self.stop, retry=retry)
        self._path = f"/v1/runs/{run}"

    def until(self, signal: Signal, *, silence_s: float | None = None) -> Self:
        """Return the same client, except that `signal` ends its waiting instead of `stop`, and that it repeats a
        request after `silence_s` without an answer, and no later after a failure (None: the default timeouts)."""
        other = copy.copy(self)
        retry = self._retry.until(signal, longest_s=silence_s)
        other._channel = replace(self._channel, until=signal, silence_s=silence_s, retry=retry)
        return other

    @property
    def has_join_token(self) -> bool:
        """True if the client's token is a join token, which has to be exchanged."""
        return self._token.startswith(messages.JOIN_PREFIX)

    @property
    def _retry(self) -> Retry:
        return self._channel.retry

    def for_run(self, run: str) -> Self:
        """Return the same client for another run on the same coordinator."""
        other = copy.copy(self)
        other.run, other._path = run, f"/v1/runs/{run}"
        return other

    def with_token(self, token: str) -> Self:
        """Return the same client with another token."""
        other = copy.copy(self)
        other._token = token
        return other

    def pause(self, seconds: float) -> None:
        """Wait. Raises Stopped as soon as the worker is asked to stop."""
        self._retry.pause(seconds)

    def open_ahead(self) -> None:
        """Start to open the connections of the next transfers, if that takes long enough to matter and those of the
        last transfers are not open any more."""
        self._open_pool("up", self._channel.up, self.line.up)
        self._open_pool("down", self._channel.down, self.line.down)

    def _open_pool(self, pool: Pool, http: httpx.Client, direction: Direction) -> None:
        wanted = direction.parallel.now
        if self.line.is_far and self.line.connections.count(pool) < wanted:
            direction.start(partial(self._open, pool, http), wanted)

    def _open(self, pool: Pool, http: httpx.Client) -> None:
        try:
            with http.stream("GET", "/healthz", timeout=CONNECT_S, extensions=self._channel.traced(pool)) as response:
                _pass_over(response)
        except httpx.TransportError as error:
            log.debug("could not open a connection ahead: %s", error)  # the request that needs one will report it

    # --- the run --------------------------------------------------------------------------------------------------

    def run_detail(self) -> messages.RunDetail:
        detail = self._json("GET", self._path, messages.RunDetail)
        self.store.offer(detail.direct)
        return detail

    def spec_text(self) -> str:
        """Return the run spec as it was submitted, TOML."""
        read = partial(read_body, limit_bytes=MAX_SPEC_BYTES)
        return self._retry(lambda: self._answer("GET", f"{self._path}/spec", self._token, read)).decode()

    # --- membership -----------------------------------------------------------------------------------------------

    def exchange_token(self, worker: str, request: messages.ExchangeRequest) -> messages.TokenInfo:
        """Exchange this client's join token for a worker token, whose secret the request names."""
        return self._json("POST", f"{self._path}/workers/{worker}/token", messages.TokenInfo, request)

    def join(self, worker: str, request: messages.JoinRequest) -> messages.JoinReply:
        return self._json("PUT", f"{self._path}/workers/{worker}", messages.JoinReply, request)

    def give_up(self, member_token: str, worker: str) -> None:
        """Leave in order to join again. Retried indefinitely, like every request that a worker cannot do without."""
        path = f"{self._path}/workers/{worker}"
        self._retry(lambda: self._answer("DELETE", path, member_token, _pass_over, messages.LeaveRequest()))

    def leave(self, member_token: str, worker: str, request: messages.LeaveRequest) -> None:
        """Leave. Retried only a few times, even after `stop`: if it fails, the lease expires, only later."""
        for attempt in range(1, LEAVE_ATTEMPTS + 1):
            try:
                self._answer("DELETE", f"{self._path}/workers/{worker}", member_token, _pass_over, request)
                return
            except (httpx.TransportError, Transient):
                if attempt == LEAVE_ATTEMPTS:
                    raise

    def renew_lease(self, member_token: str, worker: str, metrics: messages.Metrics) -> messages.LeaseReply:
        return self._json("PUT", f"{self._path}/workers/{worker}/lease", messages.LeaseReply, metrics, member_token)

    def assignment(
        self,
        member_token: str,
        worker: str,
        state_round: int | None,
        carried: list[list[int]] | None = None,
        report: messages.RoundReport | None = None,
        rows: int | None = None,
    ) -> messages.Assignment:
        """Ask what to do next. If there is nothing yet, the coordinator answers after at most LONG_POLL_S."""
        request = messages.AssignmentRequest(state_round=state_round, carried=carried, report=report, rows=rows)
        path = f"{self._path}/workers/{worker}/assignment"
        return self._json("PUT", path, messages.Assignment, request, member_token, headers=_long_poll())

    # --- rounds ---------------------------------------------------------------------------------------------------

    def report_evaluation(
        self, member_token: str, state_round: int, redone: int, report: messages.EvaluationReport
    ) -> messages.EvaluationReply:
        path = f"{self._path}/rounds/{state_round}/evaluation?redone={redone}"
        return self._json("PUT", path, messages.EvaluationReply, report, member_token)

    def report_without(self, member_token: str, state_round: int, redone: int, report: messages.WithoutReport) -> None:
        path = f"{self._path}/rounds/{state_round}/evaluation/without?redone={redone}"
        self._retry(lambda: self._answer("PUT", path, member_token, _pass_over, report))

    def without(self, member_token: str, state_round: int, p: int, worker: str, elements: int) -> wire.Payload:
        """Fetch the last mean of fragment p without `worker` minus that of all. `elements`: of the fragment."""
        path = f"{self._path}/rounds/{state_round}/fragments/{p}/without/{worker}"
        limit_bytes = wire.max_payload_bytes("fp32", elements)
        expected_bytes = wire.max_payload_bytes(wire.DIFFERENCES, elements) - wire.MAX_HEADER_BYTES
        return _payload(Download(self._channel, lambda: path, self._headers(member_token), limit_bytes, expected_bytes))

    def contribute(
        self,
        member_token: str,
        header: wire.ContributionHeader,
        frames: Sequence[Buffer],
        *,
        on_line: Callable[[], object] = lambda: None,
    ) -> None:
        """Upload one contribution; it is durable when this returns. `on_line` is called when the upload has a slot: a
        thread that asks for one after that comes next."""
        path = f"{self._path}/rounds/{header.round}/fragments/{header.fragment}/contributions/{header.worker}"
        buffers = [wire.pack_header(header), *frames]
        if self.store.usable and len(buffers[0]) <= messages.DIRECT_HEADER_BYTES:
            post = partial(self._json, "POST", token=member_token)
            grant = lambda upload: post(f"{path}/grant", messages.UploadGrant, upload)  # noqa: E731
            commit = lambda upload: post(f"{path}/commit", messages.ContributionReply, upload)  # noqa: E731
            if StoreUpload(self._channel, buffers, grant, commit, on_line)():
                return
        Upload(self._channel, path, self._headers(member_token), buffers, on_line)()

    def delta(
        self,
        round_number: int,
        p: int,
        limit_bytes: int,
        member_token: str | None = None,
        *,
        early: Callable[[], bool] = lambda: False,
        again: Callable[[Problem], bool] = lambda problem: False,
        found: Callable[[], None] = lambda: None,
    ) -> wire.Payload:
        """Fetch the delta of one fragment. `found` is called once it is published, before it has arrived.

        Raises Problem `not-published` if it is not there within LONG_POLL_S, unless `again` returns True; and
        `contribution-lost` if the round lacks this member's contribution, unless `early` returns True because that is
        still on its way.
        """
        path = f"{self._path}/rounds/{round_number}/fragments/{p}/delta"
        headers, expected_bytes = self._headers(member_token) | _long_poll(), limit_bytes - wire.MAX_HEADER_BYTES
        to_ask = lambda: f"{path}?early=true" if early() else path  # noqa: E731
        return _payload(
            Download(self._channel, to_ask, headers, limit_bytes, max(expected_bytes, 1), again=again, found=found)
        )

    def newest_rounds(self, before: int, count: int) -> list[messages.RoundInfo]:
        """Return up to `count` (at most 1000) of the rounds before `before`, newest first."""
        path = f"{self._path}/rounds?after={before}&limit={count}"
        return self._json("GET", path, messages.Page[messages.RoundInfo]).items

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def seed(self, member_token: str, header: wire.StateHeader, frames: Sequence[Buffer]) -> None:
        """Upload one fragment of state 0."""
        path = f"{self._path}/checkpoints/0/fragments/{header.fragment}"
        buffers = [wire.pack_header(header), *frames]
        Upload(self._channel, path, self._headers(member_token), buffers)()

    def checkpoint(self, state_round: int | None = None) -> messages.CheckpointDetail:
        """Return the description of checkpoint `state_round` (None: the latest)."""
        number = "latest" if state_round is None else str(state_round)
        return self._json("GET", f"{self._path}/checkpoints/{number}", messages.CheckpointDetail)

    def checkpoints(self) -> list[messages.CheckpointInfo]:
        """Return the newest checkpoints that are kept, 1000 at most."""
        path = f"{self._path}/checkpoints?limit={MAX_LISTED}"
        return self._json("GET", path, messages.Page[messages.CheckpointInfo]).items

    def checkpoint_fragment(
        self, state_round: int, fragment: messages.CheckpointFragment, limit_bytes: int
    ) -> wire.Payload:
        """Fetch one fragment of a checkpoint."""
        path = f"{self._path}/checkpoints/{state_round}/fragments/{fragment.fragment}"
        if fragment.bytes > limit_bytes:
            raise UnexpectedAnswer(
                f"{path} is announced with {fragment.bytes} bytes; at most {limit_bytes} are possible"
            )
        size = fragment.bytes
        return _payload(Download(self._channel, lambda: path, self._headers(), size, size, fragment.digest))

    # --- requests -------------------------------------------------------------------------------------------------

    def _answer(
        self,
        method: str,
        path: str,
        token: str,
        read: Callable[[httpx.Response], T],
        body: BaseModel | None = None,
        headers: dict[str, str] | None = None,
    ) -> T:
        """Send one request, once, and return what `read` makes of the answer."""
        content = None if body is None else body.model_dump_json().encode()
        all_headers = self._headers(token) | (headers or {})
        if content is not None:
            all_headers["Content-Type"] = "application/json"
        waits, channel, begun = "Prefer" in all_headers, self._channel, self.clock()
        with (
            interruptible() if (waits or method == "GET") and channel.until is self.stop else nullcontext(),
            channel.http.stream(
                method,
                path,
                content=content,
                headers=all_headers,
                timeout=channel.timeout(),
                extensions=channel.traced("other"),
            ) as response,
        ):
            if not waits:
                self.line.answered(self.clock() - begun)
            raise_for_problem(response)
            return read(response)

    def _json(
        self,
        method: str,
        path: str,
        reply: type[Reply],
        body: BaseModel | None = None,
        token: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Reply:
        def read(response: httpx.Response) -> Reply:
            try:
                return read_message(reply, response)
            except NotUnderstood:
                raise
            except UnexpectedAnswer as error:
                is_page = response.headers.get("Content-Type", "").startswith("text/html")
                if not self._retry.has_answered and (is_page or isinstance(error, BeyondLimits)):
                    raise  # another server's
                raise Transient(str(error)) from error  # the body may have been damaged on the way

        return self._retry(lambda: self._answer(method, path, token or self._token, read, body, headers))

    def _headers(self, token: str | None = None) -> dict[str, str]:
        return {"Authorization": f"Bearer {token or self._token}"}


def _payload(download: Download) -> wire.Payload:
    """Fetch a payload. Raises NotUnderstood if it violates the format: its digest is right, so another download would
    bring the same bytes."""
    data = download()
    try:
        return wire.Payload.from_bytes(data)
    except WireError as error:
        raise NotUnderstood(f"{download.path}: {error}; {different_builds(OURS, download.coordinator)}") from error


def _pass_over(response: httpx.Response) -> None:
    """Read a body without content, so that the connection can be reused."""
    beginning(response, ERROR_BYTES)


def _long_poll() -> dict[str, str]:
    return {"Prefer": f"wait={LONG_POLL_S}"}
