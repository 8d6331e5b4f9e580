"""How often a round waits for an answer: once for all of its transfers together, and once for the next assignment."""

from collections import Counter

import httpx
import pytest

from tests.support.waiting import wait_until
from tests.worker import toy
from tests.worker.toy import MakeToy
from worker.link import client as link_client
from worker.link.client import Client

pytestmark = pytest.mark.slow

FRAGMENTS, ROUNDS = 3, 3
TRANSFERS = 2 * FRAGMENTS  # of a round: contributions, and questions for their deltas


class Holding(httpx.HTTPTransport):
    """Holds the answers to a round's transfers back until all of these have begun: whichever began only once another
    was answered would never begin. `begun` has the round of each."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[int] = []
        self.assignments: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        parts = request.url.path.split("/")
        if parts[-1] == "assignment":
            self.assignments.append(request.read().decode())
        if "rounds" not in parts or parts[-1] == "evaluation":
            return super().handle_request(request)
        number = int(parts[5])
        self.begun.append(number)
        answer = super().handle_request(request)
        wait_until(lambda: self.begun.count(number) >= TRANSFERS)
        return answer


def test_all_transfers_of_a_round_wait_for_one_round_trip_and_the_assignment_for_another(
    toy_run: MakeToy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_client, "LONG_POLL_S", 30)  # a question that is asked again would count twice
    held: list[Holding] = []

    def client(http: httpx.Client, run: str, token: str) -> Client:
        held.append(Holding())
        return Client(httpx.Client(base_url=http.base_url, transport=held[0]), run, token)

    toy_run(toy.spec(rounds=ROUNDS)).worker("a", client_class=client)
    (transport,) = held
    assert Counter(transport.begun) == dict.fromkeys(range(ROUNDS), TRANSFERS)
    asked_at_states = [each for each in transport.assignments if '"state_round":null' not in each]
    assert len(asked_at_states) == ROUNDS + 1  # before each round, and at the end
