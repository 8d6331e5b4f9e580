"""Uploads in parts, over several connections and in any order: put together in memory or in a file, accepted as the
whole would be, and nothing of them is left behind."""

import asyncio
import random
import socket
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import cast

import httpx
import pytest
from fastapi import Request

from coordinator.http import uploads
from coordinator.http.uploads import ROUNDS, Sink
from coordinator.service import Coordinator
from coordinator.settings import Settings
from coordinator.store import partial_uploads
from coordinator.store.data_directory import DataDirectory
from coordinator.store.partial_uploads import KEPT_S
from coordinator.store.payloads import Body, MemoryBudget
from harness.coordinator import InThread, SettableClock
from harness.member import Member
from protocol.digest import content_digest, digest
from protocol.messages import Assignment
from protocol.wire import max_payloads_bytes
from tests.coordinator.crew import GRACE_OF_A_SECOND, crew, enlist, play_round, problem, ready, set_state
from tests.support.waiting import PATIENCE_S, wait_until

ROOM_BYTES = 1 << 20


@pytest.fixture(params=[ROOM_BYTES, 0], ids=["in memory", "through a file"])
def memory(request: pytest.FixtureRequest, shared: InThread, monkeypatch: pytest.MonkeyPatch) -> MemoryBudget:
    memory = MemoryBudget(request.param)
    monkeypatch.setattr(shared.coordinator, "memory", memory)
    return memory


@pytest.fixture(autouse=True)
def nothing_waits(shared: InThread, clock: SettableClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared.coordinator, "partial_uploads", partial_uploads.PartialUploads(clock))


class Parts:
    """One contribution, to be sent in parts of `size` bytes."""

    def __init__(self, member: Member, assignment: Assignment, fragment: int = 0, size: int = 100) -> None:
        self.member, self.path = member, member.contribution_path(assignment.round, fragment)
        self.body = member.payload(assignment, fragment, member.pseudo_gradients(assignment.round)[fragment])
        self.places = [(at, min(at + size, len(self.body))) for at in range(0, len(self.body), size)]
        assert len(self.places) > 3

    def send(self, start: int, stop: int, headers: dict[str, str] | None = None) -> httpx.Response:
        described = {
            "Content-Range": f"bytes {start}-{stop - 1}/{len(self.body)}",
            "Repr-Digest": content_digest(digest(self.body)),
        }
        return self.member.put(self.path, self.body[start:stop], **(described | (headers or {})))


@pytest.fixture
def parts(shared: InThread, run: str, memory: MemoryBudget) -> Iterator[Parts]:
    """Those of the only member of a run with an open round. At the end nothing is left of what has arrived."""
    (member,) = crew(shared, run, ["a"], rounds=2)
    yield Parts(member, member.assignment(0))
    wait_until(lambda: list((shared.data_dir / "incoming").iterdir()) == [])  # the round's delta was made there
    assert shared.coordinator.partial_uploads.waiting == 0


def missing(answer: httpx.Response) -> list[list[int]]:
    assert answer.status_code == 202, answer.text
    return list(answer.json()["missing"])


def test_parts_in_any_order_are_the_same_contribution(parts: Parts) -> None:
    order = random.Random(1).sample(parts.places, len(parts.places))
    left = len(parts.body)
    for start, stop in order[:-1]:
        left -= stop - start
        assert sum(b - a for a, b in missing(parts.send(start, stop))) == left
    last = parts.send(*order[-1])
    assert last.status_code == 201
    assert last.json()["digest"] == digest(parts.body).hex()
    # Again, as the answer to the last one may have been lost.
    for again in (parts.member.put(parts.path, parts.body), parts.send(*parts.places[2])):
        assert (again.status_code, again.json()["created"]) == (200, False)


def test_many_at_once(parts: Parts) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = [each.status_code for each in pool.map(lambda place: parts.send(*place), parts.places * 2)]
    assert answers.count(201) == 1
    assert set(answers) <= {200, 201, 202, 503}  # 503: the same came twice at once


def test_a_damaged_part_is_refused_and_the_others_stay(parts: Parts) -> None:
    first, second, *others = parts.places
    missing(parts.send(*first))
    problem(parts.send(*second, {"Content-Digest": content_digest(digest(b"another"))}), "digest-mismatch")
    for place in others:
        assert second[0] in [start for start, _ in missing(parts.send(*place))]
    assert parts.send(*second).status_code == 201


def test_parts_that_are_not_the_whole_that_they_announce_begin_anew(parts: Parts) -> None:
    other = {"Repr-Digest": content_digest(digest(b"another"))}
    for place in parts.places[:-1]:
        missing(parts.send(*place, other))
    problem(parts.send(*parts.places[-1], other), "digest-mismatch")
    for place in parts.places[:-1]:
        missing(parts.send(*place))
    assert parts.send(*parts.places[-1]).status_code == 201


@pytest.mark.slow
def test_a_part_of_a_round_that_closed_is_refused_before_the_rest_is_sent(shared: InThread, run: str) -> None:
    a, b = crew(shared, run, ["a", "b"], rounds=3, min_workers=1)
    ready([a, b], 0)
    late = Parts(b, b.assignment(0))
    missing(late.send(*late.places[0]))
    set_state(shared, f"{run}/workers/b", "evicted")
    a.take_part(0)
    a.step(0)
    again = enlist(shared, run, "b")
    late.member.http.headers["Authorization"] = again.http.headers["Authorization"]
    refused = problem(late.send(*late.places[1]), "round-closed")
    assert refused["round"] == 1
    assert shared.coordinator.partial_uploads.waiting == 0


def test_the_last_part_is_checked_like_the_whole(shared: InThread, run: str) -> None:
    (a,) = crew(shared, run, ["a"], rounds=1)
    assignment = a.assignment(0)
    a.theta[0][:] = 7  # another state than the run's
    wrong = Parts(a, assignment)
    for place in wrong.places[:-1]:
        missing(wrong.send(*place))
    problem(wrong.send(*wrong.places[-1]), "stale-base")
    assert shared.coordinator.partial_uploads.waiting == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("headers", "slug"),
    [
        ({"Content-Range": "bytes 0-1/2"}, "invalid-message"),
        ({"Content-Range": "bytes 5-3/9"}, "invalid-message"),
        ({"Content-Range": "rows 0-99/900"}, "invalid-message"),
        ({"Content-Range": "bytes 0-99/60"}, "invalid-message"),
        ({"Content-Range": f"bytes 0-99/{1 << 50}"}, "payload-too-large"),
        ({"Content-Range": f"bytes 0-99/{'9' * 30}"}, "invalid-message"),
        ({"Repr-Digest": "sha-256=:AAAA:"}, "invalid-message"),
        ({"Repr-Digest": "blake3=:AAAA:"}, "invalid-message"),
    ],
)
def test_nonsense_is_refused(parts: Parts, headers: dict[str, str], slug: str) -> None:
    problem(parts.send(*parts.places[0], headers), slug)


def test_crumbs_are_refused(shared: InThread, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_uploads, "MAX_GAPS", 20)
    (a,) = crew(shared, run, ["a"], rounds=1)
    parts = Parts(a, a.assignment(0))
    for number in range(19):
        missing(parts.send(2 * number + 1, 2 * number + 2))
    problem(parts.send(201, 202), "invalid-message")


@pytest.mark.covers("security:unfinished-payloads")
def test_what_nobody_goes_on_with_is_forgotten(
    shared: InThread, run: str, clock: SettableClock, memory: MemoryBudget
) -> None:
    (a,) = crew(shared, run, ["a"], rounds=1, members=f"lease_s = {10 * KEPT_S}")
    parts = Parts(a, a.assignment(0))
    missing(parts.send(*parts.places[0]))
    assert shared.coordinator.partial_uploads.waiting == 1
    clock.advance(KEPT_S - 1)
    missing(parts.send(*parts.places[1]))
    clock.advance(KEPT_S - 1)
    shared.coordinator.tick()
    assert shared.coordinator.partial_uploads.waiting == 1
    clock.advance(2)
    wait_until(lambda: shared.coordinator.partial_uploads.waiting == 0)
    assert list((shared.data_dir / "incoming").iterdir()) == []


def test_state_0_in_parts(shared: InThread, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Member.put
    answers: list[int] = []

    def in_parts(self: Member, path: str, body: bytes, **headers: str) -> httpx.Response:
        if "checkpoints" not in path:
            return whole(self, path, body, **headers)
        for start in range(0, len(body), 40):
            piece = body[start : start + 40]
            place = {"Content-Range": f"bytes {start}-{start + len(piece) - 1}/{len(body)}"}
            answer = whole(self, path, piece, **place, **{"Repr-Digest": content_digest(digest(body))})
            answers.append(answer.status_code)
        return answer

    monkeypatch.setattr(Member, "put", in_parts)
    (a,) = crew(shared, run, ["a"], rounds=1)
    assert answers.count(202) > answers.count(201) == len(a.theta)
    play_round([a], 0)


def test_who_has_all_of_it_keeps_it_though_another_one_was_first(tmp_path: Path) -> None:
    """A part came twice at once: both requests held the whole, and the second found no file any more: a 500."""
    whole = partial_uploads.PartialUpload(4, digest(b"1234"), tmp_path / "whole", now=0.0)
    with whole.kept():
        with whole.kept():
            assert whole.add(0, Body(memoryview(b"1234"), 4, digest(b"1234"))) == []
            first = whole.body()
        second = whole.body()
        whole.discard()
        for body in (first, second):
            memory = memoryview(bytearray(4))
            body.read_into(memory, 0)
            assert bytes(memory) == b"1234"
        assert whole.add(0, first) == [(0, 4)], "whoever comes now begins anew"
    assert not (tmp_path / "whole").exists()


def begin(parts: Parts, running: InThread, held: ExitStack, announced: int) -> socket.socket:
    """Begin to send a part of `announced` bytes, of which the last does not come."""
    line = held.enter_context(socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE_S))
    head = {
        "Host": "c",
        "Authorization": parts.member.http.headers["Authorization"],
        "Content-Length": str(announced),
        "Content-Range": f"bytes 0-{announced - 1}/{len(parts.body)}",
        "Content-Digest": content_digest(digest(parts.body[:announced])),
        "Repr-Digest": content_digest(digest(parts.body)),
    }
    lines = [f"PUT {parts.path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
    line.sendall("\r\n".join([*lines, "", ""]).encode() + parts.body[: announced - 1])
    return line


@pytest.mark.slow
@pytest.mark.covers("security:trickling-parts")
def test_parts_that_trickle_hold_up_nobody(
    shared: InThread, run: str, clock: SettableClock, memory: MemoryBudget
) -> None:
    a, b, c = members = crew(shared, run, ["a", "b", "c"], rounds=2, members=GRACE_OF_A_SECOND)
    ready(members, 0)
    slow, owner = Parts(c, c.assignment(0)), f"{run} c"
    with ExitStack() as held:
        lines = [begin(slow, shared, held, 100) for _ in range(40)]
        wait_until(lambda: shared.coordinator.quotas.uploading(owner) == 40 * 100)
        assert shared.live(run).lock.acquire(timeout=PATIENCE_S)
        shared.live(run).lock.release()
        for member in (a, b):
            member.take_part(0)
        clock.advance(1)
        shared.coordinator.tick()
        a.step(0)
        lines[0].sendall(slow.body[99:100])
        assert lines[0].recv(1 << 16).startswith(b"HTTP/1.1 409 "), "that round is over"
    wait_until(lambda: shared.coordinator.quotas.uploading(owner) == 0)
    assert shared.coordinator.partial_uploads.waiting == 0


@pytest.mark.covers("security:unfinished-payloads")
def test_what_one_member_may_be_sending_at_once_is_bounded_by_what_a_round_takes(
    parts: Parts, shared: InThread
) -> None:
    run = shared.live(parts.member.run)
    assert run.model is not None
    layout, callers, owner = run.model.layout, shared.coordinator.quotas, f"{run.name} a"
    most = ROUNDS * max_payloads_bytes(run.spec.sync.upload_codec, len(layout.fragments), layout.total_elements)
    with callers.upload(owner, most, most):
        refused = parts.send(*parts.places[0])
        assert problem(refused, "too-many-requests")
        assert refused.headers["Retry-After"]
    with callers.upload(owner, most - 100, most):
        missing(parts.send(*parts.places[0]))
    for place in parts.places[1:]:
        last = parts.send(*place)
    assert last.status_code == 201


def test_a_coordinator_that_closes_deletes_its_parts_and_no_request_s_file(tmp_path: Path) -> None:
    """One that leads again has the directory of the term before, in which requests may still be at work."""
    coordinator = Coordinator(Settings(data_dir=tmp_path))
    whole = coordinator.partial_uploads.get(("owner", "upload"), 10, bytes(32), coordinator.data.scratch)
    whole.add(0, Body(memoryview(b"half").cast("B"), 4, bytes(32)))
    (kept := coordinator.data.scratch()).touch()
    assert len(list((tmp_path / "incoming").iterdir())) == 2
    coordinator.close()
    assert list((tmp_path / "incoming").iterdir()) == [kept]


class Crumbs:
    """A request whose body comes in pieces of two bytes."""

    async def stream(self) -> AsyncIterator[bytes]:
        for number in range(10_000):
            yield number.to_bytes(2, "little")


@pytest.mark.slow
@pytest.mark.covers("security:trickling-parts")
def test_pieces_of_two_bytes_take_no_more_memory_than_others(tmp_path: Path) -> None:
    """Each was an object of 35 bytes: 256 KiB that were on their way were 7 MB, for each connection."""
    with closing(DataDirectory(tmp_path / "data")) as data:
        upload = Sink(20_000, bytes(32), data, None)
        tracemalloc.start()
        try:
            asyncio.run(upload.receive(cast(Request, Crumbs()), Settings(data_dir=tmp_path)))
            # Only what the pieces and their receiver hold: other tests' threads may allocate meanwhile.
            ours = [tracemalloc.Filter(True, each) for each in (__file__, uploads.__file__)]
            held = tracemalloc.take_snapshot().filter_traces(ours).statistics("filename")
            assert sum(each.size for each in held) < 200_000
        finally:
            tracemalloc.stop()
            upload.discard()
