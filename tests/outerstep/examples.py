"""Replies of a coordinator, as JSON documents."""

from typing import Any

from protocol.spec.run import parse_spec

SPEC = 'name = "demo"\nmodel.preset = "tiny"\nsync.rounds = 4\nsync.inner_steps = 10\n'
DIGEST = "ab" * 32
ACCOUNT = {
    "upload_bytes": 4000,
    "download_bytes": 6000,
    "seconds": {"train": 9.0, "sync": 0.6, "wait": 0.4, "upload": 0.3, "encode": 0.05},
}


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
