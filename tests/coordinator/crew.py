"""Members of a run for tests: joined, with state 0 seeded and held by all of them."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import URL, Connection, create_engine, delete, make_url

from coordinator.store import postgresql
from coordinator.store.tables import EventRow
from harness import stores
from harness.coordinator import InThread, Running, coordinator_thread
from harness.member import Member, spec_toml
from harness.stores import Blocked
from protocol.errors import PROBLEM_PREFIX, PROBLEMS
from protocol.messages import Assignment, Metrics
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


def seeded(members: list[Member]) -> list[Member]:
    """Let the first of these make state 0, and give it to all of them."""
    assert members[0].assignment(None).action == "seed"
    members[0].seed()
    return [recovered(member) for member in members]


def crew(running: Running, run: str, names: list[str], **spec: Any) -> list[Member]:
    """A new run and its members. The first of them has seeded state 0, and all of them hold it."""
    running.create_run(spec_toml(run, **spec))
    return seeded([enlist(running, run, name) for name in names])


def ready(members: Iterable[Member], round_: int) -> None:
    """All of `members` hold the state that a round starts from: it opens, as the last of them asks."""
    for member in members:
        member.assignment(round_)


def assigned(members: Sequence[Member], round_: int) -> list[Assignment]:
    """The assignments of a round, which opens once all of them have asked."""
    ready(members, round_)
    return [member.assignment(round_) for member in members]


def take_part(members: Sequence[Member], round_: int) -> None:
    """All of `members` contribute to a round."""
    ready(members, round_)
    for member in members:
        member.take_part(round_)


def step_all(members: Sequence[Member], round_: int) -> None:
    for member in members:
        member.step(round_)


def play_round(members: Sequence[Member], round_: int) -> None:
    """All of `members` take part in a round and step."""
    take_part(members, round_)
    step_all(members, round_)


def play_rounds(running: InThread, members: Sequence[Member], rounds: Iterable[int]) -> None:
    """Play rounds. After each, the coordinator has the state too, its checkpoint if one is due, and no more than it
    keeps."""
    for round_ in rounds:
        play_round(members, round_)
        running.await_state(members[0].run, round_ + 1)


def set_state(running: Running, what: str, state: str) -> dict[str, Any]:
    """Change a run, or RUN/workers/NAME, as an operator does; what is answered."""
    with running.client() as admin:
        answer: dict[str, Any] = admin.patch(f"/v1/runs/{what}", json={"state": state}).raise_for_status().json()
    return answer


def measure_everything(running: InThread, run: str) -> list[Member]:
    """A run of two, in its second round, of which there is everything that is measured: what workers tell of themselves
    and of what the first round has cost, its checkpoint, its held-out loss."""
    sections = {"checkpoints": "every_rounds = 1", "members": "lease_s = 3600"}  # longer than any test takes
    members = crew(running, run, ["a", "b"], rounds=3, min_workers=2, **sections)
    for member in members:
        metrics = Metrics(round=0, inner_step=4, tokens_per_second=1500.0, inner_steps_per_second=2.0)
        member.http.put(member.path("/lease"), json=metrics.model_dump()).raise_for_status()
    play_round(members, 0)
    running.await_state(run, 1)
    for member in members:
        if member.assignment(1).evaluate:
            told = {"loss": 2.5, "tokens": 1000, "bytes": 4000}
            member.http.put(f"/v1/runs/{run}/rounds/1/evaluation", json=told).raise_for_status()
    seconds = {"train": 8.0, "sync": 2.0}
    report = {"round": 0, "epoch": 1, "upload_bytes": 700, "download_bytes": 900, "seconds": seconds}
    asking = {"state_round": 1, "report": report}
    members[0].http.put(members[0].path("/assignment"), json=asking).raise_for_status()
    return members


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


def pages(running: Running, address: str, limit: int = 2) -> list[Any]:
    """All items of a listing, whose address is without /v1: page by page, each with at most `limit` of them."""
    found, asked = list[Any](), {"limit": str(limit)}
    with running.client() as client:
        while True:
            page = client.get(f"/v1{address}", params=asked).raise_for_status().json()
            assert len(page["items"]) <= limit
            found += page["items"]
            if page["next"] is None:
                return found
            asked["after"] = page["next"]


def events(running: Running, run: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in info(running, run, "/events?limit=1000")["items"] if event["kind"] == kind]


def forget_events(running: InThread, run: str) -> None:
    """Delete the run's events, as retention does with older ones."""
    with running.coordinator.database.write() as session:
        session.execute(delete(EventRow).where(EventRow.run_id == running.live(run).id))


def play_one_round_of_two(running: InThread) -> tuple[Member, Member]:
    a, b = crew(running, "r", ["a", "b"], rounds=1, min_workers=2)
    take_part([a, b], 0)
    return a, b


def play_one_round_of_two_without_deltas(running: InThread) -> tuple[Member, Member, Blocked]:
    """... as none can be stored, until they are unblocked."""
    a, b = crew(running, "r", ["a", "b"], rounds=1, min_workers=2)
    blocked = Blocked(running.live("r"), "deltas")
    take_part([a, b], 0)
    return a, b, blocked


@contextmanager
def connected(url: URL | str) -> Iterator[Connection]:
    """A connection to a PostgreSQL database, in which every statement commits by itself."""
    engine = postgresql.engine_of(make_url(url))
    with engine.connect() as connection:
        yield connection
    engine.dispose()


@contextmanager
def refusing(running: InThread, statement: str) -> Iterator[None]:
    """Every `statement`, for example "INSERT ON workers", fails within."""
    name, table = re.sub(r"\W", "_", statement), statement.split()[-1]
    if stores.database == "sqlite":
        begun = [f"CREATE TRIGGER {name} BEFORE {statement} BEGIN SELECT RAISE(ABORT, 'disk full'); END"]
        ended = [f"DROP TRIGGER {name}"]
    else:
        body = "BEGIN RAISE EXCEPTION 'disk full' USING ERRCODE = 'data_exception'; END"
        begun = [
            f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS '{body.replace(chr(39), chr(39) * 2)}'",
            f"CREATE TRIGGER {name} BEFORE {statement} FOR EACH ROW EXECUTE FUNCTION {name}()",
        ]
        ended = [f"DROP TRIGGER {name} ON {table}", f"DROP FUNCTION {name}"]
    engine = create_engine(stores.database_of(running.data_dir))
    with engine.begin() as database:
        for each in begun:
            database.exec_driver_sql(each)
    try:
        yield
    finally:
        with engine.begin() as database:
            for each in ended:
                database.exec_driver_sql(each)
        engine.dispose()


@contextmanager
def two(
    tmp_path: Path, url: str, addresses: tuple[str | None, str | None] = (None, None), **settings: Any
) -> Iterator[tuple[InThread, InThread]]:
    """A leader and a standby that share a database and blobs in memory. `addresses`: that they advertise."""
    blobs = stores.MemoryBlobs()
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(
                coordinator_thread(
                    tmp_path / name,
                    database=url,
                    store=lambda _: blobs,
                    token_in=tmp_path / "a",
                    advertise_url=address,
                    **settings,
                )
            )
            for name, address in zip(("a", "b"), addresses, strict=True)
        )
        yield first, second
