"""The data's way through the coordinator: pieces in shared memory, deltas from memory, files that vanish on the way."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request

from coordinator import contributing
from coordinator.api.blobs import blob
from coordinator.files import make_durable
from coordinator.pieces import LARGEST_BYTES, SHARED_BYTES, SMALLEST_BYTES, Pieces
from coordinator.recent import Recent
from protocol.digest import content_digest, digest
from protocol.errors import Problem
from tests.coordinator.crew import crew, play_round, problem
from tests.support.coordinator import InThread

PIECES = Pieces()


def test_the_more_transfers_the_smaller_their_pieces() -> None:
    pieces = Pieces()
    sizes, open_transfers = [], [pieces.transfer() for _ in range(1000)]
    for transfer in open_transfers:
        transfer.__enter__()
        sizes.append(pieces.bytes)
    assert sizes[0] == LARGEST_BYTES
    assert sizes == sorted(sizes, reverse=True)
    assert all(count * size <= SHARED_BYTES for count, size in enumerate(sizes, 1) if size > SMALLEST_BYTES)
    assert sizes[-1] == SMALLEST_BYTES
    for transfer in open_transfers:
        transfer.__exit__(None, None, None)
    assert pieces.bytes == LARGEST_BYTES


def test_the_newest_blobs_are_kept_and_never_more_than_the_limit() -> None:
    recent = Recent(max_bytes=100)
    for number in range(5):
        recent.keep(bytes([number]), [b"x" * 20, b"y" * 20])
    recent.keep(bytes([4]), [b"x" * 20, b"y" * 20])
    assert [number for number in range(5) if recent.get(bytes([number]))] == [3, 4]
    recent.keep(b"too large", [b"x" * 101])
    assert recent.get(b"too large") is None


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


@pytest.mark.parametrize(("headers", "expected"), [({}, slice(None)), ({"range": "bytes=5-"}, slice(5, None))])
def test_a_file_that_is_deleted_after_the_look_up_is_sent_all_the_same(
    tmp_path: Path, headers: dict[str, str], expected: slice
) -> None:
    content = bytes(range(256)) * 9000
    path = tmp_path / "blob"
    path.write_bytes(content)
    response = blob(request(**headers), path, digest(content), PIECES)
    path.unlink()
    assert sent(response) == content[expected]
    with pytest.raises(Problem, match="deleted by the retention rule") as refused:
        blob(request(**headers), path, digest(content), PIECES)
    assert refused.value.slug == "gone"


def test_several_ranges_get_the_whole(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"0123456789")
    response = blob(request(range="bytes=0-1,5-6"), tmp_path / "blob", digest(b"0123456789"), PIECES)
    assert (response.status_code, sent(response)) == (200, b"0123456789")


def test_a_file_that_was_cut_short_breaks_the_answer_off_instead_of_filling_it_up(tmp_path: Path) -> None:
    path = tmp_path / "blob"
    path.write_bytes(b"0123456789")
    response = blob(request(), path, digest(b"0123456789"), PIECES)
    path.write_bytes(b"01234")
    with pytest.raises(OSError, match="ends at byte 5 of 10"):
        sent(response)


def test_a_delta_is_the_same_bytes_from_memory_and_from_its_file(shared: InThread, run: str) -> None:
    (member,) = crew(shared, run, ["a"], rounds=1)
    play_round([member], 0)
    live = shared.live(run)
    from_memory = member.delta(0, 0)
    assert live.world.recent.get(digest(from_memory.content)) is not None
    assert from_memory.content == live.files.delta(0, 0).read_bytes()


def meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """`act` happens once, between a contribution's becoming durable and its commit."""

    def durable(temporary: Path, final: Path) -> None:
        monkeypatch.setattr(contributing, "make_durable", make_durable)
        make_durable(temporary, final)
        act()

    monkeypatch.setattr(contributing, "make_durable", durable)


def test_two_uploads_of_one_contribution_at_once_leave_one(
    shared: InThread, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = crew(shared, run, ["a", "b"], rounds=1, min_workers=2)
    for member in (a, b):
        member.assignment(0)
    values, codes = a.pseudo_gradients(0)[0], []
    with shared.client(a.joined.member_token) as other:
        body = a.payload(a.assignment(0), 0, values)

        def upload() -> None:
            headers = {"Content-Digest": content_digest(digest(body))}
            codes.append(other.put(a.contribution_path(0, 0), content=body, headers=headers).status_code)

        meanwhile(monkeypatch, upload)
        codes.append(a.contribute(a.assignment(0), 0, values).status_code)
    assert codes == [201, 200]
    assert len(list((shared.live(run).files.root / "contributions" / "0").iterdir())) == 1


def test_a_contribution_that_is_refused_after_it_became_durable_leaves_no_file(
    shared: InThread, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a,) = crew(shared, run, ["a"], rounds=1)
    assignment = a.assignment(0)
    with shared.client() as admin:
        meanwhile(monkeypatch, lambda: admin.patch(f"/v1/runs/{run}", json={"state": "stopped"}).raise_for_status())
        problem(a.contribute(assignment, 0, a.pseudo_gradients(0)[0]), "run-ended")
    assert list((shared.live(run).files.root / "contributions" / "0").iterdir()) == []


def test_a_contribution_whose_file_a_refused_twin_took_away_is_asked_for_again(
    shared: InThread, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a,) = crew(shared, run, ["a"], rounds=1)
    assignment, values = a.assignment(0), a.pseudo_gradients(0)[0]
    folder = shared.live(run).files.root / "contributions" / "0"

    def take_away() -> None:
        for path in folder.iterdir():
            path.unlink()

    meanwhile(monkeypatch, take_away)
    problem(a.contribute(assignment, 0, values), "not-ready")
    assert a.contribute(assignment, 0, values).status_code == 201
