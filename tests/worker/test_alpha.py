"""`sync.alpha` against Streaming DiLoCo's own rule (arXiv 2501.18512, algorithm 2; torchft's `fragment_update_alpha`), written
out in float64: a fragment's local parameters become alpha · local + (1 − alpha) · global."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from protocol.spec.run import RunSpec, parse_spec
from tests.worker import toy
from tests.worker.toy import Toy, coordinator_thread
from worker.rounds.schedule import schedule

pytestmark = pytest.mark.slow

ROUNDS, STEPS, FRAGMENTS = 4, 6, 3
START = torch.linspace(-1, 1, FRAGMENTS * 256)
# The mean of the parameters after each step, by round, of a worker that nobody disturbs: 5 % of the way to 3 each.
ALONE = [
    [pytest.approx(3 - 3 * 0.95 ** (STEPS * r + step), abs=1e-4) for step in range(1, STEPS + 1)] for r in range(3)
]


class Bowl(nn.Module):
    """The loss is half the squared distance to `bottom`: the gradient is the distance."""

    def __init__(self, bottom: float) -> None:
        super().__init__()
        self.values = nn.Parameter(START.clone())
        self.bottom = bottom

    def forward(self) -> Tensor:
        return 0.5 * (self.values - self.bottom).square().sum()


def spec(sync: str, upload: str = "fp32") -> str:
    return toy.spec(rounds=ROUNDS, steps=STEPS, upload=upload, download="fp32", sync=sync).replace(
        "[outer]", "[outer]\nlearning_rate = 0.6"
    )


def expected(run: RunSpec) -> tuple[Tensor, list[list[float]]]:
    """θ_global of the end, and the mean of the local parameters after each inner step, by round."""
    local, theta = START.double().clone(), START.double().clone()
    momentum, alpha = torch.zeros_like(theta), float(run.sync.alpha)
    pieces = [slice(256 * p, 256 * p + 256) for p in range(FRAGMENTS)]
    deltas: dict[int, Tensor] = {}
    path: list[list[float]] = []
    for round_ in range(ROUNDS):
        due = schedule(run.sync, FRAGMENTS, STEPS, last=round_ + 1 == ROUNDS, first=round_ == 0)
        path.append([])
        for step in range(STEPS + 1):
            if step:
                local -= 0.05 * (local - 3.0)
            for p, piece in enumerate(pieces):
                if due.sent[p] == step:
                    deltas[p] = theta[piece] - local[piece]
            for p, piece in enumerate(pieces):
                if due.merged[p] == step:
                    momentum[piece] = run.outer.momentum * momentum[piece] + deltas[p]
                    theta[piece] -= run.outer.learning_rate * (run.outer.momentum * momentum[piece] + deltas.pop(p))
                    local[piece] = alpha * local[piece] + (1 - alpha) * theta[piece]
            path[-1].append(float(local.mean()))
    return theta, path


def trained(tmp_path: Path, text: str) -> tuple[Sequence[Tensor], list[list[float]]]:
    model = Bowl(3.0)
    path: list[list[float]] = [[] for _ in range(ROUNDS)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, text, tmp_path)
        with run.connect(model, optimizer) as diloco:
            for unit in diloco.units():
                model().backward()
                optimizer.step()
                optimizer.zero_grad()
                path[unit // STEPS].append(float(model.values.detach().mean()))
        assert run.final().state_digest == run.told("a").state_digest
    return diloco.joined.state.theta, path


@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("sync", ["", 'offsets = "spread"', "overlap = 2", 'overlap = "eager"'])
def test_it_is_the_papers_rule(tmp_path: Path, sync: str, alpha: float) -> None:
    """Without an overlap it was refused, though there are local parameters to mix then as well; and 1 was."""
    text = spec(f"{sync}\nalpha = {alpha}")
    theta, path = trained(tmp_path, text)
    expected_theta, expected_path = expected(parse_spec(text))
    torch.testing.assert_close(torch.cat(list(theta)).double(), expected_theta, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(path[:-1], expected_path[:-1], strict=True):
        assert ours == pytest.approx(theirs[1:], abs=1e-5)


def test_alpha_1_keeps_the_workers_own_parameters(tmp_path: Path) -> None:
    """Each step goes on from where the last one ended, whatever the mean is."""
    _, path = trained(tmp_path, spec("alpha = 1.0"))
    assert path[:-1] == ALONE


def test_what_the_codec_left_out_counts_once(tmp_path: Path) -> None:
    """It is carried, and it is in the local parameters too: with alpha = 1 they stay all the same."""
    _, path = trained(tmp_path, spec("alpha = 1.0", upload="ternary"))
    assert path[:-1] == ALONE
