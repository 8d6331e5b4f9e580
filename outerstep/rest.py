"""The operators' REST client (docs/rest.md): small, synchronous, one method per request.

Its methods raise one of three exceptions:

    Problem            the coordinator refused, or has a fault of its own; its remedy says which
    Transient          nobody answered, or a proxy did in the coordinator's place: worth trying again
    UnexpectedAnswer   the answer is not a coordinator's: the URL is wrong, or its certificate is not trusted; or it is
                       one of another version
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from protocol.answers import Reply, raise_for_problem, read_message
from protocol.errors import Problem, Transient
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
from protocol.reaching import check_address, in_words, trusting
from protocol.telling import natural
from protocol.versions import of_requests

PAGE_ITEMS = 100
TIMEOUT = httpx.Timeout(30.0, connect=10.0)  # seconds


class Client:
    """The operators' requests, on an `httpx.Client` whose base_url and Authorization are set (see `connect`)."""

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
        """Create a run from a TOML spec. Return it, and True if it is new (False: it was there with the same spec)."""
        headers = {"content-type": "application/toml"}
        response = self._send("POST", "/v1/runs", content=spec.encode(), headers=headers)
        return read_message(RunInfo, response), response.status_code == httpx.codes.CREATED

    def change_run(self, run: str, change: RunChange) -> RunInfo:
        return self._ask("PATCH", _path(run), RunInfo, json=change.model_dump())

    def roll_back(self, run: str, order: RollBack) -> RunInfo:
        """Take a run back to a checkpoint."""
        return self._ask("POST", f"{_path(run)}/rollback", RunInfo, json=order.model_dump())

    def remove_run(self, run: str) -> None:
        """Remove a run that has ended, with its files."""
        self._send("DELETE", _path(run))

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
        """Yield the checkpoints that are kept of the run, newest first."""
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

        This is one long request (server-sent events). `events` then has the event itself.
        """
        headers = {"accept": "text/event-stream", "last-event-id": str(after)}
        timeout = httpx.Timeout(TIMEOUT.connect, read=patience_s)
        try:
            with self.http.stream("GET", _path(run, "events"), headers=headers, timeout=timeout) as response:
                raise_for_problem(response)
                for line in response.iter_lines():
                    if line.startswith("data:"):  # comments, which keep the connection alive, begin with a colon
                        return
        except httpx.ReadTimeout:
            return
        except Problem as problem:
            self._wait_where_too_many(problem)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    def checkpoint(self, run: str) -> CheckpointDetail:
        """Return the latest checkpoint."""
        return self._ask("GET", _path(run, "checkpoints", "latest"), CheckpointDetail)

    # --- the coordinator itself -----------------------------------------------------------------------------------

    def status(self) -> ServerStatus:
        """Return how the coordinator is."""
        return self._ask("GET", "/v1/status", ServerStatus)

    # --- tokens ---------------------------------------------------------------------------------------------------

    def create_token(self, request: TokenRequest) -> NewToken:
        """Make a token. Its secret is in this answer only."""
        return self._ask("POST", "/v1/tokens", NewToken, json=request.model_dump(mode="json"))

    def tokens(self) -> Iterator[TokenInfo]:
        return self._pages("/v1/tokens", TokenInfo)

    def rotate_token(self, token_id: str) -> NewToken:
        """Give a token another secret, which is in this answer only."""
        return self._ask("POST", f"/v1/tokens/{quote(token_id, safe='')}/secret", NewToken)

    def audit(self) -> Iterator[AuditEntry]:
        """Yield who did what with a token, or to one, newest first."""
        return self._pages("/v1/audit", AuditEntry)

    def revoke_token(self, token_id: str) -> None:
        self._send("DELETE", f"/v1/tokens/{quote(token_id, safe='')}")

    # --- line checks ----------------------------------------------------------------------------------------------

    def line_check_down(self, count: int) -> None:
        """Fetch so many bytes of no meaning; none of them asks whether the token lets workers join."""
        self._send("GET", "/v1/line-check", params={"bytes": str(count)})

    def line_check_up(self, content: bytes) -> None:
        """Send bytes of no meaning."""
        self._send("POST", "/v1/line-check", content=content)

    # --- the one way out ------------------------------------------------------------------------------------------

    def _pages(self, path: str, item: type[Reply], after: str | None = None) -> Iterator[Reply]:
        while True:
            cursor = {} if after is None else {"after": after}
            page = self._ask("GET", path, Page[item], params={"limit": str(PAGE_ITEMS), **cursor})  # type: ignore[valid-type]
            yield from page.items
            after = page.next
            if after is None:
                return

    def _ask(self, method: str, path: str, reply: type[Reply], **request: Any) -> Reply:
        return read_message(reply, self._send(method, path, **request))

    def _send(self, method: str, path: str, **request: Any) -> httpx.Response:
        """Send a request; again, when it may be, where the token has sent too many."""
        while True:
            try:
                response = self.http.request(method, path, **request)
            except httpx.TransportError as error:
                raise self._unreachable(error) from error
            try:
                raise_for_problem(response)
            except Problem as problem:
                self._wait_where_too_many(problem)
            else:
                return response

    def _wait_where_too_many(self, problem: Problem) -> None:
        """Wait as long as the coordinator says, where the token has sent too many requests; raise any other problem."""
        if problem.slug != "too-many-requests":
            raise problem
        self._sleep(problem.retry_after_s or 1.0)

    def _unreachable(self, error: httpx.TransportError) -> Transient:
        url = str(self.http.base_url)
        check_address(url, error)
        return Transient(f"cannot reach the coordinator at {url}: {in_words(error)}")


def connect(url: str, token: str, *, ca: Path | None = None, trust_env: bool = True) -> Client:
    """Return a client of the coordinator at `url`. `ca`: a PEM file of certificates that are trusted too; `trust_env`:
    heed HTTP_PROXY and its like. Raises ValueError for a file without certificates."""
    headers = {**of_requests("operator"), "authorization": f"Bearer {token}"}
    verify = trusting(ca)
    return Client(httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT, trust_env=trust_env, verify=verify))


def _path(run: str, *rest: str) -> str:
    return "/".join(("/v1/runs", quote(run, safe=""), *rest))
