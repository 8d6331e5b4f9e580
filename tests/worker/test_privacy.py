"""[privacy] on a worker: what it sends is at most as long as the clipping norm, has its own noise, and is counted."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protocol.codecs.base import F32
from protocol.spec.sections import PrivacySpec
from protocol.wire import ContributionHeader, Payload, pack_header
from tests.worker import toy
from tests.worker.toy import Killed, MortalClient, Toy, coordinator_thread
from worker.privacy.noise import KEY_BYTES, with_noise
from worker.privacy.release import PrivateRelease, Spent
from worker.ranks import ALONE
from worker.state.state_dir import StateDir
from worker.state.work import Contribution, Late, Missed

KEY = bytes(range(KEY_BYTES))
ELEMENTS, FRAGMENTS, ROUNDS, CLIP = 704, 3, 3, 0.05


def private(clip: float = CLIP, noise: float = 0.0) -> str:
    return f"[privacy]\nclip_norm = {clip}\nnoise_multiplier = {noise}\n"


# --- noise --------------------------------------------------------------------------------------------------------


def test_noise_is_normal_and_independent_of_the_values() -> None:
    n = 400_001
    noise = (with_noise(torch.full((n,), 3.0), 2.0, KEY).double() - 3.0) / 2.0
    assert abs(float(noise.mean())) < 4 / math.sqrt(n)
    assert float(noise.square().mean()) == pytest.approx(1.0, abs=4 * math.sqrt(2 / n))
    assert float(noise.pow(4).mean()) == pytest.approx(3.0, abs=4 * math.sqrt(96 / n))
    below = torch.tensor([-3.0, -1.0, 0.5, 2.0, 4.0], dtype=torch.float64)
    expected = torch.special.ndtr(below)
    found = (noise[:, None] < below).double().mean(dim=0)
    assert torch.all((found - expected).abs() <= 4 * (expected * (1 - expected) / n).sqrt() + 1e-9)


def test_no_part_of_a_noise_is_another_part_and_no_two_keys_have_the_same() -> None:
    zeros, other = torch.zeros(300_000), bytes([1, *KEY[1:]])
    noise = with_noise(zeros, 1.0, KEY)
    assert len(noise.unique()) > 0.95 * len(noise), "fp32 has few enough values that some come twice"
    assert abs(float(torch.corrcoef(torch.stack([noise[: 1 << 17], noise[1 << 17 : 1 << 18]]))[0, 1])) < 0.01
    assert abs(float(torch.corrcoef(torch.stack([noise, with_noise(zeros, 1.0, other)]))[0, 1])) < 0.01
    assert torch.equal(noise, with_noise(zeros, 1.0, KEY))


def test_nothing_leaves_without_a_key() -> None:
    with pytest.raises(ValueError, match="32 bytes, not 0"):
        with_noise(torch.zeros(3), 1.0, b"")


# --- clipping -----------------------------------------------------------------------------------------------------


def made(p: int, *values: float, late: Late | None = None) -> Contribution:
    delta = torch.tensor(values)
    return Contribution(0, p, [[0, 4]], 4, 4, 2.5, float(delta.norm()), delta, late)


class TwoProcesses:
    """Two ranks, of which the other one contributes `theirs`."""

    def __init__(self, *theirs: float) -> None:
        self._theirs = list(theirs)

    def all(self, own: float) -> list[float]:
        return [own, self._theirs.pop(0)]


def protection(elements: list[int], *, noise: float = 0.0, ranks: Any = None) -> PrivateRelease:
    spec = PrivacySpec(clip_norm=10.0, noise_multiplier=noise)
    spent, draw = Spent(None, "run", sum(elements)), partial(bytes.ljust, b"key")
    return PrivateRelease(spec, elements, spent, ranks or ALONE, draw)


def test_what_is_sent_together_is_clipped_together() -> None:
    protect = protection([2, 1])
    short = protect.together([made(0, 3.0, 4.0), made(1, 5.0)], [0, 1])
    assert [each.delta.tolist() for each in short] == [[3.0, 4.0], [5.0]]
    long = protect.together([made(0, 30.0, 40.0), made(1, 0.0)], [0, 1])
    assert [each.delta.tolist() for each in long] == [pytest.approx([6.0, 8.0], rel=2e-6), [0.0]]
    assert long[0].delta.double().norm() <= 10.0
    assert {each.clipped for each in short} == {1.0}
    assert [each.clipped for each in long] == [pytest.approx(0.2, rel=2e-6)] * 2
    assert long[0].unclipped.tolist() == pytest.approx([30.0, 40.0])
    assert {each.loss for each in short + long} == {None}
    assert protect.contributions == 2


def test_a_fragment_that_is_sent_alone_has_its_share_of_the_norm() -> None:
    protect = protection([3, 1])
    protect.count([0])
    first, second = protect.alone(made(0, 60.0, 0.0, 80.0)), protect.alone(made(1, -7.0))
    assert float(first.delta.norm()) == pytest.approx(10 * math.sqrt(3 / 4), rel=2e-6)
    assert float(second.delta.norm()) == pytest.approx(10 * math.sqrt(1 / 4), rel=2e-6)
    assert math.hypot(first.norm, second.norm) <= 10.0
    assert protect.contributions == 3 / 4


def test_of_several_processes_all_count_in_the_norm() -> None:
    protect = protection([1, 1], ranks=TwoProcesses(0.0, 30.0**2))
    (only,) = protect.together([made(0, 40.0)], [0, 1])
    assert only.delta.tolist() == pytest.approx([8.0], rel=2e-6)


def test_what_one_process_has_counted_counts_in_all() -> None:
    protect = protection([1, 1], ranks=TwoProcesses(7.0, 0.0))
    protect.count([0, 1])
    assert protect.contributions == 8.0


def test_the_key_of_the_noise_is_drawn_where_there_is_noise_and_shown_nowhere() -> None:
    (silent,) = protection([1]).together([made(0, 1.0)], [0])
    (noisy,) = protection([1], noise=1.0).together([made(0, 1.0)], [0])
    assert (silent.noise_key, noisy.noise_key) == ("", b"key".ljust(KEY_BYTES).hex())
    assert "key" not in repr(noisy)


def test_late_work_is_what_was_clipped_of_it() -> None:
    """If half of the pseudo-gradient was kept, half of the carried late work is subtracted again."""
    before = Late(torch.tensor([4.0]), 0.5, [0])
    clipped = replace(made(0, 3.0, late=before), clipped=0.5)  # of 4 that were trained, and 2 that were carried
    assert clipped.missed(Missed(torch.tensor([1.0]), 0.5)).lacking.tolist() == [2.0 + 4.0 - 1.0]


# --- the count ----------------------------------------------------------------------------------------------------


def test_the_count_is_durable_and_of_each_run(tmp_path: Path) -> None:
    with StateDir(tmp_path / "state") as files:
        Spent(files, "one", 4).add(6)
        Spent(files, "two", 4).add(4)
        assert [Spent(files, name, 4).contributions for name in ("one", "two", "three")] == [1.5, 1.0, 0.0]
        assert (files.path / "privacy.json").stat().st_mode & 0o777 == 0o600
        (files.path / "privacy.json").write_text('{"one": {"left": "6", "elements": 4}}')
        with pytest.raises(ValueError, match="privacy.json is damaged"):
            Spent(files, "one", 4)


# --- a run --------------------------------------------------------------------------------------------------------


class Recorder(MortalClient):
    """`sent` records each contribution every time it is sent; `headers` has the last headers."""

    def __init__(self, *arguments: Any, sent: dict[tuple[int, int], list[F32]], **options: Any) -> None:
        super().__init__(*arguments, **{"dies": lambda what, number: False} | options)
        self._sent = sent
        self.headers: dict[tuple[int, int], ContributionHeader] = {}

    def contribute(self, member_token, header, frames, **options):
        values = np.empty(header.elements, np.float32)
        Payload.from_bytes(b"".join([pack_header(header), *frames])).decode(values)
        self._sent.setdefault((header.round, header.fragment), []).append(values)
        assert header.loss is None
        assert header.norm == pytest.approx(float(np.linalg.norm(values)), rel=0.02)
        super().contribute(member_token, header, frames, **options)


class SendsOne(Recorder):
    """Dies in round 1 once the first fragment is uploading."""

    def contribute(self, member_token, header, frames, **options):
        if header.round == 1 and header.fragment > 0:
            self.die()
        super().contribute(member_token, header, frames, **options)


def norms(sent: dict[tuple[int, int], list[F32]]) -> list[list[float]]:
    """The norm of each fragment, by round."""
    return [[float(np.linalg.norm(sent[r, p][0])) for p in range(FRAGMENTS)] for r in range(ROUNDS)]


@pytest.mark.parametrize(
    "sync", ["", "overlap = 2", 'overlap = "eager"', 'offsets = "spread"\noverlap = 1', "alpha = 0.5"]
)
def test_a_round_is_never_longer_than_the_clipping_norm(tmp_path: Path, sync: str) -> None:
    sent: dict[tuple[int, int], list[F32]] = {}
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(rounds=ROUNDS, upload="fp32", sync=sync) + private(), tmp_path)
        done = run.worker("a", client_class=partial(Recorder, sent=sent), state_dir=tmp_path / "a")
        told = run.told("a")
        assert run.final().state_digest == told.state_digest
    elements = [each.numel() for each in done.joined.state.theta]
    for number, of_fragments in enumerate(norms(sent)):
        assert math.hypot(*of_fragments) <= CLIP
        together = sync in ("", "alpha = 0.5") or number == ROUNDS - 1
        if together:
            assert math.hypot(*of_fragments) == pytest.approx(CLIP, rel=1e-5)
        else:
            bounds = [CLIP * math.sqrt(n / ELEMENTS) for n in elements]
            assert all(norm <= bound for norm, bound in zip(of_fragments, bounds, strict=True))
    assert told.metrics.loss is None
    assert told.metrics.private_contributions == ROUNDS


def test_three_workers_with_noise_are_believed_by_the_coordinator(tmp_path: Path) -> None:
    """Their noise is longer than the model, and in independent directions: nobody is left out or shortened."""
    sent: dict[str, dict[tuple[int, int], list[F32]]] = {name: {} for name in "abc"}
    text = toy.spec(rounds=ROUNDS, min_workers=3, aggregation="screened") + private(clip=1.0, noise=4.0)
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, text, tmp_path)
        run.workers(list("abc"), **{name: {"client_class": partial(Recorder, sent=sent[name])} for name in sent})
        final = run.final()
        with coordinator.client() as http:
            events = http.get("/v1/runs/toy/events").json()["items"]
            rounds = [http.get(f"/v1/runs/toy/rounds/{number}").json() for number in range(ROUNDS)]
        told = [run.told(name) for name in "abc"]
    assert [each.state_digest for each in told] == [final.state_digest] * 3
    assert [each.metrics.private_contributions for each in told] == [ROUNDS] * 3
    assert {each["kind"] for each in events}.isdisjoint({"screened", "equal", "guard"})
    verdicts = [each["factor"] for shown in rounds for of in shown["fragments"] for each in of["verdicts"].values()]
    assert verdicts == [1.0] * (3 * FRAGMENTS * ROUNDS), rounds
    assert {shown["loss"] for shown in rounds} == {None}
    for mine in sent.values():
        for of_fragments in norms(mine):
            assert math.hypot(*of_fragments) == pytest.approx(4 * math.sqrt(ELEMENTS), rel=0.15)


@pytest.mark.parametrize("moment", ["before upload", "after upload", "before download"])
def test_a_killed_worker_sends_the_same_noise_again(tmp_path: Path, moment: str) -> None:
    """Two kinds of noise on the same values would reveal more than one, and count twice."""
    sent: dict[tuple[int, int], list[F32]] = {}
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(rounds=ROUNDS, upload="fp32") + private(noise=1.0), tmp_path)
        client = partial(Recorder, sent=sent)
        dies = partial(client, dies=lambda what, number: (what, number) == (moment, 1))
        with pytest.raises(Killed):
            run.worker("a", client_class=dies, state_dir=tmp_path / "a")
        run.worker("a", client_class=client, state_dir=tmp_path / "a")
        assert run.told("a").metrics.private_contributions == ROUNDS
    for values in sent.values():
        assert all(np.array_equal(values[0], again) for again in values[1:])
    twice = [key for key, values in sent.items() if len(values) > 1]
    assert {number for number, _ in twice} == {1}
    (count,) = json.loads((tmp_path / "a" / "privacy.json").read_text()).values()
    assert count == {"left": ROUNDS * ELEMENTS, "elements": ELEMENTS}


def test_what_is_trained_again_beside_the_training_counts_again(tmp_path: Path) -> None:
    """Fragments sent one by one are in no snapshot: a killed worker makes them again, with other noise."""
    sent: dict[tuple[int, int], list[F32]] = {}
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        text = toy.spec(rounds=ROUNDS, upload="fp32", sync="overlap = 2") + private(noise=1.0)
        run, client = Toy(coordinator, text, tmp_path), partial(Recorder, sent=sent)
        with pytest.raises(Killed):
            run.worker("a", client_class=partial(SendsOne, sent=sent), state_dir=tmp_path / "a")
        run.worker("a", client_class=client, state_dir=tmp_path / "a")
        contributions = run.told("a").metrics.private_contributions
    again = [values for (number, _), values in sent.items() if number == 1 and len(values) > 1]
    ((first, second),) = again
    assert not np.array_equal(first, second)
    assert contributions == ROUNDS + 1
