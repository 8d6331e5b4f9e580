"""Late, round after round: what was not acknowledged is carried along, whole, whatever the codec, over crashes too."""

import threading
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import pytest

from protocol.codecs.base import F32
from protocol.errors import Problem
from protocol.wire import ContributionHeader, Payload, pack_header
from tests.support.waiting import PATIENCE_S
from tests.worker import toy
from tests.worker.toy import MortalClient, Toy, coordinator_thread
from worker.diloco import DiLoCo
from worker.link.client import Client
from worker.rounds.exchange import Exchange, Outcome
from worker.state.work import Contribution

pytestmark = pytest.mark.slow

FRAGMENTS = 3
AT_ONCE = "grace_factor = 0\ngrace_min_s = 0"


class LateClient(MortalClient):
    """Contributes the fragments in `late`, (round, fragment), only when their round has closed without them.

    `sent` has the frames of every contribution and `headers` its header; `arrived` is told of each.
    """

    def __init__(self, *arguments: Any, late: set[tuple[int, int]], arrived: "Arrivals", **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._late, self._arrived = late, arrived
        self.sent: dict[tuple[int, int], list[bytes]] = {}
        self.headers: dict[tuple[int, int], ContributionHeader] = {}

    def contribute(self, member_token, header, frames, **options):
        key = (header.round, header.fragment)
        while key in self._late:
            try:
                Client.delta(self, *key, 1 << 20)
                break
            except Problem as problem:
                if problem.slug != "not-published":
                    raise
        self.sent[key] = [bytes(frame) for frame in frames]
        self.headers[key] = header
        super().contribute(member_token, header, frames, **options)
        self._arrived.note(key)


def values(header: ContributionHeader, frames: list[bytes]) -> F32:
    """What a contribution says, float32[n]."""
    out = np.empty(header.elements, np.float32)
    Payload.from_bytes(pack_header(header) + b"".join(frames)).decode(out)
    return out


class Arrivals:
    """What of the late worker is there."""

    def __init__(self) -> None:
        self._keys: set[tuple[int, int]] = set()
        self._changed = threading.Condition()

    def note(self, key: tuple[int, int]) -> None:
        with self._changed:
            self._keys.add(key)
            self._changed.notify_all()

    def wait_for(self, key: tuple[int, int]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._keys, timeout=PATIENCE_S)


class PatientClient(Client):
    """Contributes only after the late worker has, where that one is not to be late."""

    def __init__(self, *arguments: Any, late: set[tuple[int, int]], arrived: Arrivals, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._late, self._arrived = late, arrived

    def contribute(self, member_token, header, frames, **options):
        key = (header.round, header.fragment)
        if key not in self._late:
            self._arrived.wait_for(key)
        super().contribute(member_token, header, frames, **options)


C = TypeVar("C", bound=LateClient)


class Latecomer(Generic[C]):
    """What makes worker c late with the fragments in `late`, (round, fragment), and a and b wait for it with all others:
    options for `Toy.worker`. All three meet after the first inner step.

    `clients` has those of c, one for each of its processes.
    """

    def __init__(self, late: set[tuple[int, int]], client_class: type[C]) -> None:
        self._late, self._client_class = late, client_class
        self._arrived, self._everybody = Arrivals(), threading.Barrier(3)
        self.clients: list[C] = []

    def late(self, **options: Any) -> dict[str, Any]:
        return {"client_class": self.client, "on_step": self.meet, **options}

    def patient(self, **options: Any) -> dict[str, Any]:
        client = partial(PatientClient, late=self._late, arrived=self._arrived)
        return {"client_class": client, "on_step": self.meet, **options}

    def meet(self, diloco: DiLoCo) -> None:
        if (diloco.round, diloco.inner_step) == (0, 1):
            self._everybody.wait(PATIENCE_S)

    def client(self, *arguments: Any) -> C:
        lives = {"dies": lambda what, number: False}
        self.clients.append(self._client_class(*arguments, late=self._late, arrived=self._arrived, **lives))
        return self.clients[-1]


@pytest.mark.covers("reliability:late-work")
def test_late_many_rounds_in_a_row_and_nothing_is_forgotten(tmp_path: Path) -> None:
    """Fragment 1 is late in rounds 0 to 2 and fragment 2 in round 1. The late worker makes progress in round 0 only, and
    the others none, so that no mean takes anything of it: what is handed in each time, and gets through at last, must be
    two thirds of round 0's pseudo-gradient (two of three are in each mean), the same bytes, quantised once and not
    thrice."""
    c = Latecomer({(0, 1), (1, 1), (2, 1), (1, 2)}, LateClient)
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(rounds=4, members=AT_ONCE), tmp_path)
        patient = c.patient(lr=lambda diloco: 0.0)
        in_round_0_only = c.late(lr=lambda diloco: 0.0 if diloco.round else toy.LR)
        run.workers(["a", "b", "c"], a=patient, b=patient, c=in_round_0_only)
        info = run.final()
        assert {run.told(name).state_digest for name in "abc"} == {info.state_digest}
    (client,) = c.clients
    sent, headers = client.sent, client.headers
    assert sent[3, 1] == sent[2, 1] == sent[1, 1]
    first, last = (values(headers[key], sent[key]) for key in ((0, 1), (3, 1)))
    half_a_code = np.abs(first).max() / 254 * 1.01
    assert np.abs(last - first * np.float32(2 / 3)).max() <= 2 * 2 / 3 * half_a_code, "each was quantised once"
    carried = {key: header.carried for key, header in headers.items() if header.carried}
    assert carried == {(1, 1): [0], (2, 1): [0, 1], (3, 1): [0, 1, 2], (2, 2): [1]}
    nothing = sent[3, 0]
    assert sent[1, 0] == sent[2, 0] == nothing != sent[0, 0]
    assert len({tuple(map(tuple, each)) for each in (header.units for header in headers.values())}) == 4, (
        "the units went with the fragments in time"
    )


def test_late_work_that_is_too_little_for_the_codec_is_sent_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a worker's round 0 is late, and small beside its round 1, so of round 1's contribution, which names the
    units of both, ternary sends what is large. What it leaves out is no less consumed: the next contribution has it."""
    c = Latecomer({(0, p) for p in range(FRAGMENTS)}, LateClient)
    whole: dict[tuple[int, int], F32] = {}
    contribute = Exchange.contribute

    def noted(self: Exchange, contribution: Contribution, *rest: Any) -> Outcome:
        if self.membership.worker == "c":
            whole[contribution.round, contribution.fragment] = contribution.pseudo_gradient.numpy().copy()
        return contribute(self, contribution, *rest)

    monkeypatch.setattr(Exchange, "contribute", noted)
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        text = toy.spec(rounds=3, upload="ternary", download="fp32", momentum=0.0, members=AT_ONCE)
        run = Toy(coordinator, text, tmp_path)
        patient = c.patient(lr=lambda diloco: 0.0)
        little_then_much = c.late(lr=lambda diloco: [toy.LR / 10, toy.LR, 0.0][diloco.round])
        run.workers(["a", "b", "c"], a=patient, b=patient, c=little_then_much)
    (client,) = c.clients
    sent, headers = client.sent, client.headers
    for p in range(FRAGMENTS):
        assert headers[1, p].carried == [0]
        assert headers[1, p].units[:1] == headers[0, p].units
        first = values(headers[1, p], sent[1, p])
        left_out = first == 0
        assert np.abs(whole[0, p][left_out]).max() > 0, "all late work was sent at once, so nothing is proved"
        np.testing.assert_allclose(whole[2, p], whole[1, p] - first, atol=1e-6)
