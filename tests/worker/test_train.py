"""The parts of the training loop that are plain functions."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import get_cosine_schedule_with_warmup

from protocol.spec.run import RunSpec, parse_spec
from worker.data.open_training_set import TextData
from worker.inner.evaluation import evaluate
from worker.inner.loss import mean_loss
from worker.inner.schedules import SCHEDULES, Schedule, learning_rate
from worker.rounds.training import round_seed

CPU = torch.device("cpu")


def spec(source: str = "x", inner: str = "final_fraction = 0.1") -> RunSpec:
    return parse_spec(f"""
name = "r"
[model]
preset = "tiny"
[data]
source = {source!r}
sequence_length = 10
holdout = 0.5
[inner]
batch_size = 4
learning_rate = 2.0
warmup_steps = 10
{inner}
[sync]
wait = "always"
rounds = 11
inner_steps = 10
""")


def rate(step: int, inner: str = "final_fraction = 0.1") -> float:
    return learning_rate(spec(inner=inner), step, peak=2.0)


def test_learning_rate_is_keyed_to_global_steps() -> None:
    rates = [rate(step) for step in range(111)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == 2.0
    assert rates[60] == pytest.approx(2.0 * 0.55)
    assert rates[110] == pytest.approx(0.2)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rate(500) == pytest.approx(0.2)


def test_the_cosine_s_bits_are_those_that_runs_have_had() -> None:
    for step in range(10, 111):
        cosine = (1 + math.cos(math.pi * (step - 10) / 100)) / 2
        assert rate(step) == 2.0 * (0.1 + (1 - 0.1) * cosine)


def test_the_warmup_is_one_step_ahead_of_transformers() -> None:
    """docs/settings.md says so: (s + 1) / W of the peak, where transformers' schedules have s / W."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=2.0)
    theirs = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=100)
    (share,) = theirs.lr_lambdas
    assert share(0) == 0
    for step in range(10):
        assert rate(step) == pytest.approx(2.0 * share(step + 1)) == pytest.approx(2.0 * (step + 1) / 10)


@pytest.mark.parametrize(
    ("inner", "seen"),  # at steps 9, 10, 60, 85, 99 and 110 of 110, 10 of them warmup
    [
        ('schedule = "linear"\nfinal_fraction = 0.0', [2, 2, 1, 0.5, 0.22, 0]),
        ('schedule = "linear"\nfinal_fraction = 0.5', [2, 2, 1.5, 1.25, 1.11, 1]),
        ('schedule = "constant"', [2, 2, 2, 2, 2, 2]),
        ('schedule = "wsd"\nfinal_fraction = 0.0', [2, 2, 2, 2, 1, 0]),  # the last 22 steps
        ('schedule = "wsd"\ndecay_fraction = 0.5\nfinal_fraction = 0.0', [2, 2, 100 / 55, 50 / 55, 22 / 55, 0]),
        (
            'schedule = "wsd"\ndecay_fraction = 1.0\nfinal_fraction = 0.0',
            [2, 2, 1, 0.5, 0.22, 0],
        ),  # no more than is left
    ],
)
def test_the_other_schedules(inner: str, seen: list[float]) -> None:
    assert [rate(step, inner) for step in (9, 10, 60, 85, 99, 110)] == pytest.approx(seen)
    assert rate(5, inner) == 2.0 * 6 / 10
    assert rate(500, inner) == rate(110, inner)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_warmup_that_is_the_whole_run(name: str) -> None:
    all_warmup = spec(inner=f'schedule = "{name}"').model_copy(
        update={"inner": spec().inner.model_copy(update={"warmup_steps": 110})}
    )
    assert [learning_rate(all_warmup, step, 1.0) for step in (0, 109)] == pytest.approx([1 / 110, 1])
    assert learning_rate(all_warmup, 110, 1.0) <= 1.0


def test_every_group_has_its_own_peak() -> None:
    """Also after a snapshot was loaded, which has the rates of the step that it is of."""
    slow, fast, other = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    two = torch.optim.SGD([{"params": [slow], "lr": 0.25}, {"params": [fast], "lr": 8.0}])
    one = torch.optim.AdamW([other], lr=2.0)
    schedule = Schedule(spec(), [two, one])
    saved = two.state_dict()
    for group in saved["param_groups"]:
        group["lr"] = 1e-9
    two.load_state_dict(saved)
    schedule.set(60)
    rates = [group["lr"] for optimizer in (two, one) for group in optimizer.param_groups]
    assert rates == pytest.approx([0.25 * 0.55, 8.0 * 0.55, 2.0 * 0.55])
    schedule.set(4, scale=0.5)
    assert [group["lr"] for group in two.param_groups] == pytest.approx([0.25 / 4, 2.0])


def test_round_seeds_differ() -> None:
    seeds = {round_seed(seed, worker, number) for seed in (0, 1) for worker in ("a", "b") for number in range(3)}
    assert len(seeds) == 12
    assert all(0 <= seed < 1 << 63 for seed in seeds)


class Uniform(nn.Module):
    """Gives every byte the same probability, and remembers in which mode it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[bool] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.modes.append(self.training)
        return torch.zeros(*tokens.shape, 256)


def test_loss_is_nats_per_token() -> None:
    assert float(mean_loss(Uniform(), torch.zeros(3, 11, dtype=torch.int64))) == pytest.approx(math.log(256))


def test_evaluation(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_bytes(b"x" * 1000)
    data, model = TextData(spec(str(tmp_path))), Uniform()
    report = evaluate(model, data, 65, CPU)
    assert report.tokens == 60
    assert report.loss == pytest.approx(math.log(256))
    assert report.bytes == 60, "a token is a byte"
    assert model.modes == [False, False]
    assert model.training
