"""The parts of the training loop that are plain functions."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import get_cosine_schedule_with_warmup

from protocol.spec import RunSpec, parse_spec
from worker.data.text import TextData
from worker.inner.evaluation import evaluate
from worker.inner.loss import mean_loss
from worker.inner.schedules import learning_rate
from worker.train import round_seed

CPU = torch.device("cpu")


def spec(source: str = "x") -> RunSpec:
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
final_fraction = 0.1
[sync]
rounds = 11
inner_steps = 10
""")


def test_learning_rate_is_keyed_to_global_steps() -> None:
    rates = [learning_rate(spec(), step) for step in range(111)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == 2.0
    assert rates[60] == pytest.approx(2.0 * 0.55)
    assert rates[110] == pytest.approx(0.2)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate(spec(), 500) == pytest.approx(0.2)


def test_the_warmup_is_one_step_ahead_of_transformers() -> None:
    """docs/settings.md says so: (s + 1) / W of the peak, where transformers' schedules have s / W."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=2.0)
    theirs = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=100)
    (share,) = theirs.lr_lambdas
    assert share(0) == 0
    for step in range(10):
        assert (
            learning_rate(spec(), step) == pytest.approx(2.0 * share(step + 1)) == pytest.approx(2.0 * (step + 1) / 10)
        )


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
    (tmp_path / "one.txt").write_bytes(bytes(1000))
    data, model = TextData(spec(str(tmp_path))), Uniform()
    report = evaluate(model, data, 65, CPU)
    assert report.tokens == 60
    assert report.loss == pytest.approx(math.log(256))
    assert report.bytes == 60, "a token is a byte"
    assert model.modes == [False, False]
    assert model.training
