"""Training that goes on while fragments travel, against the real coordinator: nothing waits, nothing is lost, nothing
counts twice, and all replicas are identical."""

import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from protocol.errors import CodecError
from protocol.messages import EpochInfo
from protocol.spec.run import parse_spec
from tests.support.waiting import PATIENCE_S
from tests.worker import toy
from tests.worker.toy import Toy, coordinator_thread
from worker.diloco import DiLoCo
from worker.link.client import Client, open_http
from worker.rounds.schedule import schedule

pytestmark = pytest.mark.slow

STEPS = 6
FRAGMENTS = 3
ROUNDS = 4
SCHEDULES = {
    "eager": 'overlap = "eager"',
    "together": "overlap = 2",
    "spread": 'offsets = "spread"\noverlap = 2',
    "longer than the offsets": 'offsets = "spread"\noverlap = 4',
    "spread, no overlap": 'offsets = "spread"',
    "mixed, no overlap": "alpha = 0.5",
    "no wait": 'wait = "never"',
}
EVERY = pytest.mark.parametrize("sync", SCHEDULES.values(), ids=SCHEDULES.keys())


@pytest.fixture(autouse=True)
def one_thread(one_h: None) -> None:
    torch.set_num_threads(1)


def spec(sync: str, **options: Any) -> str:
    return toy.spec(rounds=options.pop("rounds", ROUNDS), steps=STEPS, sync=sync, **options)


def epoch(run: Toy) -> EpochInfo:
    with run.coordinator.client() as http:
        (item,) = http.get("/v1/runs/toy/units").json()["items"]
    return EpochInfo.model_validate(item)


@pytest.mark.parametrize(
    ("sync", "upload"),
    [(each, "int8") for each in SCHEDULES.values()] + [(SCHEDULES[name], "ternary") for name in ("eager", "spread")],
)
def test_replicas_are_identical_and_every_unit_is_in_the_model(tmp_path: Path, sync: str, upload: str) -> None:
    steps = Counter[str]()
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, spec(sync, min_workers=3, upload=upload), tmp_path)
        done = run.workers(
            ["a", "b", "c"], **{name: {"on_step": lambda diloco: steps.update([diloco.name])} for name in "abc"}
        )
        info = run.final()
        assert info.state_digest is not None
        assert [run.told(name).state_digest for name in "abc"] == [info.state_digest] * 3
        assert (epoch(run).consumed, epoch(run).assigned) == (steps.total(), {})
        assert info.tokens == steps.total() * done["a"].spec.unit_tokens
        if "never" in sync:  # these steps take no time
            assert 3 * ROUNDS * STEPS < steps.total() <= 3 * (4 * (ROUNDS - 1) + 1) * STEPS
        else:
            assert steps == dict.fromkeys("abc", ROUNDS * STEPS)
        assert info.divergences == 0
        assert sum(run.told(name).tokens for name in "abc") == info.tokens


class Reversed(Client):
    """A delta comes no sooner than when it is merged: whoever waits for it before that waits for ever."""

    def __init__(self, *arguments: Any, due: "Due", **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._due = due

    def delta(self, round_number, p, limit_bytes, member_token=None, **options):
        self._due.wait(round_number, p)
        return super().delta(round_number, p, limit_bytes, member_token, **options)


class Due:
    """Lets the delta of a fragment come once the worker has begun the inner step after which it is merged."""

    def __init__(self, text: str) -> None:
        self._spec = parse_spec(text)
        self._changed = threading.Condition()
        self._at = (0, 0)

    def begun(self, round_number: int, step: int) -> None:
        with self._changed:
            self._at = (round_number, step)
            self._changed.notify_all()

    def wait(self, round_number: int, p: int) -> None:
        sync = self._spec.sync
        last, first = round_number + 1 == sync.rounds, round_number == 0
        # Steps that were trained while deltas travelled are part of the last round's H; one step is left in any case.
        steps = 1 if last and sync.wait == "never" else STEPS
        merged = min(schedule(sync, FRAGMENTS, steps, last=last, first=first).merged[p], sync.most_steps_of(STEPS))
        with self._changed:
            came = self._changed.wait_for(lambda: self._at >= (round_number, merged), PATIENCE_S)
        assert came, f"round {round_number}, fragment {p}: the training waits for a delta before step {merged}"


@pytest.mark.covers("reliability:overlap")
@EVERY
def test_the_training_goes_on_until_the_delta_is_needed(tmp_path: Path, sync: str) -> None:
    text = spec(sync)
    due = Due(text)
    due.begun(0, 1)
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, text, tmp_path)
        # Called when a step is done, and so the next one begins.
        begun = lambda diloco: due.begun(diloco.round, diloco.inner_step + 1)  # noqa: E731
        run.worker("a", client_class=partial(Reversed, due=due), on_step=begun)
        assert run.final().state_digest == run.told("a").state_digest


@pytest.mark.covers("reliability:overlap")
@pytest.mark.parametrize(
    ("sync", "steps"),
    [
        *((SCHEDULES[name], STEPS) for name in ("eager", "together", "spread", "longer than the offsets")),
        # In the first round two fragments are sent after step 1, and only one of them is merged at once (seed 60007).
        ('offsets = "spread"\noverlap = 1', 3),
    ],
)
def test_alone_and_with_a_plain_outer_step_it_is_plain_training(tmp_path: Path, sync: str, steps: int) -> None:
    """One worker, fp32, outer learning rate 1 and no momentum: the mean is its own work, so nothing may be lost of what
    was trained while it travelled, and nothing may count twice."""
    text = toy.spec(rounds=ROUNDS, steps=steps, sync=sync, upload="fp32", download="fp32", momentum=0.0)
    text = text.replace("[outer]", "[outer]\nlearning_rate = 1.0")
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        done = Toy(coordinator, text, tmp_path).worker("a")
    model = toy.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for unit in range(ROUNDS * steps):
        x, y = toy.batch(unit)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, plain in zip(done.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


class Ones(nn.Module):
    """Plain gradient descent with learning rate 1 adds 1 to every value in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(FRAGMENTS * 256))

    def forward(self) -> torch.Tensor:
        return -self.values.sum()


@pytest.mark.parametrize(("alpha", "kept"), [('"carry"', 1.0), ("0.5", 0.5), ("0", 0.0)])
def test_alpha_says_what_becomes_of_the_progress_meanwhile(tmp_path: Path, alpha: str, kept: float) -> None:
    """4 of 6 steps are in the mean of a worker alone, which is its new global parameters; 2 came while that travelled."""
    text = spec(f"overlap = 2\nalpha = {alpha}", rounds=2, upload="fp32", download="fp32", momentum=0.0)
    text = text.replace("[outer]", "[outer]\nlearning_rate = 1.0")
    model, merged = Ones(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, text, tmp_path)
        with run.connect(model, optimizer) as diloco:
            for _ in diloco.units():
                model().backward()
                optimizer.step()
                optimizer.zero_grad()
                if (diloco.round, diloco.inner_step) == (1, 0):
                    merged = model.values.tolist()
    assert merged == pytest.approx([4 + 2 * kept] * len(merged), abs=1e-4)
    assert len(merged) == FRAGMENTS * 256


class Forgetful(Client):
    """An earlier process of this worker, whose disk is gone, has contributed to fragment 0: of fewer units."""

    def contribute(self, member_token, header, frames, **options):
        if (header.round, header.fragment) == (0, 0):
            (start, _), *_ = header.units
            fewer = {"units": [[start, start + 1]], "tokens": header.tokens // 4}
            super().contribute(member_token, header.model_copy(update=fewer), frames)
        super().contribute(member_token, header, frames, **options)


def test_what_an_earlier_process_contributed_stands_and_nothing_beside_it_is_carried(tmp_path: Path) -> None:
    """Found beside simulation seed 50756: the new process took the other's contribution for its own, so whatever it had
    trained since its own was sent went into the next one, though the other one may have had it."""
    text = spec("overlap = 2", rounds=2, upload="fp32", download="fp32", momentum=0.0)
    text = text.replace("[outer]", "[outer]\nlearning_rate = 1.0")
    model, merged = Ones(), torch.empty(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with coordinator_thread(tmp_path / "coordinator") as coordinator, open_http(coordinator.url) as http:
        run = Toy(coordinator, text, tmp_path)
        client = Forgetful(http, "toy", run.token)
        with DiLoCo(model, optimizer, client=client, run=client.run_detail(), name="a") as diloco:
            for _ in diloco.units():
                model().backward()
                optimizer.step()
                optimizer.zero_grad()
                if (diloco.round, diloco.inner_step) == (1, 0):
                    merged = model.values.detach().clone()
    assert merged.tolist() == pytest.approx([4.0] * 768), "what is in the mean, and not the 2 steps since then"


@pytest.mark.parametrize("sync", [SCHEDULES["eager"], SCHEDULES["spread"]], ids=["eager", "spread"])
def test_training_that_diverged_is_not_sent(tmp_path: Path, sync: str) -> None:
    def spoil(diloco: DiLoCo) -> None:
        if (diloco.round, diloco.inner_step) == (1, 1):  # and so the second step's parameters
            next(iter(diloco.model.parameters())).register_hook(lambda gradient: gradient * float("nan"))

    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, spec(sync), tmp_path)
        with pytest.raises(CodecError, match="the training has diverged"):
            run.worker("a", on_step=spoil)
        assert run.told("a").state == "left"
        assert run.info().round <= 2, "nobody else could have brought what round 2 waits for"
