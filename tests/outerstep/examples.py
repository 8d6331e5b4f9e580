"""Replies of a coordinator, as JSON documents; and a client that gets them."""

from collections.abc import Callable
from typing import Any

import httpx

from outerstep.rest import Client
from protocol.errors import Problem
from protocol.spec.run import parse_spec

SPEC = 'name = "demo"\nmodel.preset = "tiny"\nsync.rounds = 4\nsync.inner_steps = 10\n'
DIGEST = "ab" * 32
ACCOUNT = {
    "upload_bytes": 4000,
    "download_bytes": 6000,
    "seconds": {"train": 9.0, "sync": 0.6, "wait": 0.4, "upload": 0.3, "encode": 0.05},
}


def client_of(answer: Callable[[httpx.Request], httpx.Response], **options: Any) -> Client:
    """A client of a coordinator that answers so."""
    transport = httpx.MockTransport(answer)
    return Client(httpx.Client(base_url="http://coordinator.test", transport=transport), **options)


def page(items: list[dict[str, Any]], following: str | None) -> dict[str, Any]:
    return {"items": items, "next": following}


def run_document(**changes: Any) -> dict[str, Any]:
    return {
        "name": "demo",
        "state": "running",
        "reason": "waiting for 2 of 2 workers",
        "round": 0,
        "rounds": 4,
        "spec_digest": DIGEST,
        "created_at": 1_700_000_000.0,
        "live_workers": 2,
        "fragments": 3,
        "elements": 1000,
        "tokens": 12_800,
        "upload_bytes": 4000,
        "account": ACCOUNT,
        "held_out_loss": 5.5,
        "state_digest": None,
        "disk_bytes": dict.fromkeys(("contributions", "deltas", "checkpoints", "state", "set_aside"), 0),
        "spec": parse_spec(SPEC).model_dump(mode="json"),
        **changes,
    }


def round_document(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "round": number,
        "state": "published",
        "reason": "all 2 workers have contributed",
        "opened_at": 1_700_000_000.0,
        "closed_at": 1_700_000_002.0,
        "tokens": 10_000,
        "loss": 3.25,
        "held_out_loss": 3.5,
        "upload_bytes": 2_000_000,
        "delta_bytes": 1_000_000,
        **changes,
    }


def fragment_document(contributors: list[str]) -> dict[str, Any]:
    empty = dict.fromkeys(("closes_in_s", "delta_bytes", "delta_digest"))
    return {"fragment": 0, "state": "published", "reason": "published", "contributors": contributors, **empty}


def worker_document(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "state": "left",
        "epoch": 1,
        "joined_at": 1_700_000_000.0,
        "last_seen_s": None,
        "host": {},
        "metrics": {"upload_bytes": 4000, "download_bytes": 6000, "loss": 3.0},
        "contributions": 4,
        "tokens": 5000,
        "upload_bytes": 3900,
        "state_round": 4,
        "state_digest": DIGEST,
        **changes,
    }


def event_document(number: int, message: str = "worker-0 joined") -> dict[str, Any]:
    return {"id": number, "at": 1_700_000_000.0, "kind": "worker-joined", "message": message, "data": {}}


def rollback_document(number: int, to: int) -> dict[str, Any]:
    return {**event_document(number, f"went back to state {to}"), "kind": "rolled-back", "data": {"round": to}}


class History:
    """A coordinator that answers requests about the run demo from `moments`, each with its "run", "rounds" and "events".
    Waiting for an event goes on to the next one. A moment that is an exception is what every request meets until then;
    `trouble` has what single requests meet, by their number."""

    def __init__(self, *moments: dict[str, Any] | Exception, trouble: dict[int, Exception] | None = None) -> None:
        self.moments, self.trouble = list(moments), dict(trouble or {})
        self.requests = 0
        self.waited_after: list[str] = []
        self.reported: dict[int, dict[str, Any]] = {}  # more of single rounds
        self.detailed: list[int] = []

    def client(self) -> Client:
        return client_of(self.answer)

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.requests += 1
        if trouble := self.trouble.pop(self.requests, None):
            raise trouble
        path, waits = request.url.path.removeprefix("/v1/runs/demo"), "last-event-id" in request.headers
        if waits:
            self.waited_after.append(request.headers["last-event-id"])
            self.moments.pop(0)
        now = self.moments[0]
        if isinstance(now, Problem):
            return httpx.Response(now.status, json=now.document())
        if isinstance(now, Exception):
            raise now
        if waits:
            return httpx.Response(200, text="data: {}\n\n")
        if path == "/rounds":
            return httpx.Response(200, json=page(now["rounds"], None))
        if path == "/events":
            after = int(request.url.params["after"])
            return httpx.Response(200, json=page([item for item in now["events"] if item["id"] > after], None))
        if path.startswith("/rounds/"):
            return self._round(now["rounds"], int(path.removeprefix("/rounds/")))
        return httpx.Response(200, json=now["run"] if path == "" else page([], None))

    def _round(self, rounds: list[dict[str, Any]], number: int) -> httpx.Response:
        self.detailed.append(number)
        (found,) = (each for each in rounds if each["round"] == number)
        more = {"fragments": [fragment_document(["a", "b"])], **self.reported.get(number, {})}
        return httpx.Response(200, json=found | more)
