"""Contributions that are uploaded to a real S3 server, around the coordinator."""

import base64
import hashlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from coordinator.sync import direct_uploads
from coordinator.sync.direct_uploads import LEFT_S
from harness.coordinator import InThread, SettableClock, coordinator_thread
from harness.member import Member
from harness.seaweedfs import SeaweedFS
from harness.stores import names, read
from protocol.digest import digest
from protocol.messages import Assignment, UploadGrant
from protocol.wire import Payload
from tests.coordinator.crew import assigned, crew, events, info, problem, step_all
from tests.support.waiting import wait_until

_numbers = itertools.count()


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


@pytest.fixture
def direct(store: SeaweedFS, tmp_path: Path, clock: SettableClock) -> Iterator[InThread]:
    pytest.importorskip("botocore", reason="no signatures: pip install 'outerstep[remote]'")
    url = store.url(f"direct-{next(_numbers)}")
    with coordinator_thread(tmp_path / "data", blobs=url, clock=clock, requests_per_s=1e6) as running:
        yield running


def payloads(member: Member, assignment: Assignment) -> list[bytes]:
    values = member.pseudo_gradients(assignment.round)
    return [member.payload(assignment, p, each) for p, each in enumerate(values)]


@pytest.fixture
def member(direct: InThread) -> Member:
    """The only member of a run."""
    (member,) = crew(direct, "r", ["w"])
    return member


@pytest.fixture
def sent(member: Member) -> list[bytes]:
    """Its contribution to round 0, by fragment."""
    return payloads(member, member.assignment(0))


def upload(member: Member, fragment: int, announcement: dict[str, object], content: bytes) -> None:
    """Upload `content` as it was announced for round 0, without a commit."""
    granted = UploadGrant.model_validate(member.grant(0, fragment, announcement).raise_for_status().json())
    assert granted.url is not None
    httpx.put(granted.url, content=content, headers=granted.headers).raise_for_status()


def play_directly(direct: InThread, altered: Callable[[bytes], bytes] = bytes, **announced: str) -> Member:
    """Play a round of a, b and c; return c. Its first fragment goes to the store, altered, and all else comes through
    the coordinator."""
    *others, c = members = crew(direct, "r", ["a", "b", "c"], min_workers=3)
    *_, assignment = assigned(members, 0)
    for member in others:
        member.take_part(0)
    first, *rest = payloads(c, assignment)
    for p, payload in enumerate(rest, 1):
        c.put(c.contribution_path(0, p), payload).raise_for_status()
    assert c.contribute_directly(0, 0, altered(first), None, **announced).status_code == 201
    step_all(members, 0)
    return c


def await_lost(member: Member, fragment: int) -> None:
    """Wait until the coordinator asks for the contribution again."""
    reply = member.delta(0, fragment)
    while reply.status_code == 404:
        reply = member.delta(0, fragment)
    problem(reply, "contribution-lost")


@pytest.mark.slow
def test_a_contribution_uploaded_directly_is_in_the_same_delta(direct: InThread) -> None:
    """Of two runs with the same contributions, one sends them directly, the other through the coordinator."""
    deltas = []
    for run, directly in (("direct", True), ("through", False)):
        (member,) = crew(direct, run, ["w"])
        assignment = member.assignment(0)
        for p, payload in enumerate(payloads(member, assignment)):
            if directly:
                reply = member.contribute_directly(0, p, payload)
                assert (reply.status_code, reply.json()["created"]) == (201, True)
                again = member.commit(0, p, member.announcement(payload))
                assert (again.status_code, again.json()["created"]) == (200, False)
                assert member.grant(0, p, member.announcement(payload)).json()["accepted"]
            else:
                member.put(member.contribution_path(0, p), payload).raise_for_status()
        found = [member.delta(0, p).raise_for_status().content for p in range(len(member.theta))]
        deltas.append([bytes(Payload.from_bytes(each).chunk(0)) for each in found])
    assert deltas[0] == deltas[1]


@pytest.mark.slow
def test_downloads_are_redirected_on_request(direct: InThread) -> None:
    (member,) = crew(direct, "r", ["w"], checkpoints="every_rounds = 1")
    member.take_part(0)
    expected = member.delta(0, 0).raise_for_status().content
    for path in ("rounds/0/fragments/0/delta", "checkpoints/0/fragments/0"):
        through = member.http.get(f"/v1/runs/r/{path}").raise_for_status()
        redirect = member.http.get(f"/v1/runs/r/{path}?direct=true", follow_redirects=False)
        assert redirect.status_code == 307
        assert redirect.headers["ETag"] == f'"{digest(through.content).hex()}"'
        assert redirect.headers["Outerstep-Length"] == str(len(through.content))
        assert redirect.headers["Cache-Control"] == "no-store"
        assert httpx.get(redirect.headers["Location"]).content == through.content
    assert expected


@pytest.mark.covers("reliability:store-faults")
def test_what_was_not_uploaded_is_not_committed(member: Member, sent: list[bytes]) -> None:
    announcement = member.announcement(sent[0])
    problem(member.commit(0, 0, announcement), "not-uploaded")
    member.grant(0, 0, announcement).raise_for_status()
    problem(member.commit(0, 0, announcement), "not-uploaded")
    upload(member, 0, announcement, sent[0])
    assert member.commit(0, 0, announcement).status_code == 201


@pytest.mark.slow
def test_only_the_announced_bytes_are_committed(direct: InThread, member: Member, sent: list[bytes]) -> None:
    """Two announcements with the same BLAKE3 digest, as of somebody who lies, have one name in the store."""
    payload, other, *_ = sent
    upload(member, 0, member.announcement(payload, sha256=hashlib.sha256(other).hexdigest()), other)
    problem(member.commit(0, 0, member.announcement(payload)), "digest-mismatch")
    run = direct.coordinator.run("r")
    wait_until(lambda: not names(run, "contributions") and not run.uploads.deleting)  # a rejected upload leaves no blob
    assert member.contribute_directly(0, 0, payload).status_code == 201


@pytest.mark.covers("security:direct-lies")
def test_other_bytes_in_the_store_are_not_taken_for_a_contribution_through_the_coordinator(
    direct: InThread, member: Member, sent: list[bytes]
) -> None:
    payload, other, *_ = sent
    upload(member, 0, member.announcement(payload, sha256=hashlib.sha256(other).hexdigest()), other)
    run = direct.coordinator.run("r")
    (name,) = names(run, "contributions")
    assert read(run.blobs, name) == other
    member.put(member.contribution_path(0, 0), payload).raise_for_status()
    assert read(run.blobs, name) == payload


@pytest.mark.covers("security:direct-lies")
def test_the_uploaded_header_is_the_announced_one(member: Member, sent: list[bytes]) -> None:
    payload, lied = sent[0], bytearray(sent[0])
    lied[payload.index(b"norm") + 5] ^= 1  # the norm
    announced = {"sha256": hashlib.sha256(lied).hexdigest(), "digest": digest(lied).hex()}
    problem(member.contribute_directly(0, 0, payload, bytes(lied), **announced), "invalid-payload")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "slug"),
    [
        ({"bytes": 1 << 40}, "payload-too-large"),
        ({"bytes": 17}, "invalid-payload"),
        ({"header": "!"}, "invalid-payload"),
        ({"header": "\x85"}, "invalid-payload"),
        ({"header": base64.b64encode(b"OSTP").decode()}, "invalid-payload"),
        ({"header": "A" * 40_000}, "invalid-message"),
        ({"sha256": "no"}, "invalid-message"),
    ],
)
def test_an_announcement_is_checked_before_anything_is_signed(
    member: Member, sent: list[bytes], changes: dict[str, object], slug: str
) -> None:
    announcement = member.announcement(sent[0], **changes)
    problem(member.grant(0, 0, announcement), slug)
    problem(member.commit(0, 0, announcement), slug)


def test_the_header_is_checked_before_anything_is_signed(member: Member) -> None:
    assignment = member.assignment(0)
    values = member.pseudo_gradients(0)[0]
    cases: dict[str, dict[str, object]] = {
        "stale-base": {"base": bytes(32)},
        "units-not-held": {"units": [[900, 905]]},
        "invalid-payload": {"tokens": 7},
        "round-not-open": {"round": 5},
    }
    for slug, changes in cases.items():
        payload = member.payload(assignment, 0, values, **changes)
        problem(member.grant(5 if slug == "round-not-open" else 0, 0, member.announcement(payload)), slug)


@pytest.mark.slow
@pytest.mark.covers("security:direct-lies")
def test_a_payload_that_is_not_valid_is_left_out(direct: InThread) -> None:
    """Its values are looked at after the commit; from then on its worker has to send them through the coordinator."""

    def nothing(payload: bytes) -> bytes:
        """Neither a zstd frame nor finite scales follow the header."""
        head = Payload.from_bytes(payload).offsets[0]
        return payload[:head] + bytes([255]) * (len(payload) - head)

    bad = play_directly(direct, nothing)
    judged = info(direct, "r", "/rounds/0")["fragments"][0]["verdicts"]
    assert judged["a"]["factor"] > judged["c"]["factor"] == 0
    assert "no valid payload" in judged["c"]["reason"]
    assert any("contribution of c is left out" in each["message"] for each in events(direct, "r", "screened"))
    assignment = bad.assignment(1)
    announcement = bad.announcement(payloads(bad, assignment)[0])
    granted = UploadGrant.model_validate(bad.grant(1, 0, announcement).raise_for_status().json())
    assert granted.url is None
    assert "invalid" in granted.reason
    problem(bad.commit(1, 0, announcement), "not-uploaded")


@pytest.mark.slow
@pytest.mark.covers("security:direct-lies")
def test_another_digest_than_announced_is_no_lost_contribution(direct: InThread) -> None:
    """It would be collected again, and again, and the round would never end."""
    play_directly(direct, digest="ab" * 32)
    judged = info(direct, "r", "/rounds/0")["fragments"][0]["verdicts"]["c"]
    assert judged["factor"] == 0
    assert "BLAKE3" in judged["reason"]


@pytest.mark.slow
def test_without_a_valid_contribution_the_fragment_is_collected_again(member: Member, sent: list[bytes]) -> None:
    assert member.contribute_directly(0, 0, sent[0], digest="ab" * 32).status_code == 201
    await_lost(member, 0)
    for p, payload in enumerate(sent):
        assert member.grant(0, p, member.announcement(payload)).json()["url"] is None
        member.put(member.contribution_path(0, p), payload).raise_for_status()
    member.step(0)


@pytest.mark.slow
@pytest.mark.covers("reliability:store-faults")
def test_a_lost_blob_is_collected_again(direct: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that loses an object does what a disk does that loses a file. Nothing was read before."""
    monkeypatch.setattr(direct_uploads, "_examine", lambda *_: None)
    one, two = crew(direct, "r", ["a", "b"], min_workers=2)
    first, second = assigned([one, two], 0)
    assert one.contribute_directly(0, 0, payloads(one, first)[0]).status_code == 201
    run = direct.coordinator.run("r")
    (name,) = names(run, "contributions")
    run.blobs.delete(name)
    for p, payload in enumerate(payloads(two, second)):
        assert two.contribute_directly(0, p, payload).status_code == 201
    for p, payload in enumerate(payloads(one, first)[1:], 1):
        assert one.contribute_directly(0, p, payload).status_code == 201
    await_lost(one, 0)
    assert one.contribute_directly(0, 0, payloads(one, first)[0]).status_code == 201
    one.step(0)
    two.step(0)
    assert np.array_equal(one.theta[0], two.theta[0])


def test_what_is_never_committed_is_deleted(direct: InThread, clock: SettableClock) -> None:
    (member,) = crew(direct, "r", ["w"], members="lease_s = 3600")
    payload = payloads(member, member.assignment(0))[0]
    upload(member, 0, member.announcement(payload), payload)
    run = direct.coordinator.run("r")
    assert len(names(run, "contributions")) == 1
    clock.advance(LEFT_S + 1)
    direct.coordinator.tick()
    assert len(names(run, "contributions")) == 1, "the upload may still be on its way"
    member.http.put(member.path("/lease"), json={}).raise_for_status()
    clock.advance(3599.5)
    direct.coordinator.tick()
    wait_until(lambda: not names(run, "contributions") and not run.uploads.deleting)
    problem(member.commit(0, 0, member.announcement(payload)), "not-uploaded")


def test_a_worker_is_granted_a_few_rounds_of_uploads(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    assignment = member.assignment(0)
    sent = [member.payload(assignment, 0, np.float32(each) * member.pseudo_gradients(0)[0]) for each in (1, 2, 3)]
    monkeypatch.setattr(direct_uploads, "max_payloads_bytes", lambda *_: len(sent[0]) * 3 // 5)  # of a round
    for payload in (sent[0], sent[1], sent[1]):
        member.grant(0, 0, member.announcement(payload)).raise_for_status()
    problem(member.grant(0, 0, member.announcement(sent[2])), "too-many-requests")


@pytest.mark.slow
@pytest.mark.covers("reliability:store-faults")
def test_the_coordinator_restarts_between_upload_and_commit(store: SeaweedFS, tmp_path: Path) -> None:
    url = store.url(f"direct-{next(_numbers)}")
    with coordinator_thread(tmp_path / "data", blobs=url) as running:
        (member,) = crew(running, "r", ["w"])
        assignment = member.assignment(0)
        sent = payloads(member, assignment)
        assert member.contribute_directly(0, 0, sent[0]).status_code == 201
        upload(member, 1, member.announcement(sent[1]), sent[1])
    with coordinator_thread(tmp_path / "data", running.port, blobs=url):
        problem(member.commit(0, 1, member.announcement(sent[1])), "not-uploaded")  # it was swept at the start
        for p, payload in enumerate(sent[1:], 1):
            assert member.contribute_directly(0, p, payload).status_code == 201
        member.step(0)
