"""Bodies that arrive as no HTTP library would send them, straight into memory and through a file."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import parse_headers
from urllib.parse import urlsplit

import pytest

from coordinator.store.payloads import MemoryBudget
from harness.coordinator import InThread
from harness.member import Member
from protocol.digest import content_digest, digest
from protocol.messages import Assignment
from tests.coordinator.crew import crew
from tests.support.waiting import PATIENCE_S, wait_until

ROOM_BYTES = 1 << 20


@pytest.fixture(params=[ROOM_BYTES, 0], ids=["in memory", "through a file"])
def memory(request: pytest.FixtureRequest, shared: InThread, monkeypatch: pytest.MonkeyPatch) -> MemoryBudget:
    memory = MemoryBudget(request.param)
    monkeypatch.setattr(shared.coordinator, "memory", memory)
    return memory


class Sender:
    """A contribution to send by hand, over a connection of its own."""

    def __init__(self, running: InThread, member: Member, assignment: Assignment, p: int) -> None:
        address = urlsplit(running.url)
        self.connection = socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S)
        self._answers = self.connection.makefile("rb")
        self.body = member.payload(assignment, p, member.pseudo_gradients(0)[p])
        self._path, self._token = member.contribution_path(0, p), member.joined.member_token

    def head(self, *more: str) -> bytes:
        lines = [f"PUT {self._path} HTTP/1.1", "Host: coordinator", f"Authorization: Bearer {self._token}"]
        lines += [f"Content-Length: {len(self.body)}", f"Content-Digest: {content_digest(digest(self.body))}", *more]
        return "\r\n".join([*lines, "", ""]).encode()

    def close(self) -> None:
        self._answers.close()
        self.connection.close()

    def answer(self) -> int:
        """The status of the next one."""
        status = int(self._answers.readline().split()[1])
        self._answers.read(int(parse_headers(self._answers)["Content-Length"]))
        return status


@contextmanager
def senders(running: InThread, run: str) -> Iterator[list[Sender]]:
    """One for each fragment of the round."""
    (member,) = crew(running, run, ["a"], rounds=1)
    assignment = member.assignment(0)
    made = [Sender(running, member, assignment, p) for p in range(len(member.pseudo_gradients(0)))]
    try:
        yield made
    finally:
        for each in made:
            each.close()


def test_a_body_that_breaks_off_leaves_nothing_behind(shared: InThread, run: str, memory: MemoryBudget) -> None:
    with senders(shared, run) as (first, second, *_):
        first.connection.sendall(first.head() + first.body[: len(first.body) // 2])
        if memory.contributions_bytes:
            wait_until(lambda: memory.take(memory.contributions_bytes) is None)
        first.connection.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: not list((shared.data_dir / "incoming").iterdir()))
        wait_until(lambda: memory.take(memory.contributions_bytes) is not None)
        second.connection.sendall(second.head() + second.body)
        assert second.answer() == 201


def test_a_body_that_stops_coming_is_given_up(
    shared: InThread, run: str, memory: MemoryBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = shared.coordinator.settings.model_copy(update={"upload_idle_s": 0.1})
    with senders(shared, run) as (first, *_):
        monkeypatch.setattr(shared.coordinator, "settings", settings)
        first.connection.sendall(first.head() + first.body[: len(first.body) // 2])
        assert first.answer() == 408
        wait_until(lambda: memory.take(memory.contributions_bytes) is not None)  # while the connection lasts
        wait_until(lambda: not list((shared.data_dir / "incoming").iterdir()))
