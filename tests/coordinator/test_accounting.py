"""What rounds cost, as the workers tell it: kept per round and worker, added up per worker, round and run."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from coordinator.store.tables import FragmentRow, ReportRow
from harness.coordinator import InThread, SettableClock, coordinator_thread
from harness.member import Member
from tests.coordinator.crew import assigned, crew, info, play_round, play_rounds, refusing, step_all
from tests.coordinator.test_verdicts import honest
from tests.support.waiting import wait_until


def report(round_: int, epoch: int = 1, up: int = 100, down: int = 10, **seconds: float) -> dict[str, Any]:
    named = {stage.replace("_", "-"): value for stage, value in seconds.items()}
    return {"round": round_, "epoch": epoch, "upload_bytes": up, "download_bytes": down, "seconds": named}


def tell(member: Member, state_round: int, told: dict[str, Any]) -> int:
    body = {"state_round": state_round, "report": told}
    return member.http.put(member.path("/assignment"), json=body).status_code


def account(up: int = 0, down: int = 0, **seconds: float) -> dict[str, Any]:
    return {"upload_bytes": up, "download_bytes": down, "seconds": seconds, "dropped_steps": 0}


@pytest.mark.slow
def test_reports_are_kept_per_round_and_worker_and_added_up(shared: InThread, run: str) -> None:
    a, b = crew(shared, run, ["a", "b"], rounds=3, min_workers=2)
    play_round([a, b], 0)
    assert info(shared, run)["account"] == account()
    told = report(0, train=4.0, await_delta=1.5)
    assert tell(a, 1, told) == 200
    assert tell(a, 1, told) == 200, "told again, it counts once"
    assert tell(b, 1, report(0, up=1, down=2, train=2.0)) == 200
    play_round([a, b], 1)
    assert tell(a, 2, report(1, train=8.0)) == 200

    first = info(shared, run, "/rounds/0")
    assert first["accounts"] == {
        "a": account(100, 10, **{"train": 4.0, "await-delta": 1.5}),
        "b": account(1, 2, train=2.0),
    }
    assert first["account"] == account(101, 12, **{"train": 6.0, "await-delta": 1.5})
    assert info(shared, run, "/rounds")["items"][0]["account"] == account()
    assert info(shared, run, "/workers/a")["account"] == account(200, 20, **{"train": 12.0, "await-delta": 1.5})
    assert info(shared, run)["account"] == account(201, 22, **{"train": 14.0, "await-delta": 1.5})


def test_what_a_worker_waited_for_follows_from_its_report_and_the_coordinators_times(
    shared: InThread, run: str
) -> None:
    """It has waited far longer than the round took here, so what is left after that is its upload."""
    a, b = crew(shared, run, ["a", "b"], rounds=3, min_workers=2)
    play_round([a, b], 0)
    assert info(shared, run, "/rounds/0")["waiting"] is None
    assert tell(a, 1, report(0, train=40.0, sync=30.0, upload=20.0, download=4.0, wait=10.0)) == 200
    found = info(shared, run, "/rounds/0")
    assert found["waits"].keys() == {"a"}
    waits = found["waits"]["a"]
    took_s = found["closed_at"] - found["opened_at"]
    assert 0 <= waits["workers"] + waits["coordinator"] <= took_s
    assert (waits["opening"], waits["download"]) == (10, 4)
    assert sum(waits.values()) == pytest.approx(40)
    assert found["waiting"] == {"share": 0.5, "never": 30 / 80, "doubled_h": 15 / 80}


@pytest.mark.slow
@pytest.mark.in_sqlite
def test_what_a_worker_adds_is_its_share_and_what_all_others_waited_for_it(tmp_path: Path) -> None:
    now = SettableClock()
    with coordinator_thread(tmp_path, now=now) as running:
        members = crew(running, "r", ["a", "b", "c", "d"], rounds=3, min_workers=4, members="lease_s = 1000")
        assigned(members, 0)
        for member in members:
            assert info(running, "r", "/rounds/0")["adds"] == {}, "while the round is open"
            now.advance(30.0 if member.name == "d" else 1.0)
            sent = honest(member, 0)
            member.contribute_all(member.assignment(0, 30), [-each for each in sent] if member.name == "b" else sent)
        step_all(members, 0)
        assert {each["held_s"] for each in info(running, "r", "/rounds/0")["adds"].values()} == {None}
        for member in members[:3]:
            assert tell(member, 1, report(0, train=10.0, sync=31.0)) == 200
        adds = info(running, "r", "/rounds/0")["adds"]
    assert {name: each["tokens"] for name, each in adds.items()} == dict.fromkeys("abcd", 0.25)
    assert {name: each["weight"] for name, each in adds.items()} == {"a": 1 / 3, "b": 0, "c": 1 / 3, "d": 1 / 3}
    assert {name: each["held_s"] for name, each in adds.items()} == {"a": 0, "b": 0, "c": 0, "d": 30}


@pytest.mark.slow
def test_reports_that_wait_for_the_run_are_booked_together_and_none_is_lost(shared: InThread, run: str) -> None:
    names = [f"w{number}" for number in range(8)]
    members = crew(shared, run, names, min_workers=8)
    live = shared.live(run)
    with ThreadPoolExecutor(8) as pool:
        with live.lock:
            answers = [pool.submit(tell, member, 0, report(0, up=1, down=2)) for member in members]
            wait_until(lambda: len(live.reports) == 8)
        assert [answer.result() for answer in answers] == [200] * 8
    assert not live.reports
    assert info(shared, run, "/rounds/0")["accounts"] == dict.fromkeys(names, account(1, 2))
    assert info(shared, run)["account"] == account(8, 16)


def test_a_report_that_could_not_be_booked_is_booked_with_the_next(shared: InThread, run: str) -> None:
    a, b = crew(shared, run, ["a", "b"], min_workers=2)
    with refusing(shared, "INSERT ON reports"):
        assert tell(a, 0, report(0, up=1, down=2)) == 500
        assert tell(a, 0, report(0, up=1, down=2)) == 500
    assert len(shared.live(run).reports) == 1
    assert tell(b, 0, report(0, up=10, down=20)) == 200
    assert info(shared, run)["account"] == account(11, 22)


def test_who_leaves_tells_the_rest_and_who_returns_adds_to_it(shared: InThread, run: str) -> None:
    (member,) = crew(shared, run, ["w"], rounds=2)
    member.assignment(0)
    body = {"report": report(0, train=1.0)}
    member.http.request("DELETE", member.path(), json=body).raise_for_status()
    member.join(shared.admin_token)
    assert tell(member, 0, report(0, epoch=2, train=2.0)) == 200
    assert info(shared, run, "/rounds/0")["accounts"] == {"w": account(200, 20, train=3.0)}
    assert info(shared, run, "/workers/w")["account"] == account(200, 20, train=3.0)


@pytest.mark.covers("security:false-accounts")
def test_a_round_that_the_run_has_not_come_to_is_not_booked(shared: InThread, run: str) -> None:
    (member,) = crew(shared, run, ["w"], rounds=2)
    assert tell(member, 0, report(1)) == 200
    assert info(shared, run)["account"] == account()


@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": {"coffee": 1.0}},
        {"seconds": {"train": 1e10}},
        {"download_bytes": 1 << 60},
        {"round": 1 << 63},
    ],
)
def test_a_report_that_cannot_be_is_refused(shared: InThread, run: str, wrong: dict[str, Any]) -> None:
    (member,) = crew(shared, run, ["w"], rounds=2)
    assert tell(member, 0, report(0) | wrong) == 422
    assert info(shared, run)["account"] == account()


@pytest.mark.slow
def test_reports_go_with_the_history_and_the_sums_stay(shared: InThread, run: str) -> None:
    spec = {"checkpoints": "every_rounds = 1\nkeep = 1\n[retention]\nrounds = 1"}
    (member,) = crew(shared, run, ["w"], rounds=5, **spec)
    for round_ in range(5):
        play_round([member], round_)
        assert tell(member, round_ + 1, report(round_, train=1.0)) == 200
        shared.await_state(run, round_ + 1)
    with shared.coordinator.database.read() as session:
        kept = session.scalars(select(ReportRow.round).where(ReportRow.run_id == shared.live(run).id)).all()
    assert 0 not in kept
    assert info(shared, run, "/rounds/0")["accounts"] == {}
    assert info(shared, run, "/rounds/0")["account"] == account(100, 10, train=1.0)
    assert info(shared, run)["account"] == account(500, 50, train=5.0)
    assert_in_order(info(shared, run, "/rounds/0"))


def test_a_round_says_when_it_came_how_far(shared: InThread, run: str) -> None:
    a, b = crew(shared, run, ["a", "b"], rounds=2, min_workers=2)
    a.assignment(0)
    b.assignment(0)
    a.take_part(0)
    open_ = info(shared, run, "/rounds/0")
    assert [open_[key] for key in ("quorum_at", "collected_at", "aggregated_at", "closed_at")] == [None] * 4
    b.take_part(0)
    a.step(0)
    shared.await_state(run, 1)
    done = info(shared, run, "/rounds/0")
    assert_in_order(done)
    for fragment in done["fragments"]:
        times = [fragment[key] for key in ("quorum_at", "closed_at", "aggregated_at", "published_at")]
        assert times == sorted(times)
    with shared.coordinator.database.read() as session:
        rows = session.scalars(select(FragmentRow).where(FragmentRow.run_id == shared.live(run).id)).all()
    assert done["collected_at"] == max(row.closed_at or 0 for row in rows if row.round == 0)


@pytest.mark.slow
def test_a_run_lasts_another_of_its_last_rounds_for_each_that_is_left(shared: InThread, run: str) -> None:
    members = crew(shared, run, ["a", "b"], rounds=4, min_workers=2)
    play_rounds(shared, members, [0])
    first = info(shared, run, "/rounds/0")
    length = first["closed_at"] - first["opened_at"]
    assert 2 * length <= info(shared, run)["eta_s"] <= 3 * length, "of the round that is open some may be over"
    play_rounds(shared, members, [1, 2, 3])
    assert (info(shared, run)["state"], info(shared, run)["eta_s"]) == ("finished", 0)


def assert_in_order(round_: dict[str, Any]) -> None:
    times = [round_[key] for key in ("opened_at", "quorum_at", "collected_at", "aggregated_at", "closed_at")]
    assert times == sorted(times)
