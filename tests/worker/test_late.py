"""What travels on into the next contribution. Late, round after round: what was not acknowledged is carried along, whole,
whatever the codec, over crashes too. So is what a codec leaves out: nothing is lost."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from protocol.codecs import CODECS
from protocol.codecs.base import F32
from protocol.errors import Problem
from protocol.wire import ContributionHeader, Payload, pack_header
from tests.support.cases import in_the_night
from tests.support.waiting import PATIENCE_S, wait_until
from tests.worker import toy
from tests.worker.toy import Killed, MakeToy, MortalClient, Toy, coordinator_thread
from worker.diloco import DiLoCo
from worker.link.client import Client
from worker.rounds.exchange import Exchange, Outcome
from worker.state.work import Carry, Contribution, Late, Missed, first_units, units_left

Key = tuple[int, int]  # a round and a fragment

FRAGMENTS = 3
AT_ONCE = "grace_factor = 0\ngrace_min_s = 0"


class Latecomer:
    """What makes worker c late with the fragments in `late`, and a and b wait for it with all others: options for
    `Toy.worker`. All three meet after the first inner step.

    `sent` has the frames of every contribution of c, and `headers` its header.
    """

    def __init__(self, late: set[Key]) -> None:
        self._late, self._arrived, self._everybody = late, set[Key](), threading.Barrier(3)
        self.sent: dict[Key, list[bytes]] = {}
        self.headers: dict[Key, ContributionHeader] = {}

    def late(self, **options: Any) -> dict[str, Any]:
        return {"client_class": partial(AroundContributing, around=self._send_late), "on_step": self._meet, **options}

    def patient(self, **options: Any) -> dict[str, Any]:
        return {"client_class": partial(AroundContributing, around=self._wait), "on_step": self._meet, **options}

    def _meet(self, diloco: DiLoCo) -> None:
        if (diloco.round, diloco.inner_step) == (0, 1):
            self._everybody.wait(PATIENCE_S)

    @contextmanager
    def _send_late(self, client: Client, header: ContributionHeader, frames: list[Any]) -> Iterator[None]:
        """Wait until the fragment's round has closed without it, where it is to be late."""
        key = (header.round, header.fragment)
        while key in self._late:
            try:
                client.delta(*key, 1 << 20)
                break
            except Problem as problem:
                if problem.slug != "not-published":
                    raise
        self.sent[key], self.headers[key] = [bytes(frame) for frame in frames], header
        yield
        self._arrived.add(key)

    @contextmanager
    def _wait(self, client: Client, header: ContributionHeader, frames: list[Any]) -> Iterator[None]:
        """Wait until c has contributed the fragment, where it is not to be late."""
        key = (header.round, header.fragment)
        wait_until(lambda: key in self._late | self._arrived)
        yield


class AroundContributing(MortalClient):
    """Contributes within the context `around(client, header, frames)`."""

    def __init__(self, *arguments: Any, around: Callable[..., Any], **options: Any) -> None:
        super().__init__(*arguments, **{"dies": lambda what, number: False} | options)
        self._around = around

    def contribute(self, member_token, header, frames, **options):
        with self._around(self, header, frames):
            super().contribute(member_token, header, frames, **options)


def values(header: ContributionHeader, frames: list[bytes]) -> F32:
    """What a contribution says, float32[n]."""
    out = np.empty(header.elements, np.float32)
    Payload.from_bytes(pack_header(header) + b"".join(frames)).decode(out)
    return out


@pytest.mark.covers("reliability:late-work")
@pytest.mark.slow
def test_late_many_rounds_in_a_row_and_nothing_is_forgotten(toy_run: MakeToy) -> None:
    """Fragment 1 is late in rounds 0 to 2 and fragment 2 in round 1. The late worker makes progress in round 0 only, and
    the others none, so that no mean takes anything of it: what is handed in each time, and gets through at last, must be
    two thirds of round 0's pseudo-gradient (two of three are in each mean), the same bytes, quantised once and not
    thrice."""
    c = Latecomer({(0, 1), (1, 1), (2, 1), (1, 2)})
    run = toy_run(toy.spec(rounds=4, members=AT_ONCE))
    patient = c.patient(lr=lambda diloco: 0.0)
    in_round_0_only = c.late(lr=lambda diloco: 0.0 if diloco.round else toy.LR)
    run.workers(["a", "b", "c"], a=patient, b=patient, c=in_round_0_only)
    info = run.final()
    assert {run.told(name).state_digest for name in "abc"} == {info.state_digest}
    sent, headers = c.sent, c.headers
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


@pytest.mark.slow
def test_late_work_that_is_too_little_for_the_codec_is_sent_later(
    toy_run: MakeToy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a worker's round 0 is late, and small beside its round 1, so of round 1's contribution, which names the
    units of both, ternary sends what is large. What it leaves out is no less consumed: the next contribution has it."""
    c = Latecomer({(0, p) for p in range(FRAGMENTS)})
    whole: dict[Key, F32] = {}
    contribute = Exchange.contribute

    def noted(self: Exchange, contribution: Contribution, *rest: Any) -> Outcome:
        if self.membership.worker == "c":
            whole[contribution.round, contribution.fragment] = contribution.pseudo_gradient.numpy().copy()
        return contribute(self, contribution, *rest)

    monkeypatch.setattr(Exchange, "contribute", noted)
    text = toy.spec(rounds=3, upload="ternary", download="fp32", momentum=0.0, members=AT_ONCE)
    run = toy_run(text)
    patient = c.patient(lr=lambda diloco: 0.0)
    little_then_much = c.late(lr=lambda diloco: [toy.LR / 10, toy.LR, 0.0][diloco.round])
    run.workers(["a", "b", "c"], a=patient, b=patient, c=little_then_much)
    sent, headers = c.sent, c.headers
    for p in range(FRAGMENTS):
        assert headers[1, p].carried == [0]
        assert headers[1, p].units[:1] == headers[0, p].units
        first = values(headers[1, p], sent[1, p])
        left_out = first == 0
        assert np.abs(whole[0, p][left_out]).max() > 0, "all late work was sent at once, so nothing is proved"
        np.testing.assert_allclose(whole[2, p], whole[1, p] - first, atol=1e-6)


# --- by what became of the last contribution -----------------------------------------------------------------------


def contribution(delta: Tensor, *, round_number: int = 3, late: Late | None = None) -> Contribution:
    return Contribution(round_number, 0, [[0, 5], [8, 9]], 1, 6, 1.5, 1.0, delta, late)


def test_late_work_is_what_the_mean_lacks_of_it() -> None:
    late = contribution(torch.tensor([1.0, 2.0, 4.0])).missed(Missed(torch.ones(3), 0.5))
    assert (late.lacking.tolist(), late.share, late.rounds) == ([0, 1, 3], 0.5, [3])
    assert late.part.tolist() == [0, 0.5, 1.5]


def test_what_is_carried_is_told_by_fragment() -> None:
    late = Late(torch.tensor([2.0]), 0.5, [3])
    carry = Carry(units=[[0, 1]], late={0: late}).with_ahead(0, torch.tensor([10.0]))
    carry = carry.with_residual(replace(contribution(torch.tensor([5.0])), fragment=1), torch.tensor([3.0]))
    deltas = [carry.part(p) for p in range(3)]
    assert [None if each is None else each.tolist() for each in deltas] == [[11.0], [3.0], None]
    carry = carry.with_residual(contribution(torch.tensor([5.0])), None)
    assert (carry.part(0), carry.units) == (None, [[0, 1]])


def means(deltas: Tensor) -> Tensor:
    return deltas.mean(0)


@pytest.mark.parametrize("late_rounds", [1, 2])
def test_late_work_makes_up_for_the_means_that_lacked_it(late_rounds: int) -> None:
    """Two of four workers are late for some rounds, in time for none, and their work is in the mean of two at last:
    all rounds' means together are then those of two rounds of all four that had been in time, as far as they took part.

    In the last round the same two come alone: so half of what is lacking, in a mean over half of the workers.
    """
    generator = torch.Generator().manual_seed(0)
    rounds = torch.randn(late_rounds, 4, 50, dtype=torch.float64, generator=generator)
    carried: list[Late | None] = [None, None]
    for number, deltas in enumerate(rounds):
        missed = Missed(means(deltas[:2]), 0.5)
        for w in (0, 1):
            late = carried[w]
            sent = deltas[2 + w] + (late.part if late else 0)
            carried[w] = contribution(sent, round_number=number, late=late).missed(missed)
    first, second = carried
    assert first is not None
    assert second is not None
    made_up = means(torch.stack([first.part, second.part]))
    published = torch.stack([means(deltas[:2]) for deltas in rounds]).sum(0)
    assert torch.allclose(published + made_up, torch.stack([means(deltas) for deltas in rounds]).sum(0))
    assert first.rounds == list(range(late_rounds))


@pytest.mark.parametrize(
    ("fresh", "waited", "ahead"),
    [({}, 0, 0), ({0: 8, 1: 8}, 0, 8), ({0: 8, 1: 8}, 1, 8), ({0: 8, 1: 8}, 7, 2), ({0: 2, 1: 8}, 3, 0)],
)
def test_steps_while_others_were_waited_for_are_beyond_the_next_h(
    fresh: dict[int, int], waited: int, ahead: int
) -> None:
    assert Carry(fresh=fresh, waited=waited).steps_ahead == ahead


@pytest.mark.parametrize(("back_to", "kept"), [(5, True), (4, False), (2, False)])
def test_late_work_on_rounds_that_a_backup_has_undone_is_dropped(back_to: int, kept: bool) -> None:
    """The rounds are still to come for the run: no contribution to them, or to one before, may list them as carried."""
    carry = Carry(late={1: Late(torch.zeros(3), 0.5, [2, 4])})
    assert carry.is_of_rounds_before(back_to) == kept


def test_first_units() -> None:
    units = [[3, 5], [9, 10], [20, 30]]
    assert [first_units(units, count) for count in (0, 1, 2, 3, 5, 13, 99)] == [
        [],
        [[3, 4]],
        [[3, 5]],
        [[3, 5], [9, 10]],
        [[3, 5], [9, 10], [20, 22]],
        units,
        units,
    ]


def test_units_left() -> None:
    """The coordinator consumes the units of the largest contribution that it accepts; none of them is named again."""
    units = [[3, 5], [9, 10], [20, 30]]
    assert [units_left(units, consumed) for consumed in (0, 1, 2, 3, 5, 13)] == [
        units,
        [[4, 5], [9, 10], [20, 30]],
        [[9, 10], [20, 30]],
        [[20, 30]],
        [[22, 30]],
        [],
    ]


# --- what a codec leaves out ---------------------------------------------------------------------------------------


ROUNDS = 5
WITH_ERROR_FEEDBACK = [name for name, codec in CODECS.items() if codec.error_feedback]


def recorded(
    tmp_path: Path, codec: str, *, dies: tuple[str, int] | None = None, trains: int = ROUNDS
) -> tuple[dict[Key, F32], str]:
    """One worker that learns in the first `trains` rounds only and, where it dies, is started again: its decoded
    contributions, and the run's state digest."""
    sent: dict[Key, F32] = {}

    @contextmanager
    def note(client: Client, header: ContributionHeader, frames: list[Any]) -> Iterator[None]:
        sent[header.round, header.fragment] = values(header, frames)
        yield

    def learn(diloco: DiLoCo) -> float:
        return toy.LR if diloco.round < trains else 0.0

    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        text = toy.spec(rounds=ROUNDS, upload=codec, download="fp32", momentum=0.0)
        run = Toy(coordinator, text, tmp_path)
        client = partial(AroundContributing, around=note)
        if dies is not None:
            mortal = partial(client, dies=lambda what, number: (what, number) == dies)
            with pytest.raises(Killed):
                run.worker("a", client_class=mortal, state_dir=tmp_path / "a", lr=learn)
        run.worker("a", client_class=client, state_dir=tmp_path / "a", lr=learn)
        return sent, str(run.final().state_digest)


@pytest.mark.parametrize("codec", WITH_ERROR_FEEDBACK)
@pytest.mark.slow
def test_what_was_left_out_is_sent_in_the_rounds_after(tmp_path: Path, codec: str) -> None:
    """The worker learns in round 0 only. What is sent from then on adds up to that round's pseudo-gradient."""
    whole, _ = recorded(tmp_path / "fp32", "fp32", trains=1)
    sent, _ = recorded(tmp_path / codec, codec, trains=1)
    for p in range(3):
        delta = whole[0, p]
        missing = [float(np.linalg.norm(delta - sum(sent[r, p] for r in range(upto + 1)))) for upto in range(ROUNDS)]
        assert missing[0] > 0.2 * float(np.linalg.norm(delta)), "the codec left out nothing, so nothing is proved"
        assert missing[-1] < (0.95 if codec == "sparse" else 0.25) * missing[0]
        assert missing == sorted(missing, reverse=True)


@pytest.fixture(scope="module", params=["ternary", "sparse"])
def undisturbed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[Key, np.ndarray], str]:
    """Codec, what was sent, and the run's state digest."""
    return request.param, *recorded(tmp_path_factory.mktemp("undisturbed"), request.param)


@pytest.mark.system
@pytest.mark.parametrize(
    "point", ["before upload", *map(in_the_night, ["after upload", "before download", "after download"])]
)
@pytest.mark.slow
def test_what_was_left_out_survives_a_crash(
    tmp_path: Path, undisturbed: tuple[str, dict[Key, np.ndarray], str], point: str
) -> None:
    codec, expected, expected_digest = undisturbed
    sent, digest = recorded(tmp_path, codec, dies=(point, 2))
    assert digest == expected_digest
    assert sent.keys() == expected.keys()
    for key, values in sent.items():
        assert values.tobytes() == expected[key].tobytes()
