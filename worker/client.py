"""The REST interface as a worker uses it (docs/rest.md): one method per request, on an `httpx.Client` that the caller
made.

Every method retries transient faults for ever (retry.py) and raises `protocol.errors.Problem` for the coordinator's
refusals. Thread-safe. Methods that act as a member take the member token; the others use the token given here.
"""

import copy
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import httpx
from blake3 import blake3
from pydantic import BaseModel, ValidationError

from protocol import messages, wire
from protocol.digest import Buffer, content_digest
from protocol.errors import WireError
from worker.errors import UnexpectedAnswer
from worker.retry import Retry, Transient
from worker.transfer import Download, Traffic, pieces, raise_for_problem

T = TypeVar("T")
Reply = TypeVar("Reply", bound=BaseModel)

# Shorter than the 30 s that the coordinator allows, so that a worker that is asked to stop is gone soon.
LONG_POLL_S = 5
TIMEOUT = httpx.Timeout(connect=10.0, read=60.0, write=60.0, pool=None)  # of silence, not of a transfer
LEAVE_ATTEMPTS = 3


def open_http(url: str) -> httpx.Client:
    """An `httpx.Client` with the timeouts and the connection pool that a worker wants. Close it after use."""
    limits = httpx.Limits(max_connections=32, max_keepalive_connections=32)
    return httpx.Client(base_url=url, timeout=TIMEOUT, limits=limits)


class Client:
    """One run on one coordinator. `http` has the coordinator's address as its base_url."""

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
    ) -> None:
        self.run = run
        self.stop = stop or threading.Event()
        self.traffic = Traffic()
        self._http = http
        self._token = token
        self._retry = Retry(self.stop, sleep=sleep, rng=rng, clock=clock)
        self._path = f"/v1/runs/{run}"

    def until(self, stop: threading.Event) -> Self:
        """The same client, with another event that ends its waiting."""
        other = copy.copy(self)
        other.stop, other._retry = stop, self._retry.until(stop)
        return other

    def pause(self, seconds: float) -> None:
        """Wait; raises Stopped as soon as the worker is asked to stop."""
        self._retry.pause(seconds)

    # --- the run --------------------------------------------------------------------------------------------------

    def run_detail(self) -> messages.RunDetail:
        return self._json("GET", self._path, messages.RunDetail)

    def spec_text(self) -> str:
        """The run spec as it was given, TOML."""
        return self._retry(lambda: self._answer("GET", f"{self._path}/spec", self._token)).text

    # --- membership -----------------------------------------------------------------------------------------------

    def join(self, worker: str, request: messages.JoinRequest) -> messages.JoinReply:
        return self._json("PUT", f"{self._path}/workers/{worker}", messages.JoinReply, request)

    def leave(self, member_token: str, worker: str, request: messages.LeaveRequest) -> None:
        """Leave. Tried a few times only, and even after `stop`: the lease ends without it too, only later."""
        for attempt in range(1, LEAVE_ATTEMPTS + 1):
            try:
                self._answer("DELETE", f"{self._path}/workers/{worker}", member_token, request)
                return
            except (httpx.TransportError, Transient):
                if attempt == LEAVE_ATTEMPTS:
                    raise

    def renew_lease(self, member_token: str, worker: str, metrics: messages.Metrics) -> messages.LeaseReply:
        return self._json("PUT", f"{self._path}/workers/{worker}/lease", messages.LeaseReply, metrics, member_token)

    def assignment(self, member_token: str, worker: str, state_round: int | None) -> messages.Assignment:
        """What to do next; the coordinator may take its time to answer."""
        request = messages.AssignmentRequest(state_round=state_round)
        path = f"{self._path}/workers/{worker}/assignment"
        return self._json("PUT", path, messages.Assignment, request, member_token, headers=_long_poll())

    # --- rounds ---------------------------------------------------------------------------------------------------

    def report_evaluation(self, member_token: str, state_round: int, report: messages.EvaluationReport) -> None:
        path = f"{self._path}/rounds/{state_round}/evaluation"
        self._retry(lambda: self._answer("PUT", path, member_token, report))

    def contribute(self, member_token: str, header: wire.ContributionHeader, frames: Sequence[Buffer]) -> None:
        """Upload one contribution; when this returns it is durable."""
        path = f"{self._path}/rounds/{header.round}/fragments/{header.fragment}/contributions/{header.worker}"
        self._upload(member_token, path, [wire.pack_header(header), *frames])

    def delta(self, round_number: int, p: int, limit_bytes: int) -> wire.Payload:
        """The delta of one fragment. Problem `not-published` where it is not there after a while: ask again."""
        return self._download(f"{self._path}/rounds/{round_number}/fragments/{p}/delta", limit_bytes, _long_poll())

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def seed(self, member_token: str, header: wire.StateHeader, frames: Sequence[Buffer]) -> None:
        """Upload one fragment of state 0."""
        path = f"{self._path}/checkpoints/0/fragments/{header.fragment}"
        self._upload(member_token, path, [wire.pack_header(header), *frames])

    def checkpoint(self, state_round: int | None = None) -> messages.CheckpointDetail:
        """One checkpoint; the latest for None."""
        number = "latest" if state_round is None else str(state_round)
        return self._json("GET", f"{self._path}/checkpoints/{number}", messages.CheckpointDetail)

    def checkpoint_fragment(self, state_round: int, p: int, limit_bytes: int) -> wire.Payload:
        return self._download(f"{self._path}/checkpoints/{state_round}/fragments/{p}", limit_bytes, {})

    # --- requests -------------------------------------------------------------------------------------------------

    def _answer(
        self, method: str, path: str, token: str, body: BaseModel | None = None, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        """One request, one answer."""
        content = None if body is None else body.model_dump_json().encode()
        all_headers = {"Authorization": f"Bearer {token}", **(headers or {})}
        if content is not None:
            all_headers["Content-Type"] = "application/json"
        response = self._http.request(method, path, content=content, headers=all_headers)
        raise_for_problem(response)
        if response.is_redirect:
            raise UnexpectedAnswer(
                f"{response.request.url} redirects to {response.headers['Location']}; give that address"
            )
        return response

    def _json(
        self,
        method: str,
        path: str,
        reply: type[Reply],
        body: BaseModel | None = None,
        token: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Reply:
        def attempt() -> Reply:
            response = self._answer(method, path, token or self._token, body, headers)
            try:
                return reply.model_validate_json(response.content)
            except ValidationError as error:
                start = response.text[:200]
                raise Transient(f"{method} {path} answered what is no {reply.__name__}: {start!r}: {error}") from error

        return self._retry(attempt)

    def _upload(self, token: str, path: str, buffers: Sequence[Buffer]) -> None:
        total_bytes, hasher = 0, blake3()
        for buffer in buffers:
            total_bytes += len(buffer)
            hasher.update(buffer)
        headers = {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/octet-stream",
            "Content-Length": str(total_bytes),
            "Content-Digest": content_digest(hasher.digest()),
        }

        def attempt() -> None:
            body: Any = pieces(buffers, self.traffic)
            raise_for_problem(self._http.put(path, content=body, headers=headers))

        self._retry(attempt)

    def _download(self, path: str, limit_bytes: int, headers: dict[str, str]) -> wire.Payload:
        headers = {"Authorization": f"Bearer {self._token}", **headers}
        data = self._retry(Download(self._http, path, headers, limit_bytes, self.traffic).attempt)
        try:
            return wire.Payload.from_bytes(data)
        except WireError as error:
            # Its digest is right, so asking again would bring the same bytes.
            raise UnexpectedAnswer(f"{path}: {error}; do both sides have the same version?") from error


def _long_poll() -> dict[str, str]:
    return {"Prefer": f"wait={LONG_POLL_S}"}
