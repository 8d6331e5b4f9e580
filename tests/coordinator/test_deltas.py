"""Fetching deltas and checkpoints: immutable bytes with ETag, Range and long-polling."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.coordinator import InThread
from harness.member import Member
from protocol.digest import digest
from protocol.messages import Scope
from protocol.wire import DeltaHeader, Payload, StateHeader
from tests.coordinator.crew import crew, info, play_rounds, problem, set_state
from tests.support.waiting import PATIENCE_S


@pytest.fixture(params=["rounds/0/fragments/1/delta", "checkpoints/1/fragments/1"], ids=["delta", "checkpoint"])
def address(request: pytest.FixtureRequest) -> str:
    return f"/v1/runs/blobs/{request.param}"


def test_the_bytes_are_a_payload_of_their_kind_and_their_digest_is_the_etag(member: Member, address: str) -> None:
    reply = member.http.get(address)
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/vnd.outerstep.payload"
    assert reply.headers["cache-control"] == "private, max-age=31536000, immutable"
    assert reply.headers["accept-ranges"] == "bytes"
    assert reply.headers["etag"] == f'"{digest(reply.content).hex()}"'
    header = Payload.from_bytes(reply.content).header
    assert isinstance(header, DeltaHeader if address.endswith("delta") else StateHeader)
    assert header.fragment == 1


@pytest.mark.parametrize("wanted", ["{etag}", "W/{etag}", '"other", {etag}', "*"])
def test_what_the_client_has_already_is_not_sent_again(member: Member, address: str, wanted: str) -> None:
    etag = member.http.get(address).headers["etag"]
    reply = member.http.get(address, headers={"If-None-Match": wanted.format(etag=etag)})
    assert (reply.status_code, reply.content, reply.headers["etag"]) == (304, b"", etag)
    assert member.http.get(address, headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    ("wanted", "start", "stop"),
    [("bytes=0-0", 0, 1), ("bytes=10-19", 10, 20), ("bytes=100-", 100, None), ("bytes=5-999999999", 5, None)],
)  # fmt: skip
def test_a_range_gets_just_that(member: Member, address: str, wanted: str, start: int, stop: int | None) -> None:
    whole = member.http.get(address)
    reply = member.http.get(address, headers={"Range": wanted})
    assert reply.status_code == 206
    assert reply.content == whole.content[start:stop]
    assert reply.headers["etag"] == whole.headers["etag"]
    first = start % len(whole.content)
    assert reply.headers["content-range"] == f"bytes {first}-{first + len(reply.content) - 1}/{len(whole.content)}"


def test_a_download_that_broke_off_goes_on_only_on_the_same_bytes(member: Member, address: str) -> None:
    whole = member.http.get(address)
    half = len(whole.content) // 2
    wanted = {"Range": f"bytes={half}-"}
    same = member.http.get(address, headers={**wanted, "If-Range": whole.headers["etag"]})
    assert (same.status_code, same.content) == (206, whole.content[half:])
    other = member.http.get(address, headers={**wanted, "If-Range": '"other"'})
    assert (other.status_code, other.content) == (200, whole.content)


def test_a_range_that_cannot_be_had_is_a_problem_that_tells_the_size(member: Member, address: str) -> None:
    size = len(member.http.get(address).content)
    refused = member.http.get(address, headers={"Range": "bytes=99999999-"})
    assert f"within the {size} bytes" in problem(refused, "range-not-satisfiable")["detail"]
    assert refused.headers["content-range"] == f"bytes */{size}"


def test_a_delta_that_is_not_there_yet_says_what_is_waited_for(shared: InThread, run: str) -> None:
    a, b = crew(shared, run, ["a", "b"], rounds=2, min_workers=2)
    assert "not open: round 0 waits for workers" in problem(a.delta(0, 0, wait_s=0), "not-published")["detail"]
    for each in (a, b):
        each.assignment(0)
    problem(a.delta(0, 0, wait_s=0), "contribution-lost")
    a.take_part(0)
    refused = a.delta(0, 0, wait_s=0)
    assert "waiting for 1 of 2 workers (b)" in problem(refused, "not-published")["detail"]
    assert refused.headers["retry-after"] == "1"
    problem(a.delta(0, 2, wait_s=0), "not-found")
    problem(a.delta(1, 0, wait_s=0), "round-not-open")
    problem(shared.client().get(f"/v1/runs/{run}/rounds/1/fragments/0/delta"), "not-published")


@pytest.mark.usefixtures("endless_polls")
def test_a_long_poll_answers_when_the_delta_is_published(shared: InThread, run: str) -> None:
    (a,) = crew(shared, run, ["a"], rounds=1)
    with shared.client() as waiting, ThreadPoolExecutor(1) as others:
        delta = f"/v1/runs/{run}/rounds/0/fragments/0/delta"
        reply = others.submit(waiting.get, delta, headers={"Prefer": "wait=9999"})
        a.take_part(0)
        assert reply.result(PATIENCE_S).status_code == 200


@pytest.mark.usefixtures("endless_polls")
def test_a_long_poll_for_work_answers_when_the_round_opens(shared: InThread, run: str) -> None:
    a, b = crew(shared, run, ["a", "b"], rounds=1, min_workers=2)
    with ThreadPoolExecutor(1) as others:
        assignment = others.submit(a.assignment, 0, wait_s=9999)
        assert b.assignment(0, wait_s=9999).action == "train"
        assert assignment.result(PATIENCE_S).action == "train"


@pytest.mark.usefixtures("endless_polls")
def test_long_polls_of_a_run_that_is_stopped_end(shared: InThread, run: str) -> None:
    (a,) = crew(shared, run, ["a"], rounds=1)
    a.assignment(0)
    a.http.headers["Authorization"] = f"Bearer {shared.token(Scope.VIEWER)}"  # who has not contributed may not wait
    with ThreadPoolExecutor(1) as others:
        reply = others.submit(a.delta, 0, 0, wait_s=9999)
        set_state(shared, run, "stopped")
        problem(reply.result(PATIENCE_S), "run-ended")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "keep", "slugs", "kept"),
    [
        (1, 1, {0: "gone", 1: "gone", 2: "gone", 5: "not-found"}, [4]),
        (2, 2, {0: "gone", 1: "gone", 3: "not-found", 5: "not-found"}, [4, 2]),
    ],
)
def test_a_checkpoint_that_retention_has_deleted_is_gone_and_one_that_never_was_is_not(
    shared: InThread, run: str, every: int, keep: int, slugs: dict[int, str], kept: list[int]
) -> None:
    (a,) = crew(shared, run, ["a"], rounds=5, checkpoints=f"every_rounds = {every}\nkeep = {keep}")
    play_rounds(shared, [a], range(4))
    for number, slug in slugs.items():
        for rest in ("", "/fragments/0"):
            problem(a.http.get(f"/v1/runs/{run}/checkpoints/{number}{rest}"), slug)
    assert [each["round"] for each in info(shared, run, "/checkpoints")["items"]] == kept
    if every == 1:
        problem(a.delta(2, 0), "gone")
        assert a.delta(3, 0).status_code == 200, "the newest delta stays, for workers are just fetching it"
