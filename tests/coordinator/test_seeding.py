"""State 0: one worker makes it, and a successor begins afresh."""

from tests.coordinator.crew import crew, enlist, info, problem
from tests.support.coordinator import InThread, SettableClock
from tests.support.member import spec_toml


def test_one_worker_seeds_and_the_others_wait_for_it(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run))
    a, b = enlist(shared, run, "a"), enlist(shared, run, "b")
    assert info(shared, run)["state"] == "seeding"
    assert b.assignment(None).action == "seed"
    assert (a.assignment(None).action, a.assignment(None).reason) == ("wait", "b uploads state 0")
    b.seed()
    assert info(shared, run)["state"] == "running"
    assert a.assignment(None).action == "recover"
    assert info(shared, run, "/checkpoints/latest")["round"] == 0


def test_when_the_seeder_dies_the_next_one_seeds_afresh(shared: InThread, run: str, clock: SettableClock) -> None:
    shared.create_run(spec_toml(run, members="lease_s = 60"))
    a = enlist(shared, run, "a")
    assert a.assignment(None).action == "seed"
    assert a.seed_fragment(0, 0.25).status_code == 201
    clock.advance(61)
    shared.coordinator.tick()
    b = enlist(shared, run, "b")
    assert b.assignment(None).action == "seed"
    assert b.http.get(f"/v1/runs/{run}/checkpoints/0/fragments/0").status_code == 404, "a's fragment is gone"
    b.seed(0.5)
    checkpoint = info(shared, run, "/checkpoints/0")
    assert [each["state_digest"] for each in checkpoint["fragments"]] == [b.base(0).hex(), b.base(1).hex()]


def test_only_the_appointed_worker_seeds_and_only_once(shared: InThread, run: str) -> None:
    a, b = crew(shared, run, ["a", "b"])
    before = info(shared, run, "/checkpoints/0")
    a.seed(0.5)  # the same again is fine
    for member in (a, b):
        for fragment in (0, 1):
            problem(member.seed_fragment(fragment, 0.75), "state-conflict")
    assert info(shared, run, "/checkpoints/0") == before
