"""The frontier's loop on a GPU, where its steps are captured as a graph."""

import pytest
import torch

from benchmarks.convergence.rows import Row
from benchmarks.frontier.training import Outer, Training
from protocol.spec.run import parse_spec


@pytest.mark.parametrize("synchronous", [True, False])
def test_captured_steps_train_as_on_a_cpu(cuda: torch.device, synchronous: bool) -> None:
    spec = parse_spec(Row(keys={"inner.optimizer": "muon"}).spec(50, 0))
    losses = []
    for device in (torch.device("cpu"), cuda):
        training = Training(spec, 1 if synchronous else 3, device)
        for _ in range(3):
            if synchronous:
                training.train_synchronously(10, 3)
            else:
                training.round(10, "int8", "int8", Outer(1.0, 0.8))
        losses.append(training.loss(tokens=8192))
    on_cpu, on_gpu = losses
    assert on_cpu < 4.5  # from 5.7
    assert on_gpu == pytest.approx(on_cpu, rel=2e-3)
