"""How often a round waits for an answer: once for all of its transfers together, and once for the next assignment."""

import threading
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.support.waiting import PATIENCE_S
from tests.worker import toy
from tests.worker.toy import Toy, coordinator_thread
from worker.link import client as link_client
from worker.link.client import Client

pytestmark = pytest.mark.slow

FRAGMENTS, ROUNDS = 3, 3
TRANSFERS = 2 * FRAGMENTS  # of a round: contributions, and questions for their deltas


class Holding(httpx.BaseTransport):
    """Holds the answers to a round's transfers back until all of these have begun: whichever began only once another
    was answered would never begin."""

    def __init__(self, inner: httpx.BaseTransport) -> None:
        self._inner = inner
        self._changed = threading.Condition()
        self.begun: Counter[int] = Counter()
        self.assignments: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        parts = request.url.path.split("/")
        if parts[-1] == "assignment":
            self.assignments.append(request.read().decode())
        if "rounds" not in parts or parts[-1] == "evaluation":
            return self._inner.handle_request(request)
        number = int(parts[5])
        with self._changed:
            self.begun[number] += 1
            self._changed.notify_all()
        answer = self._inner.handle_request(request)
        with self._changed:
            assert self._changed.wait_for(lambda: self.begun[number] >= TRANSFERS, PATIENCE_S), self.begun
        return answer


def test_all_transfers_of_a_round_wait_for_one_round_trip_and_the_assignment_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_client, "LONG_POLL_S", 30)  # a question that is asked again would count twice
    held: list[Holding] = []

    def client(http: httpx.Client, run: str, token: str) -> Client:
        held.append(Holding(httpx.HTTPTransport()))
        return Client(httpx.Client(base_url=http.base_url, transport=held[0]), run, token)

    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        Toy(coordinator, toy.spec(rounds=ROUNDS), tmp_path).worker("a", client_class=client)
    (transport,) = held
    assert transport.begun == dict.fromkeys(range(ROUNDS), TRANSFERS)
    asked_at_states = [each for each in transport.assignments if '"state_round":null' not in each]
    assert len(asked_at_states) == ROUNDS + 1  # before each round, and at the end
