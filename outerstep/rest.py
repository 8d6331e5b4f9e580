"""The operators' REST client (docs/rest.md): small, synchronous, one method per request.

Its methods raise one of three exceptions:

    Problem            the coordinator refused or failed; the problem's remedy says which
    Transient          no response, or a proxy's instead of the coordinator's; worth a retry
    UnexpectedAnswer   not a coordinator's response: the URL is wrong, or the certificate is not trusted; or a response
                       of another version, or one that is too large
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import httpx

from outerstep.common.answers import (
    ERROR_BYTES,
    Reply,
    beginning,
    pieces_within,
    raise_for_problem,
    read_body,
    read_message,
)
from outerstep.common.connections import check_address, error_text, ssl_context
from outerstep.common.quantities import natural
from protocol.errors import Problem, Transient, UnexpectedAnswer
from protocol.messages import (
    AuditEntry,
    CheckpointDetail,
    CheckpointInfo,
    EpochInfo,
    Event,
    NewToken,
    Page,
    RollBack,
    RoundDetail,
    RoundInfo,
    RunChange,
    RunDetail,
    RunInfo,
    ServerStatus,
    TokenInfo,
    TokenRequest,
    WorkerChange,
    WorkerInfo,
)
from protocol.versions import request_headers

T = TypeVar("T")

PAGE_ITEMS = 100
WATCHED_BYTES = 1 << 20  # of one event stream: one event, and occasional comments
TIMEOUT = httpx.Timeout(30.0, connect=10.0)  # seconds


class Client:
    """The operators' requests, on an `httpx.Client` with base_url and Authorization set (see `connect`)."""

    def __init__(self, http: httpx.Client, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.http, self._sleep = http, sleep

    def close(self) -> None:
        self.http.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- runs -----------------------------------------------------------------------------------------------------

    def runs(self) -> Iterator[RunInfo]:
        """Return all runs, by name."""
        return self._pages("/v1/runs", RunInfo)

    def run(self, run: str) -> RunDetail:
        return self._ask("GET", _path(run), RunDetail)

    def create_run(self, spec: str) -> tuple[RunInfo, bool]:
        """Create a run from a TOML spec. Return it, and True if it is new (False: it already exists with this spec)."""
        headers = {"content-type": "application/toml"}

        def read(response: httpx.Response) -> tuple[RunInfo, bool]:
            return read_message(RunInfo, response), response.status_code == httpx.codes.CREATED

        return self._send("POST", "/v1/runs", read, content=spec.encode(), headers=headers)

    def change_run(self, run: str, change: RunChange) -> RunInfo:
        return self._ask("PATCH", _path(run), RunInfo, json=change.model_dump())

    def roll_back(self, run: str, order: RollBack) -> RunInfo:
        """Roll a run back to a checkpoint."""
        return self._ask("POST", f"{_path(run)}/rollback", RunInfo, json=order.model_dump())

    def remove_run(self, run: str) -> None:
        """Remove an ended run with its files."""
        self._send("DELETE", _path(run), _discard)

    def workers(self, run: str) -> list[WorkerInfo]:
        """Return the run's workers, by name: box-4 before box-14."""
        return sorted(self._pages(_path(run, "workers"), WorkerInfo), key=lambda worker: natural(worker.name))

    def worker(self, run: str, worker: str) -> WorkerInfo:
        return self._ask("GET", _path(run, "workers", quote(worker, safe="")), WorkerInfo)

    def change_worker(self, run: str, worker: str, change: WorkerChange) -> WorkerInfo:
        path = _path(run, "workers", quote(worker, safe=""))
        return self._ask("PATCH", path, WorkerInfo, json=change.model_dump())

    def epochs(self, run: str) -> Iterator[EpochInfo]:
        """Yield the work units of each epoch that has begun, newest first."""
        return self._pages(_path(run, "units"), EpochInfo)

    def checkpoints(self, run: str) -> Iterator[CheckpointInfo]:
        """Yield the run's checkpoints, newest first."""
        return self._pages(_path(run, "checkpoints"), CheckpointInfo)

    def rounds(self, run: str) -> Iterator[RoundInfo]:
        """Yield the run's rounds, newest first."""
        return self._pages(_path(run, "rounds"), RoundInfo)

    def round(self, run: str, number: int) -> RoundDetail:
        return self._ask("GET", _path(run, "rounds", str(number)), RoundDetail)

    def events(self, run: str, after: int = 0) -> Iterator[Event]:
        """Yield the events after number `after`, oldest first, up to now."""
        return self._pages(_path(run, "events"), Event, after=str(after))

    def wait_for_event(self, run: str, after: int, *, patience_s: float) -> None:
        """Wait for an event with a number larger than `after`, at most `patience_s`.

        This is one long request (server-sent events). Call `events` to get the event itself.
        """
        headers = {"accept": "text/event-stream", "last-event-id": str(after)}
        timeout = httpx.Timeout(TIMEOUT.connect, read=patience_s)
        try:
            with self.http.stream("GET", _path(run, "events"), headers=headers, timeout=timeout) as response:
                raise_for_problem(response)
                line = b""
                for piece in pieces_within(response, WATCHED_BYTES):
                    *lines, line = (line + piece).split(b"\n")
                    if any(each.startswith(b"data:") for each in (*lines, line)):  # a comment begins with a colon
                        return
        except httpx.ReadTimeout:
            return
        except Problem as problem:
            self._wait_if_too_many(problem)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    def checkpoint(self, run: str) -> CheckpointDetail:
        """Return the latest checkpoint."""
        return self._ask("GET", _path(run, "checkpoints", "latest"), CheckpointDetail)

    # --- the coordinator itself -----------------------------------------------------------------------------------

    def health(self, read: Callable[[httpx.Response], T]) -> T:
        """Send a request that needs no token, and return what `read` makes of the response, whose body is a Health."""
        return self._send("GET", "/healthz", read)

    def status(self) -> ServerStatus:
        """Return the coordinator's status."""
        return self._ask("GET", "/v1/status", ServerStatus)

    # --- tokens ---------------------------------------------------------------------------------------------------

    def create_token(self, request: TokenRequest) -> NewToken:
        """Create a token. Its secret is only in this response."""
        return self._ask("POST", "/v1/tokens", NewToken, json=request.model_dump(mode="json"))

    def tokens(self) -> Iterator[TokenInfo]:
        return self._pages("/v1/tokens", TokenInfo)

    def rotate_token(self, token_id: str) -> NewToken:
        """Give a token a new secret, which is only in this response."""
        return self._ask("POST", f"/v1/tokens/{quote(token_id, safe='')}/secret", NewToken)

    def audit(self) -> Iterator[AuditEntry]:
        """Yield the audit log, newest first."""
        return self._pages("/v1/audit", AuditEntry)

    def revoke_token(self, token_id: str) -> None:
        self._send("DELETE", f"/v1/tokens/{quote(token_id, safe='')}", _discard)

    # --- line checks ----------------------------------------------------------------------------------------------

    def line_check_down(self, count: int) -> None:
        """Fetch `count` meaningless bytes; with 0, this only checks that workers may join with the token."""
        read = partial(read_body, limit_bytes=count)
        self._send("GET", "/v1/line-check", read, params={"bytes": str(count)})

    def line_check_up(self, content: bytes) -> None:
        """Send meaningless bytes."""
        self._send("POST", "/v1/line-check", _discard, content=content)

    # --- sending --------------------------------------------------------------------------------------------------

    def _pages(self, path: str, item: type[Reply], after: str | None = None) -> Iterator[Reply]:
        while True:
            cursor = {} if after is None else {"after": after}
            page = self._ask("GET", path, Page[item], params={"limit": str(PAGE_ITEMS), **cursor})  # type: ignore[valid-type]
            yield from page.items
            if page.next is None:
                return
            if not page.items or page.next == after:
                raise UnexpectedAnswer(f"{self.http.base_url} answers {path} with an endless list")
            after = page.next

    def _ask(self, method: str, path: str, reply: type[Reply], **request: Any) -> Reply:
        return self._send(method, path, partial(read_message, reply), **request)

    def _send(self, method: str, path: str, read: Callable[[httpx.Response], T], **request: Any) -> T:
        """Send a request, and retry it if the token has sent too many; return what `read` makes of the response."""
        while True:
            try:
                with self.http.stream(method, path, **request) as response:
                    raise_for_problem(response)
                    return read(response)
            except httpx.TransportError as error:
                raise self._unreachable(error) from error
            except Problem as problem:
                self._wait_if_too_many(problem)

    def _wait_if_too_many(self, problem: Problem) -> None:
        """Wait as long as the coordinator asks if the token has sent too many requests; raise any other problem."""
        if problem.slug != "too-many-requests":
            raise problem
        self._sleep(problem.retry_after_s or 1.0)

    def _unreachable(self, error: httpx.TransportError) -> Transient:
        url = str(self.http.base_url)
        check_address(url, error)
        reason = error_text(error, trust_env=self.http.trust_env)
        return Transient(f"cannot reach the coordinator at {url}: {reason}")


def connect(url: str, token: str, *, ca: Path | None = None, trust_env: bool = True) -> Client:
    """Return a client of the coordinator at `url`. `ca`: a PEM file of additional trusted certificates; `trust_env`:
    use HTTP_PROXY and similar variables. Raises ValueError if the file has no certificates, and WrongVariable."""
    headers = {**request_headers("operator"), "authorization": f"Bearer {token}"}
    verify = ssl_context(ca, trust_env=trust_env)
    return Client(httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT, trust_env=trust_env, verify=verify))


def _discard(response: httpx.Response) -> None:
    """Read and discard the body, so that the connection can be reused."""
    beginning(response, ERROR_BYTES)


def _path(run: str, *rest: str) -> str:
    return "/".join(("/v1/runs", quote(run, safe=""), *rest))
