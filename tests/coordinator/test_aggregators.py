"""Aggregators: the queue, whose tasks are taken under a lease; and whatever happens to an aggregator, the run's bytes
are those of a coordinator that does everything itself."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import URL, Connection, make_url, text

from coordinator.aggregation import delegation, queue
from coordinator.aggregation.aggregator import STALLED_S, Aggregator, id_of
from coordinator.aggregation.queue import Claim
from coordinator.aggregation.tasks import Advance, Advanced, Aggregate, Aggregated, Given, Origin, StateRef
from coordinator.store.data_directory import DataDirectory
from coordinator.store.database import Database
from coordinator.upkeep import verifying
from harness import stores
from harness.aggregator import aggregator_thread, opened
from harness.coordinator import InThread, SettableClock, coordinator_thread
from harness.member import Member
from harness.postgres import PostgreSQL
from harness.stores import MemoryBlobs
from protocol import __version__
from protocol.errors import OuterstepError
from protocol.spec.sections import OuterSpec, SyncSpec
from tests.coordinator.crew import connected, crew, events, info, play_rounds, step_all, take_part
from tests.support.threads import at_once
from tests.support.waiting import PATIENCE_S, wait_until

NAMES = ["a", "b", "c"]


@pytest.fixture
def url(postgres: PostgreSQL) -> Iterator[URL]:
    """The URL of a database that has the newest schema."""
    with postgres.database() as found:
        Database(make_url(found)).close()
        yield make_url(found)


@pytest.fixture
def connection(url: URL) -> Iterator[Connection]:
    with connected(url) as connection:
        yield connection


# --- the queue --------------------------------------------------------------------------------------------------------


def average(round_: int = 0, **fields: Any) -> Aggregate:
    given = {"a": Given(digest=b"\1" * 32, sha256=None, tokens=8)}
    settings: dict[str, Any] = {
        "usual": None,
        "clipped": 1.25,
        "least_agreement": 0.25,
        "unit_tokens": {"a": 8},
    } | fields
    sync = SyncSpec(rounds=2)
    return Aggregate(
        run="r", round=round_, fragment=0, elements=5, base=b"\2" * 32, sync=sync, contributions=given, **settings
    )


def step(round_: int = 1) -> Advance:
    origin = Origin(checkpoint=StateRef(round=0, digest=b"\0" * 32), blob=b"\3" * 32, deltas=(b"\4" * 32,) * round_)
    known = StateRef(round=round_ - 1, digest=b"\0" * 32)
    return Advance(run="r", fragment=0, elements=5, outer=OuterSpec(), origin=origin, known=known, checkpoint=False)


RESULT = Advanced(digest=b"\5" * 32, largest=float("nan"), checkpoint=None)


def expire(connection: Connection) -> None:
    connection.execute(text("UPDATE tasks SET expires_at = 0"))


@pytest.mark.slow
def test_a_task_is_one_aggregators_until_its_lease_expires(connection: Connection) -> None:
    (number,) = queue.add(connection, [(step(), None)])
    claim = queue.take(connection, "x")
    assert claim == Claim(number, 1, step())
    assert queue.take(connection, "y") is None
    assert queue.renew(connection, claim)
    expire(connection)
    assert queue.renew(connection, claim), "nobody else has taken it"
    expire(connection)
    second = queue.take(connection, "y")
    assert second == Claim(number, 2, step())
    assert not queue.renew(connection, claim)
    assert not queue.finish(connection, claim, RESULT), "it was believed dead, and may have another result"
    assert not queue.fail(connection, claim, "late")
    assert not queue.give_back(connection, claim)
    assert queue.finish(connection, second, RESULT)
    assert not queue.finish(connection, second, RESULT), "once"
    (answer,) = queue.answers(connection, [number])
    assert (answer.attempts, answer.holder, answer.failure) == (2, "y", None)
    assert isinstance(answer.result, Advanced)
    assert np.isnan(answer.result.largest)


def test_deltas_come_first_and_then_the_oldest(connection: Connection) -> None:
    numbers = queue.add(connection, [(step(1), None), (average(5), None), (step(2), None), (average(4), None)])
    taken = [queue.take(connection, "x") for _ in range(5)]
    assert [each and each.id for each in taken] == [numbers[1], numbers[3], numbers[0], numbers[2], None]


def test_of_many_that_take_at_once_each_gets_another_task(url: URL, connection: Connection) -> None:
    numbers = queue.add(connection, [(average(round_), None) for round_ in range(40)])
    with ExitStack() as stack:
        own = [stack.enter_context(connected(url)) for _ in range(8)]
        taken = at_once(8, lambda n: [each.id for each in iter(lambda: queue.take(own[n], f"x{n}"), None)])
    assert sorted(itertools.chain(*taken)) == numbers


def test_a_state_is_stepped_by_the_aggregator_that_has_it_unless_that_one_is_busy(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "PATIENCE_S", PATIENCE_S)
    queue.add(connection, [(step(), "x")])
    assert queue.take(connection, "y") is None
    connection.execute(text("UPDATE tasks SET created_at = created_at - :s"), {"s": queue.PATIENCE_S})
    assert queue.take(connection, "y") is not None
    (number,) = queue.add(connection, [(step(), "x")])
    mine = queue.take(connection, "x")
    assert mine is not None
    assert mine.id == number
    assert queue.give_back(connection, mine)
    assert queue.take(connection, "y") is not None, "x has given it back"


def test_an_aggregator_of_another_version_takes_nothing(connection: Connection) -> None:
    queue.add(connection, [(average(), None)])
    connection.execute(text("UPDATE tasks SET version = '0.0.9'"))
    assert queue.take(connection, "x") is None


def test_a_task_that_is_withdrawn_or_removed_takes_no_result(connection: Connection) -> None:
    numbers = queue.add(connection, [(average(round_), None) for round_ in range(3)])
    claims = [queue.take(connection, "x") for _ in numbers]
    assert claims[0] is not None
    assert queue.fail(connection, claims[0], "no")
    assert queue.withdraw(connection, numbers[:2]) == {numbers[0]}, "it is done"
    queue.clear(connection)
    for claim in claims:
        assert claim is not None
        assert not queue.finish(connection, claim, RESULT)


def test_aggregators_are_listed_while_they_report(connection: Connection) -> None:
    for name in ("y", "x"):
        queue.report(connection, name, "host")
    listed = [(each.id, each.version) for each in queue.aggregators(connection)]
    assert listed == [("x", __version__), ("y", __version__)]
    queue.retire(connection, "x")
    connection.execute(text("UPDATE aggregators SET seen_at = 0"))
    queue.report(connection, "y", "elsewhere")
    (one,) = queue.aggregators(connection)
    assert (one.id, one.host) == ("y", "elsewhere")
    assert one.silent_s < PATIENCE_S
    connection.execute(text("UPDATE aggregators SET seen_at = seen_at - 400"))
    assert len(queue.aggregators(connection)) == 1
    connection.execute(text("UPDATE aggregators SET seen_at = seen_at - 200"))
    assert queue.aggregators(connection) == [], "it was removed, on purpose or not"


def test_an_aggregator_takes_the_place_of_its_earlier_process_and_of_no_other(
    connection: Connection, tmp_path: Path
) -> None:
    """The directory is locked, so its earlier process is over."""
    here, there = id_of(tmp_path / "a"), id_of(tmp_path / "b")
    queue.report(connection, here, "box:10")
    connection.execute(text("UPDATE aggregators SET version = '0.0.9', seen_at = seen_at - 400"))  # and was killed
    queue.report(connection, id_of(tmp_path / "b" / ".." / "a"), "box:20")
    queue.report(connection, there, "box:30")
    found = {each.host: each for each in queue.aggregators(connection)}
    assert set(found) == {"box:20", "box:30"}
    assert found["box:20"].version == __version__
    assert found["box:20"].silent_s < PATIENCE_S


# --- runs -------------------------------------------------------------------------------------------------------------

ROUNDS = 3


def new_run(running: InThread) -> list[Member]:
    """The run "r", whose deltas have error feedback."""
    sections = {"checkpoints": "every_rounds = 2", "sync": 'download_codec = "2bit"'}
    return crew(running, "r", NAMES, rounds=ROUNDS, min_workers=len(NAMES), **sections)


def play(running: InThread, rounds: range = range(ROUNDS), members: list[Member] | None = None) -> list[Member]:
    """Play rounds of the run "r", which is created before the first one."""
    if members is None:
        members = new_run(running)
    play_rounds(running, members, rounds)
    return members


Outcome = tuple[str, list[Any]]


def outcome(running: InThread) -> Outcome:
    """The digest of the run's state, and what each round was judged and averaged to."""
    with running.coordinator.database.read() as session:
        rows = session.execute(
            text("SELECT round, fragment, delta_digest, reference FROM fragments ORDER BY round, fragment")
        ).all()
        verdicts = session.execute(text("SELECT verdicts FROM fragments ORDER BY round, fragment")).all()
    return info(running, "r")["state_digest"], [*map(tuple, rows), *(str(row.verdicts) for row in verdicts)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, postgres: PostgreSQL) -> Iterator[Outcome]:
    """The outcome without aggregators."""
    blobs, folder = MemoryBlobs(), tmp_path_factory.mktemp("none")
    with postgres.database() as url, coordinator_thread(folder, database=url, store=lambda _: blobs) as running:
        play(running)
        yield outcome(running)


@dataclass
class Site:
    """A coordinator, whose database and blobs aggregators share."""

    running: InThread
    url: URL
    blobs: MemoryBlobs
    folder: Path

    @property
    def delegation(self) -> delegation.Delegation:
        found = self.running.coordinator.delegation
        assert found is not None
        return found

    @contextmanager
    def aggregator(self, name: str = "x") -> Iterator[Aggregator]:
        """An aggregator that does tasks."""
        with aggregator_thread(name, self.url, self.blobs, self.folder / name) as aggregator:
            wait_until(lambda: self.delegation.is_possible)
            yield aggregator

    @contextmanager
    def by_hand(self, name: str = "x", blobs: Any = None, *, reports: bool = True) -> Iterator[Aggregator]:
        """An aggregator that the leader believes to be there, and that does what the test lets it do."""
        stopping = threading.Event()
        with opened(name, self.url, blobs or self.blobs, self.folder / name) as aggregator, connected(self.url) as own:

            def report() -> None:
                while not stopping.wait(0.5):
                    queue.report(own, name, "host")

            queue.report(own, name, "host")
            thread = threading.Thread(target=report if reports else stopping.wait)
            thread.start()
            try:
                wait_until(lambda: self.delegation.is_possible)
                yield aggregator
            finally:
                stopping.set()
                thread.join()
                queue.retire(own, name)

    def await_tasks(self, count: int) -> None:
        """Wait until the queue has this many tasks that are not done."""
        query = text("SELECT COUNT(*) FROM tasks WHERE result IS NULL AND failure IS NULL")
        with connected(self.url) as connection:
            wait_until(lambda: connection.execute(query).scalar_one() == count)

    def expire(self) -> None:
        """Let every lease on a task expire."""
        with connected(self.url) as connection:
            expire(connection)


@pytest.fixture
def site(url: URL, tmp_path: Path) -> Iterator[Site]:
    blobs, database = MemoryBlobs(), url.render_as_string(hide_password=False)
    with coordinator_thread(tmp_path / "data", database=database, store=lambda _: blobs) as running:
        yield Site(running, url, blobs, tmp_path)


@pytest.mark.slow
def test_aggregators_that_do_nothing_are_findings(site: Site) -> None:
    with connected(site.url) as connection:
        for name in ("old", "silent"):
            queue.report(connection, name, f"box-{name}")
        connection.execute(text("UPDATE aggregators SET version = '0.0.9' WHERE id = 'old'"))
        connection.execute(
            text("UPDATE aggregators SET seen_at = seen_at - :s WHERE id = 'silent'"), {"s": PATIENCE_S + 1}
        )
    wait_until(lambda: len(site.delegation.aggregators) == 2)
    found = site.running.client().get("/v1/status").json()["findings"]
    assert [each["about"] for each in found] == ["aggregator", "aggregator"]
    assert "the aggregator box-old has version 0.0.9, so it gets no work" in found[0]["message"]
    assert "box-silent has not been heard of for" in found[1]["message"]
    assert not site.delegation.is_possible


def refuse(*_: Any) -> None:
    raise AssertionError("the leader did it itself")


@pytest.mark.slow
def test_aggregators_do_all_work_on_bytes_with_the_same_result(
    site: Site, expected: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    with site.aggregator("x"), site.aggregator("y"):
        monkeypatch.setattr("coordinator.sync.publishing._aggregate_here", refuse)
        monkeypatch.setattr("coordinator.sync.outer_state._step_here", refuse)
        play(site.running)
        assert outcome(site.running) == expected
        assert site.delegation.outcomes == {"done": 2 * 2 * ROUNDS}
        admin = site.running.client()
        metrics = admin.get("/metrics").text
        for line in ("s 2.0", "_tasks_waiting 0.0", '_tasks_total{outcome="done"} 12.0'):
            assert f"outerstep_aggregat{'or' if line[0] == 's' else 'ion'}{line}\n" in metrics
        status = admin.get("/v1/status").json()
        assert [each["id"] for each in status["aggregators"]] == ["x", "y"]
        assert (status["tasks_waiting"], status["findings"]) == (0, [])
        assert [each["round"] for each in info(site.running, "r", "/checkpoints")["items"]] == [3, 2]
        assert events(site.running, "r", "fault") == []


class Recorded(stores.Disturbed):
    """Blobs that remember what is put, and call `after` with the name afterwards."""

    def __init__(self, blobs: MemoryBlobs, after: Callable[[str], object] = stores.nothing) -> None:
        super().__init__(blobs, "", stores.nothing, after)
        self.made: list[tuple[str, bytes]] = []

    def put(self, name: str, source: Any) -> bool:
        self.made.append((name, source.read_bytes() if isinstance(source, Path) else bytes(source)))
        return super().put(name, source)


def contribute(running: InThread) -> list[Member]:
    """Let all members of a new run contribute to its first round, so that its fragments close."""
    members = new_run(running)
    take_part(members, 0)
    return members


def work(aggregator: Aggregator, until: Callable[[], bool]) -> None:
    """Let the aggregator do tasks until something has come about."""
    wait_until(lambda: until() or (aggregator.step() and until()))


@pytest.mark.slow
@pytest.mark.covers("reliability:zombie-aggregator")
def test_two_that_do_the_same_task_write_the_same_bytes(site: Site, expected: Outcome) -> None:
    second = Recorded(site.blobs)
    with site.by_hand("y", second) as y:

        def overtaken(name: str) -> None:
            """x is believed dead between its blob and its row: another one does the task."""
            if "/deltas/0/" in name and not second.made:
                site.expire()
                assert y.step()

        first = Recorded(site.blobs, after=overtaken)
        with site.by_hand("x", first) as x:
            members = contribute(site.running)
            site.await_tasks(2)
            assert x.step()
            assert [name.split("/")[2] for name, _ in first.made] == ["residuals", "deltas"]
            assert first.made == second.made
            work(x, lambda: site.delegation.outcomes["done"] == 4)
            step_all(members, 0)
        with site.aggregator("z"):
            play(site.running, range(1, ROUNDS), members)
        assert outcome(site.running) == expected


def test_a_task_without_progress_is_left_to_another_aggregator(url: URL, tmp_path: Path) -> None:
    """Its thread hangs in a request to the store, and the process is alive."""
    clock, hangs, go_on = SettableClock(), threading.Event(), threading.Event()

    class Hanging(MemoryBlobs):
        def fetch(self, name: str, target: Path) -> None:
            hangs.set()
            go_on.wait()
            super().fetch(name, target)

    with opened("x", url, Hanging(), tmp_path, clock) as aggregator, connected(url) as connection:
        queue.add(connection, [(step(), None)])
        thread = threading.Thread(target=aggregator.step)
        thread.start()
        assert hangs.wait(PATIENCE_S)
        expire(connection)
        aggregator.renew()
        assert queue.take(connection, "y") is None, "it may be slow"
        clock.advance(STALLED_S)
        expire(connection)
        aggregator.renew()
        assert queue.take(connection, "y") is not None
        go_on.set()
        thread.join()


@pytest.mark.slow
def test_without_an_aggregator_the_leader_takes_its_tasks_back(site: Site, expected: Outcome) -> None:
    with site.by_hand(reports=False), connected(site.url) as connection:
        members = contribute(site.running)
        site.await_tasks(2)
        queue.retire(connection, "x")
        step_all(members, 0)
        assert site.delegation.outcomes == {"withdrawn": 2}
        play(site.running, range(1, ROUNDS), members)
        assert outcome(site.running) == expected


@pytest.mark.nightly
def test_a_task_that_none_of_three_aggregators_could_finish_is_the_leaders(site: Site, expected: Outcome) -> None:
    """It may be the task that kills them."""
    with site.by_hand("x") as x, connected(site.url) as connection:
        members = contribute(site.running)
        site.await_tasks(2)
        for _ in range(delegation.MOST_ATTEMPTS):
            taken = [queue.take(connection, "x") for _ in range(2)]
            assert None not in taken
            site.expire()
        wait_until(lambda: site.delegation.outcomes["withdrawn"] == 2)
        work(x, lambda: site.delegation.outcomes["done"] == 2)
        step_all(members, 0)
    play(site.running, range(1, ROUNDS), members)
    assert outcome(site.running) == expected


def with_factor(found: Aggregated, factor: float) -> dict[str, Any]:
    """The verdicts with another factor in the first of them."""
    worker, verdict = next(iter(found.verdicts.items()))
    return {"verdicts": {**found.verdicts, worker: replace(verdict, factor=factor)}}


# What an aggregator may change in its results, by what is said of it: in one delta each, and in every state.
LIES: dict[str, Callable[[Aggregated], dict[str, Any]]] = {
    "its verdicts are not about the contributions": lambda found: {"verdicts": dict([*found.verdicts.items()][1:])},
    "a factor is not within 0 and 1": lambda found: with_factor(found, 2.0),
    "its header is not of these contributions": lambda found: with_factor(found, 0.5),
    "the store has nothing of that name": lambda found: {"digest": b"\7" * 32},
    "bytes of that name": lambda found: {"size": found.size + 1},
    "it has a residual although its codec has no error feedback, or lacks one": lambda found: {"residual": None},
}
WITHOUT_CHECKPOINT = "it has a checkpoint that was not asked for, or none"  # which was refused without a word


@pytest.mark.slow
@pytest.mark.covers("reliability:wrong-aggregator")
def test_a_wrong_result_is_refused_and_the_leader_does_it(
    site: Site, expected: Outcome, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    finish, lies = queue.finish, iter(LIES.values())

    def lie(connection: Connection, claim: Claim, result: Any) -> bool:
        wrong = next(lies)(result) if isinstance(result, Aggregated) else {"checkpoint": None}
        return finish(connection, claim, result.model_copy(update=wrong))

    monkeypatch.setattr(queue, "finish", lie)
    with site.aggregator():
        play(site.running)
        assert outcome(site.running) == expected
    for why in (*LIES, WITHOUT_CHECKPOINT):
        assert why in caplog.text
    assert site.delegation.outcomes["refused"] == len(LIES) + 2 * 2, "and the fragments of checkpoints 2 and 3"


def test_two_aggregators_need_two_directories(tmp_path: Path) -> None:
    """The message named another coordinator."""
    with closing(DataDirectory(tmp_path / "x")):
        why = "is in use by another aggregator or coordinator; stop it or choose another --data-dir"
        with pytest.raises(OuterstepError, match=why):
            DataDirectory(tmp_path / "x", "aggregator or coordinator")


@pytest.mark.nightly
def test_what_an_aggregator_cannot_do_the_leader_does(
    site: Site, expected: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An aggregator whose disk is full, for example."""
    monkeypatch.setattr("coordinator.aggregation.aggregator.LOOK_S", 0.01)

    class Broken(Recorded):
        def put(self, name: str, source: Any) -> bool:
            raise OSError("no space")

        def fetch(self, name: str, target: Path) -> None:
            raise OSError("no space")

    with site.by_hand("broken", Broken(site.blobs)) as broken:
        thread = threading.Thread(target=broken.work)
        thread.start()
        play(site.running)
        broken.stop()
        thread.join()
        assert outcome(site.running) == expected
        assert set(site.delegation.outcomes) == {"failed"}


@pytest.mark.slow
def test_a_lost_contribution_is_collected_again(site: Site, expected: Outcome) -> None:
    with site.by_hand() as x:
        members = contribute(site.running)
        site.await_tasks(2)
        live = site.running.live("r")
        stores.spoil(site.blobs, stores.names(live, "contributions", 0, 0)[1])
        assert live.open is not None
        live.open.fragments[0].contents.clear()  # as if memory had had no room for them
        assert all(x.step() for _ in range(2)), "the fragments' tasks, in the order in which they were complete"
        wait_until(lambda: len(events(site.running, "r", "contribution-lost")) == 1)
        (lost,) = events(site.running, "r", "contribution-lost")
        assert lost["data"]["workers"] == ["b"]
    members[1].take_part(0)
    step_all(members, 0)
    play(site.running, range(1, ROUNDS), members)
    assert outcome(site.running) == expected


@pytest.mark.slow
def test_an_aggregator_that_has_the_state_replaces_a_damaged_checkpoint(
    site: Site, expected: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else could: no other checkpoint is left."""
    monkeypatch.setattr("coordinator.sync.outer_state._step_here", refuse)
    with site.aggregator():
        members = play(site.running, range(1))
        live = site.running.live("r")
        for fragment in range(2):
            stores.spoil(site.blobs, stores.the(live, "checkpoints", 0, fragment))
        assert verifying.verify(live), "again and again it would read the whole store"
        assert list(live.outer.damaged_checkpoints) == [0]
        play(site.running, range(1, ROUNDS), members)
        assert outcome(site.running) == expected
        assert verifying.verify(live)
        assert list(live.outer.damaged_checkpoints) == []
