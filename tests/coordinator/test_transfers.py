"""The data's way through the coordinator: bodies and deltas in memory or stored, blobs that vanish on the way."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import Request

from coordinator.http.downloads import blob_response
from coordinator.store.blobs import Blobs, StoredBlob
from coordinator.store.data_directory import DataDirectory
from coordinator.store.directory_blobs import DirectoryBlobs
from coordinator.store.payloads import MemoryBudget
from harness.coordinator import InThread, SettableClock
from harness.stores import disturbed, names, read, the
from protocol.digest import content_digest, digest
from protocol.errors import Problem
from tests.coordinator.crew import crew, info, play_round, problem, ready, refusing, set_state
from tests.support.waiting import wait_until


def kept(memory: MemoryBudget, count: int) -> list[int]:
    return [number for number in range(count) if memory.delta(bytes([number]))]


def test_the_newest_deltas_are_kept_and_never_more_than_the_limit() -> None:
    memory = MemoryBudget(0, 100)
    for number in range(5):
        memory.add_delta(bytes([number]), memoryview(bytes(40)))
    memory.add_delta(bytes([4]), memoryview(bytes(40)))
    assert kept(memory, 5) == [3, 4]
    memory.add_delta(b"too large", memoryview(bytes(101)))
    assert memory.delta(b"too large") is None


def test_deltas_fill_what_contributions_leave_and_the_oldest_make_place_for_them() -> None:
    memory = MemoryBudget(100, 50)
    for number in range(5):
        memory.add_delta(bytes([number]), memoryview(bytes(30)))
    assert kept(memory, 5) == [0, 1, 2, 3, 4]
    first = memory.take(10)
    assert kept(memory, 5) == [1, 2, 3, 4]
    second = memory.take(90)
    assert None not in (first, second)
    assert kept(memory, 5) == [4]
    del second
    for number in range(5, 8):
        memory.add_delta(bytes([number]), memoryview(bytes(30)))
    assert kept(memory, 8) == [4, 5, 6, 7]


def test_room_is_lent_up_to_its_bound_and_comes_back_with_the_last_reference() -> None:
    memory = MemoryBudget(100)
    first, second = memory.take(60), memory.take(40)
    assert first is not None
    assert second is not None
    assert memory.take(1) is None
    first[:] = bytes(range(60))
    part = np.frombuffer(first[10:20], np.uint8)
    del first
    assert memory.take(60) is None  # a part of it is in use still
    assert part.tolist() == list(range(10, 20))
    del part
    assert memory.take(61) is None
    assert memory.take(60) is not None


def test_who_is_ahead_leaves_the_others_their_shares() -> None:
    memory = MemoryBudget(100)
    ahead = [memory.take(20, "ahead", 2), memory.take(30, "ahead", 2)]
    assert None not in ahead
    assert memory.take(1, "ahead", 2) is None
    assert memory.take(1) is not None, "what has no owner"
    large = memory.take(50, "behind", 2)
    assert large is not None
    assert memory.take(51, "large", 2) is None
    del ahead, large
    assert memory.take(51, "large", 2) is not None, "the first one may be larger than a share"


def test_nobody_waits_long_for_room_while_others_are_busy() -> None:
    clock = SettableClock()

    class Busy(MemoryBudget):
        def frees_up(self, size: int) -> bool:
            clock.advance(0.3)
            return True

    memory = Busy(100, clock=clock)
    held = memory.take(60, "a", 2)
    assert asyncio.run(memory.take_soon(10, "a", 2)) is None
    assert held is not None


def test_the_payloads_of_one_get_room_in_their_order() -> None:
    memory, got = MemoryBudget(100, clock=SettableClock()), list[str]()

    async def take(name: str, size: int, owner: str) -> None:
        assert await memory.take_soon(size, owner, 1) is not None
        got.append(name)

    async def at_once() -> None:
        assert memory.take(90) is not None  # which comes back, so that more is expected
        kept = memory.take(60)
        waiting = [asyncio.create_task(take("first", 70, "a")), asyncio.create_task(take("second", 10, "a"))]
        await asyncio.sleep(0)  # both have asked
        await take("another's", 10, "b")
        assert kept is not None
        assert got == ["another's"]
        del kept
        await asyncio.gather(*waiting)

    asyncio.run(at_once())
    assert got == ["another's", "first", "second"]


def test_room_is_expected_only_where_some_has_just_come_back_and_never_more_than_there_is() -> None:
    clock = SettableClock()
    memory = MemoryBudget(100, clock=clock)
    assert not memory.frees_up(10)
    held = [memory.take(50), memory.take(50)]
    assert memory.take(10) is None
    assert not memory.frees_up(10)
    held.pop()
    assert memory.take(60) is None
    assert memory.frees_up(60)
    assert not memory.frees_up(101)
    clock.advance(1)
    assert not memory.frees_up(60)


@pytest.mark.slow
def test_a_round_is_the_same_whether_there_is_room_for_all_some_or_none_of_its_contributions(
    shared: InThread, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, in_memory = [], []
    for number, room_bytes in enumerate((1 << 20, 800, 0)):
        monkeypatch.setattr(shared.coordinator, "memory", MemoryBudget(room_bytes))
        name = f"{run}-{number}"
        a, b = crew(shared, name, ["a", "b"], rounds=1, min_workers=2)
        ready([a, b], 0)
        a.take_part(0)
        opening = shared.live(name).open
        assert opening is not None
        in_memory.append([len(fragment.contents) for fragment in opening.fragments])
        b.take_part(0)
        for member in (a, b):
            member.step(0)
        shared.await_state(name, 1)
        states.append(info(shared, name)["state_digest"])
        assert all(not fragment.contents for fragment in opening.fragments), "memory is held after the averaging"
    assert in_memory[0] == [1] * len(in_memory[0])
    assert 0 < sum(in_memory[1]) < len(in_memory[1])
    assert sum(in_memory[2]) == 0
    assert len(set(states)) == 1


def test_an_upload_that_is_not_what_it_announced_leaves_no_file_and_gives_its_room_back(
    shared: InThread, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a,) = crew(shared, run, ["a"], rounds=1)
    assignment, values = a.assignment(0), a.pseudo_gradients(0)[0]
    body = a.payload(assignment, 0, values)
    memory = MemoryBudget(len(body))
    monkeypatch.setattr(shared.coordinator, "memory", memory)
    headers = {"Content-Digest": content_digest(digest(b"another"))}
    problem(a.http.put(a.contribution_path(0, 0), content=body, headers=headers), "digest-mismatch")
    assert list((shared.data_dir / "incoming").iterdir()) == []
    wait_until(lambda: memory.take(len(body)) is not None)
    assert a.contribute(assignment, 0, values).status_code == 201


def sent(response: Any) -> bytes:
    """The body that the response sends."""
    body = bytearray()

    async def send(message: Any) -> None:
        body.extend(message.get("body", b""))

    async def receive() -> Any:
        raise AssertionError("an answer reads nothing")

    asyncio.run(response({"type": "http"}, receive, send))
    return bytes(body)


def request(**headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw})


BLOB = "runs/r/deltas/0/0.aa"


def answered(blobs: Blobs, content: bytes, **headers: str) -> Any:
    stored = StoredBlob(BLOB, digest(content), len(content))
    return blob_response(request(**headers), blobs, stored, lambda: Problem("gone", "deleted"))


@pytest.mark.parametrize(("headers", "expected"), [({}, slice(None)), ({"range": "bytes=5-"}, slice(5, None))])
def test_a_blob_that_is_deleted_after_the_look_up_is_sent_all_the_same(
    blobs: Blobs, headers: dict[str, str], expected: slice
) -> None:
    content = bytes(range(256)) * 9000
    blobs.put(BLOB, content)
    response = answered(blobs, content, **headers)
    blobs.delete(BLOB)
    assert sent(response) == content[expected]
    with pytest.raises(Problem) as refused:
        answered(blobs, content, **headers)
    assert refused.value.slug == "gone"


@pytest.mark.parametrize("wanted", ["bytes=0-1,5-6", "bytes=-3", "bytes=5-4", "lines=1-2", f"bytes={'9' * 5000}-"])
def test_a_range_that_is_not_supported_gets_the_whole(blobs: Blobs, wanted: str) -> None:
    blobs.put(BLOB, b"0123456789")
    response = answered(blobs, b"0123456789", range=wanted)
    assert (response.status_code, sent(response)) == (200, b"0123456789")


def test_a_file_that_was_cut_short_breaks_the_answer_off_instead_of_filling_it_up(tmp_path: Path) -> None:
    with closing(DataDirectory(tmp_path)) as data:
        blobs = DirectoryBlobs(data)
        blobs.put(BLOB, b"0123456789")
        response = answered(blobs, b"0123456789")
        (tmp_path / BLOB).write_bytes(b"01234")
        with pytest.raises(OSError, match="of 10 bytes ends before byte 10"):
            sent(response)


def test_a_delta_is_the_same_bytes_from_memory_and_from_its_blob(shared: InThread, run: str) -> None:
    (member,) = crew(shared, run, ["a"], rounds=1)
    play_round([member], 0)
    live = shared.live(run)
    from_memory = member.delta(0, 0)
    assert live.context.memory.delta(digest(from_memory.content)) is not None
    assert from_memory.content == read(live.blobs, the(live, "deltas", 0, 0))


def test_two_uploads_of_one_contribution_at_once_leave_one(shared: InThread, run: str) -> None:
    a, b = crew(shared, run, ["a", "b"], rounds=1, min_workers=2)
    ready([a, b], 0)
    assignment, values, codes = a.assignment(0), a.pseudo_gradients(0)[0], []
    twin = iter([lambda: codes.append(a.contribute(assignment, 0, values).status_code)])
    # The second one comes and goes between the first one's becoming durable and its commit.
    with disturbed(shared.live(run), "contributions", after=lambda _: next(twin, lambda: None)()):
        codes.append(a.contribute(assignment, 0, values).status_code)
    assert codes == [201, 200]
    assert len(names(shared.live(run), "contributions")) == 1


def test_a_contribution_that_is_refused_after_it_became_durable_leaves_no_blob(shared: InThread, run: str) -> None:
    (a,) = crew(shared, run, ["a"], rounds=1)
    assignment = a.assignment(0)
    with disturbed(shared.live(run), "contributions", after=lambda _: set_state(shared, run, "stopped")):
        problem(a.contribute(assignment, 0, a.pseudo_gradients(0)[0]), "run-ended")
    assert names(shared.live(run), "contributions") == []


def test_a_rejected_upload_leaves_the_blob_to_its_twin(shared: InThread, run: str) -> None:
    """Both have the same bytes, and so the same blob."""
    (a,) = crew(shared, run, ["a"], rounds=1)
    assignment, values = a.assignment(0), a.pseudo_gradients(0)[0]
    live = shared.live(run)
    twin = iter([lambda: problem(a.contribute(assignment, 0, values), "internal")])

    def send_twin(_: str) -> None:
        with refusing(shared, "INSERT ON contributions"):
            next(twin, lambda: None)()

    with disturbed(live, "contributions", after=send_twin):
        assert a.contribute(assignment, 0, values).status_code == 201
    assert len(names(live, "contributions", 0)) == 1


def test_a_contribution_whose_blob_is_taken_away_is_asked_for_again(shared: InThread, run: str) -> None:
    """As a rollback does, or the loss of an accepted contribution with the same bytes."""
    (a,) = crew(shared, run, ["a"], rounds=1)
    assignment, values = a.assignment(0), a.pseudo_gradients(0)[0]
    live = shared.live(run)

    def take_away(name: str) -> None:
        with live.lock:
            live.uploads.note_vanished(name)
            live.blobs.delete(name)

    with disturbed(live, "contributions", after=take_away):
        problem(a.contribute(assignment, 0, values), "not-ready")
    assert a.contribute(assignment, 0, values).status_code == 201


def test_while_a_rejected_upload_is_deleted_its_twin_is_not_accepted(
    shared: InThread, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a,) = crew(shared, run, ["a"], rounds=1)
    assignment, values = a.assignment(0), a.pseudo_gradients(0)[0]
    live = shared.live(run)

    def delete(*names: str) -> None:
        problem(a.contribute(assignment, 0, values), "not-ready")
        real(*names)

    real = live.blobs.delete
    with monkeypatch.context() as patched, refusing(shared, "INSERT ON contributions"):
        patched.setattr(live.blobs, "delete", delete)
        problem(a.contribute(assignment, 0, values), "internal")
    assert names(live, "contributions", 0) == []
    assert a.contribute(assignment, 0, values).status_code == 201
