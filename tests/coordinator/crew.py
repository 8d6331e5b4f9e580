"""Members of a run for tests: joined, with state 0 seeded and held by all of them."""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from benchmarks.harness.coordinator import InThread, Running
from benchmarks.harness.member import Member, spec_toml
from benchmarks.harness.stores import Blocked
from protocol.errors import PROBLEM_PREFIX, PROBLEMS
from tests.support.openapi import check_declared

GRACE_OF_A_SECOND = "lease_s = 100\ngrace_factor = 0\ngrace_min_s = 1\ngrace_max_s = 1"


def enlist(running: Running, run: str, name: str) -> Member:
    """A new member that holds no state yet."""
    member = Member(running.client(), run, name)
    member.join(running.admin_token)
    return member


def recovered(member: Member) -> Member:
    """Give the member state 0, as `Member.seed` makes it."""
    for theta in member.theta:
        theta[:] = 0.5
    return member


def crew(running: Running, run: str, names: list[str], **spec: Any) -> list[Member]:
    """A new run and its members. The first of them has seeded state 0, and all of them hold it."""
    running.create_run(spec_toml(run, **spec))
    members = [enlist(running, run, name) for name in names]
    assert members[0].assignment(None).action == "seed"
    members[0].seed()
    return [recovered(member) for member in members]


def play_round(members: list[Member], round_: int) -> None:
    """All of `members` take part in a round and step."""
    for member in members:
        member.assignment(round_)
    for member in members:
        member.take_part(round_)
    for member in members:
        member.step(round_)


def problem(reply: httpx.Response, slug: str) -> dict[str, Any]:
    """The problem document of a refusal, which must be the named one, and one that OpenAPI tells of."""
    document: dict[str, Any] = reply.json()
    assert reply.headers["content-type"] == "application/problem+json", reply.text
    assert document["type"] == PROBLEM_PREFIX + slug, document
    assert reply.status_code == document["status"] == PROBLEMS[slug].status
    assert document["title"] == PROBLEMS[slug].title
    assert reply.headers["x-request-id"]
    check_declared(reply, slug)
    return document


def info(running: Running, run: str, path: str = "") -> Any:
    """What the coordinator shows at an address of the run."""
    with running.client() as client:
        reply = client.get(f"/v1/runs/{run}{path}")
    assert reply.is_success, reply.text
    return reply.json()


def events(running: Running, run: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in info(running, run, "/events?limit=1000")["items"] if event["kind"] == kind]


def play_one_round_of_two(running: InThread) -> tuple[Member, Member]:
    a, b = crew(running, "r", ["a", "b"], rounds=1, min_workers=2)
    take_part_in_round_0(a, b)
    return a, b


def play_one_round_of_two_without_deltas(running: InThread) -> tuple[Member, Member, Blocked]:
    """... as none can be stored, until they are unblocked."""
    a, b = crew(running, "r", ["a", "b"], rounds=1, min_workers=2)
    blocked = Blocked(running.live("r"), "deltas")
    take_part_in_round_0(a, b)
    return a, b, blocked


def take_part_in_round_0(a: Member, b: Member) -> None:
    for member in (a, b):
        member.assignment(0)
    for member in (a, b):
        member.take_part(0)


@contextmanager
def refusing(running: InThread, statement: str) -> Iterator[None]:
    """Every `statement`, for example "INSERT ON workers", fails within."""
    name = re.sub(r"\W", "_", statement)
    with sqlite3.connect(running.data_dir / "outerstep.db", timeout=20) as database:
        database.execute(f"CREATE TRIGGER {name} BEFORE {statement} BEGIN SELECT RAISE(ABORT, 'disk full'); END")
    try:
        yield
    finally:
        with sqlite3.connect(running.data_dir / "outerstep.db", timeout=20) as database:
            database.execute(f"DROP TRIGGER {name}")
