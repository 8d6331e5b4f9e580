"""Hostile and broken uploads: each gets the documented problem and leaves no file, no row and no memory behind."""

import http.client
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgpack
import numpy as np
import psutil
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select

from coordinator.store.tables import ContributionRow, UnitRangeRow
from harness.coordinator import InThread, coordinator_thread
from harness.member import Member, spec_toml
from protocol.codecs import CODECS
from protocol.digest import content_digest, digest
from protocol.errors import PROBLEM_PREFIX, PROBLEMS
from protocol.messages import Assignment, Scope
from protocol.wire import CHUNK_ELEMENTS, PREFIX, StateHeader, pack_header
from tests.support.waiting import PATIENCE_S


@dataclass
class Target:
    """A coordinator with an open round, a member that may contribute to it, and what is there before the attack."""

    running: InThread
    member: Member
    assignment: Assignment

    def traces(self) -> tuple[list[str], int, int]:
        """Every file of the run and of incoming/, contribution rows, consumed unit ranges."""
        data = self.running.data_dir
        files = sorted(str(path.relative_to(data)) for path in data.rglob("*") if path.is_file())
        files = [path for path in files if not path.startswith(("outerstep.db", "lock"))]
        with self.running.coordinator.database.read() as session:
            rows = session.scalar(select(func.count()).select_from(ContributionRow))
            consumed = session.scalar(
                select(func.count()).select_from(UnitRangeRow).where(UnitRangeRow.state == "consumed")
            )
        return files, rows or 0, consumed or 0

    @property
    def values(self) -> np.ndarray:
        return self.member.pseudo_gradients(0)[0]

    def payload(self, **changes: object) -> bytes:
        return self.member.payload(self.assignment, 0, self.values, **changes)

    def send(
        self, body: bytes, *, fragment: int = 0, round_: int = 0, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        return self.member.put(self.member.contribution_path(round_, fragment), body, **(headers or {}))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    data_dir: Path = tmp_path_factory.mktemp("hostile") / "data"
    with coordinator_thread(data_dir) as running:
        running.create_run(spec_toml(rounds=2, members="lease_s = 3600"))
        running.create_run(spec_toml("other", rounds=2))
        member = Member(running.client(), "r", "w0")
        member.join(running.token(Scope.WORKER))
        assert member.assignment(None).action == "seed"
        member.seed()
        yield Target(running, member, member.assignment(0))


def refused(reply: httpx.Response, slug: str) -> None:
    assert reply.headers["content-type"] == "application/problem+json", reply.text
    document = reply.json()
    assert document["type"] == PROBLEM_PREFIX + slug, document
    assert reply.status_code == document["status"] == PROBLEMS[slug].status
    assert document["detail"]


def with_header(payload: bytes, **changes: object) -> bytes:
    """The payload with fields of its header replaced, unchecked."""
    _, _, _, length = PREFIX.unpack_from(payload)
    header = msgpack.unpackb(payload[PREFIX.size : PREFIX.size + length])
    body = msgpack.packb({**header, **changes})
    return PREFIX.pack(b"OSTP", 1, 0, len(body)) + body + payload[PREFIX.size + length :]


def with_frame(target: Target, frame: bytes) -> bytes:
    """A contribution whose only frame is `frame`."""
    honest = target.payload()
    head = honest[: PREFIX.size + PREFIX.unpack_from(honest)[3]]
    return with_header(head, frame_bytes=[len(frame)]) + frame


def with_scales(target: Target, value: float) -> bytes:
    """int8 scales that decode to NaN, infinity or nonsense."""
    n = len(target.values)
    raw = np.zeros(CODECS["int8"].size(n), np.uint8)
    raw[: 2 * -(-n // 256)].view("<u2")[:] = np.float32(value).view(np.uint32) >> np.uint32(16)
    return with_frame(target, raw.tobytes())


BIG = 100_000_000

HOSTILE: dict[str, tuple[Callable[[Target], bytes], str]] = {
    "empty": (lambda t: b"", "invalid-payload"),
    "not a payload": (lambda t: b"hello, context" * 10, "invalid-payload"),
    "truncated frames": (lambda t: t.payload()[:-1], "invalid-payload"),
    "deeply nested header": (lambda t: PREFIX.pack(b"OSTP", 1, 0, 5000) + b"\x91" * 5000, "invalid-payload"),
    "wrong run": (lambda t: with_header(t.payload(), run="other"), "invalid-payload"),
    "wrong round": (lambda t: with_header(t.payload(), round=1), "invalid-payload"),
    "wrong fragment": (lambda t: with_header(t.payload(), fragment=1), "invalid-payload"),
    "wrong worker": (lambda t: with_header(t.payload(), worker="w1"), "invalid-payload"),
    "wrong kind": (lambda t: with_header(t.payload(), kind="state"), "invalid-payload"),
    "wrong codec": (lambda t: t.payload(codec="fp32"), "invalid-payload"),
    "wrong element count": (lambda t: with_header(t.payload(), elements=len(t.values) - 1), "invalid-payload"),
    "other chunk size": (lambda t: with_header(t.payload(), chunk_elements=1 << 10), "invalid-payload"),
    "more tokens than its units": (lambda t: with_header(t.payload(), tokens=10**9), "invalid-payload"),
    "no units": (lambda t: with_header(t.payload(), units=[], tokens=0), "invalid-payload"),
    "empty units": (lambda t: with_header(t.payload(), units=[[3, 3]], tokens=0), "invalid-payload"),
    "units of nobody": (lambda t: t.payload(units=[[500, 505]]), "units-not-held"),
    "its units twice": (lambda t: t.payload(units=[[0, 5], [0, 5]], tokens=320), "units-not-held"),
    "units beyond its own": (lambda t: t.payload(units=[[3, 7]], tokens=128), "units-not-held"),
    "another base state": (lambda t: t.payload(base=b"\7" * 32), "stale-base"),
    "scale NaN": (lambda t: with_scales(t, float("nan")), "invalid-payload"),
    "values above 2^100": (lambda t: with_scales(t, 2.0**94), "invalid-payload"),
    "zstd bomb": (lambda t: with_frame(t, zstandard.compress(bytes(BIG))[:500]), "invalid-payload"),
}


@pytest.mark.covers("security:replayed-upload")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_is_refused_and_leaves_nothing(target: Target, name: str) -> None:
    make, slug = HOSTILE[name]
    before = target.traces()
    refused(target.send(make(target)), slug)
    assert target.traces() == before


@pytest.mark.covers("security:nan-payload")
def test_a_contribution_with_nan_in_fp32_or_bf16_is_refused(tmp_path: Path) -> None:
    for codec in ("fp32", "bf16"):
        with coordinator_thread(tmp_path / codec) as running:
            running.create_run(spec_toml(min_workers=1, sync=f'upload_codec = "{codec}"\nzstd = false'))
            member = Member(running.client(), "r", "w0")
            member.join(running.token(Scope.WORKER))
            member.assignment(None)
            member.seed()
            target = Target(running, member, member.assignment(0))
            size = CODECS[codec].size(len(target.values))
            for pattern in (
                b"\xff" * size,
                (b"\x80\x7f" if codec == "bf16" else b"\0\0\x80\x7f") * len(target.values),  # infinity
                (b"\x80\x72" if codec == "bf16" else b"\0\0\x80\x72") * len(target.values),  # 2^102
            ):
                before = target.traces()
                refused(target.send(target.payload()[:-size] + pattern), "invalid-payload")
                assert target.traces() == before


def test_a_body_without_length_or_with_too_great_a_length_is_refused_unread(target: Target) -> None:
    before = target.traces()
    path = target.member.contribution_path(0, 0)
    headers = {"Content-Digest": content_digest(digest(b""))}
    refused(target.member.http.put(path, content=iter([b"x"]), headers=headers), "length-required")
    connection = http.client.HTTPConnection(target.running.url.removeprefix("http://"), timeout=PATIENCE_S)
    connection.putrequest("PUT", path)
    for name, value in {**target.member.http.headers, **headers, "Content-Length": str(1 << 40)}.items():
        connection.putheader(name, value)
    connection.endheaders()  # and not one byte of the body
    reply = connection.getresponse()
    assert reply.status == 413
    assert json.loads(reply.read())["type"] == PROBLEM_PREFIX + "payload-too-large"
    connection.close()
    assert target.traces() == before


@pytest.mark.covers("security:path-traversal")
def test_addresses_that_do_not_exist_take_nothing(target: Target) -> None:
    before = target.traces()
    body = target.payload()
    refused(target.send(body, fragment=99), "not-found")
    refused(target.send(target.payload(round=5), round_=5), "round-not-open")
    refused(target.member.put("/v1/runs/none/rounds/0/fragments/0/contributions/w0", body), "forbidden")
    refused(target.member.put("/v1/runs/r/rounds/0/fragments/0/contributions/W%200", body), "invalid-message")
    refused(target.member.put("/v1/runs/r/rounds/-1/fragments/0/contributions/w0", body), "invalid-message")
    refused(target.member.put("/v1/runs/r/rounds/0/fragments/0/contributions/../../x", body), "not-found")
    assert target.traces() == before


@pytest.mark.slow
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_is_mutated_the_answer_is_a_problem_and_nothing_is_left(target: Target, data: st.DataObject) -> None:
    body = bytearray(target.payload(base=b"\7" * 32))  # even unharmed it would be refused
    for _ in range(data.draw(st.integers(1, 8))):
        how = data.draw(st.sampled_from(["flip", "cut", "insert", "zero"]))
        at = data.draw(st.integers(0, max(0, len(body) - 1)))
        if how == "flip" and body:
            body[at] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "cut":
            del body[at : at + data.draw(st.integers(1, 64))]
        elif how == "insert":
            body[at:at] = data.draw(st.binary(min_size=1, max_size=16))
        else:
            body[at : at + 8] = bytes(len(body[at : at + 8]))
    before = target.traces()
    reply = target.send(bytes(body))
    assert reply.json()["type"].removeprefix(PROBLEM_PREFIX) in ("invalid-payload", "stale-base", "units-not-held")
    assert target.traces() == before


@pytest.mark.slow
@pytest.mark.covers("security:payload-bombs")
def test_a_thousand_hostile_bodies_do_not_make_the_coordinator_grow(target: Target) -> None:
    bodies = [make(target) for make, _ in HOSTILE.values()]
    for body in bodies:
        target.send(body)
    process = psutil.Process()
    before = process.memory_info().rss
    for number in range(1000):
        target.send(bodies[number % len(bodies)])
    assert process.memory_info().rss - before < 30 << 20


@pytest.mark.in_directory
def test_after_all_that_the_member_still_contributes(target: Target) -> None:
    body = target.payload()
    reply = target.send(body)
    assert reply.status_code == 201
    assert reply.json()["created"]
    again = target.send(body)
    assert again.status_code == 200
    assert not again.json()["created"]
    refused(target.send(target.payload(loss=2.5)), "contribution-conflict")
    files, rows, consumed = target.traces()
    assert rows == consumed == 1
    assert sum("contributions/" in path for path in files) == 1


def test_hostile_states_cannot_seed_a_run(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data") as running:
        running.create_run(spec_toml())
        token = running.token(Scope.WORKER)
        first, second = (Member(running.client(), "r", name) for name in ("w0", "w1"))
        first.join(token)
        second.join(token)
        assert first.assignment(None).action == "seed"
        with pytest.raises(httpx.HTTPStatusError) as refusal:
            second.seed()
        refused(refusal.value.response, "state-conflict")
        path = "/v1/runs/r/checkpoints/0/fragments/0"
        nan = np.full(2 * len(first.theta[0]), np.nan, "<f4")

        def state(**changes: object) -> bytes:
            fields = {"run": "r", "round": 0, "fragment": 0, "codec": "fp32", "elements": len(nan)}
            rest = {"chunk_elements": CHUNK_ELEMENTS, "frame_bytes": [nan.nbytes]}
            return pack_header(StateHeader.model_validate({**fields, **rest, **changes})) + nan.tobytes()

        refused(first.put(path, state()), "invalid-payload")
        refused(first.put(path, state(round=1)), "invalid-payload")
        refused(first.put(path, state(run="x")), "invalid-payload")
        refused(first.put("/v1/runs/r/checkpoints/0/fragments/9", state()), "not-found")
        assert not list((running.data_dir / "runs/r").glob("checkpoints/**/*"))
        first.seed()
        assert second.assignment(None).action == "recover"
