"""State 0: one worker makes it, and a successor begins afresh."""

import msgpack
import numpy as np
import pytest

from coordinator.aggregation.state_file import StateReader
from coordinator.run.members import OTHERS_ASK_S, SEEDER_S
from harness.coordinator import InThread, SettableClock
from harness.member import spec_toml
from harness.stores import the
from protocol.digest import digest
from protocol.wire import MAGIC, PREFIX, VERSION, chunk_sizes
from tests.coordinator.crew import crew, enlist, events, info, problem


def test_one_worker_seeds_and_the_others_wait_for_it(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run))
    a, b = enlist(shared, run, "a"), enlist(shared, run, "b")
    assert info(shared, run)["state"] == "seeding"
    assert b.assignment(None).action == "seed"
    assert (a.assignment(None).action, a.assignment(None).reason) == ("wait", "waiting for b to upload state 0")
    b.seed()
    assert info(shared, run)["state"] == "running"
    assert a.assignment(None).action == "recover"
    assert info(shared, run, "/checkpoints/latest")["round"] == 0


def test_state_0_is_served_by_the_reply_s_digest_and_compared_by_its_state_digest(shared: InThread, run: str) -> None:
    """Another order of keys and other chunks are other bytes, and the same state."""
    shared.create_run(spec_toml(run))
    a = enlist(shared, run, "a")
    assert a.assignment(None).action == "seed"
    elements = len(a.theta[0])
    header = {"run": run, "round": 0, "fragment": 0, "codec": "fp32", "elements": 2 * elements, "chunk_elements": 100}
    header |= {"kind": "state", "frame_bytes": [4 * n for n in chunk_sizes(2 * elements, 100)]}
    packed = msgpack.packb(dict(sorted(header.items())))
    body = PREFIX.pack(MAGIC, VERSION, 0, len(packed)) + packed + bytes(8 * elements)
    path = f"/v1/runs/{run}/checkpoints/0/fragments/0"
    first, again = a.put(path, body), a.seed_fragment(0, 0.0)
    assert (first.status_code, again.status_code) == (201, 200)
    reply = first.json()
    assert reply == again.json()
    assert (reply["digest"] == digest(body).hex(), reply["bytes"] == len(body)) == (False, False)
    assert reply["state_digest"] == a.base(0).hex()
    served = a.http.get(path)
    assert served.headers["ETag"].strip('"') == reply["digest"] == digest(served.content).hex()
    assert len(served.content) == reply["bytes"]


@pytest.mark.covers("security:idle-seeder")
def test_a_seeder_that_only_beats_is_replaced(shared: InThread, run: str, clock: SettableClock) -> None:
    shared.create_run(spec_toml(run, members=f"lease_s = {3 * SEEDER_S:.0f}"))
    a, b = enlist(shared, run, "a"), enlist(shared, run, "b")
    assert a.assignment(None).action == "seed"
    clock.advance(SEEDER_S)
    a.seed_fragment(0, 0.25).raise_for_status()  # slow, but not silent
    clock.advance(SEEDER_S)
    shared.coordinator.tick()
    assert b.assignment(None).action == "wait"
    clock.advance(1)
    shared.coordinator.tick()
    (event,) = events(shared, run, "seeder-silent")
    assert event["data"]["worker"] == "a"
    assert a.assignment(None).action == "wait", "it is not asked again while somebody else is there"
    problem(a.seed_fragment(1, 0.25), "state-conflict")
    assert b.assignment(None).action == "seed"
    b.seed(0.5)
    assert info(shared, run)["state"] == "running"


@pytest.mark.covers("security:idle-seeder")
@pytest.mark.parametrize("others", ["", "b"], ids=["alone", "the others only beat"])
def test_a_silent_seeder_is_asked_again_where_nobody_else_asks(
    shared: InThread, run: str, clock: SettableClock, others: str
) -> None:
    shared.create_run(spec_toml(run, members=f"lease_s = {3 * SEEDER_S:.0f}"))
    a, *_ = [enlist(shared, run, name) for name in "a" + others]
    assert a.assignment(None).action == "seed"
    clock.advance(SEEDER_S + 1)
    shared.coordinator.tick()
    if others:
        assert a.assignment(None).action == "wait"
        clock.advance(OTHERS_ASK_S + 1)
    assert a.assignment(None).action == "seed"
    a.seed(0.5)


def test_only_the_appointed_worker_seeds_and_only_once(shared: InThread, run: str) -> None:
    a, b = crew(shared, run, ["a", "b"])
    before = info(shared, run, "/checkpoints/0")
    a.seed(0.5)  # the same again is fine
    for member in (a, b):
        for fragment in (0, 1):
            problem(member.seed_fragment(fragment, 0.75), "state-conflict")
    assert info(shared, run, "/checkpoints/0") == before


@pytest.mark.covers("security:hostile-initial-state")
@pytest.mark.parametrize("chunk_elements", [1, 100, 1 << 18])
def test_the_momentum_of_state_0_is_plus_0_throughout(shared: InThread, run: str, chunk_elements: int) -> None:
    """Every replica begins with u = +0; with another u the first outer step would be one that nobody took."""
    shared.create_run(spec_toml(run))
    a = enlist(shared, run, "a")
    assert a.assignment(None).action == "seed"
    n = len(a.theta[0])
    state = np.concatenate([np.linspace(-1, 1, n, dtype=np.float32), np.zeros(n, np.float32)])
    for at, value in ((n, 1.0), (2 * n - 1, 1e-45), (n + 3, -0.0), (n, np.nan), (2 * n - 1, np.inf), (0, np.nan)):
        wrong = state.copy()
        wrong[at] = value
        raw = [
            wrong[start : start + chunk_elements].astype("<f4").tobytes() for start in range(0, 2 * n, chunk_elements)
        ]
        problem(a.put_frames(0, 2 * n, raw, chunk_elements), "invalid-payload")
    assert a.http.get(f"/v1/runs/{run}/checkpoints/0/fragments/0").status_code == 404, "nothing of it was kept"
    assert list((shared.data_dir / "incoming").iterdir()) == []
    assert a.put_state(0, state, chunk_elements).status_code == 201
    live = shared.live(run)
    with StateReader(live.blobs.open(the(live, "checkpoints", 0, 0))) as kept:
        theta, momentum = kept.read(0, n)
    assert (theta.tobytes(), momentum.tobytes()) == (state[:n].tobytes(), bytes(4 * n))
