"""fp16 on a GPU, or the CPU where there is none: a worker that is killed goes on with the scale that it had."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from harness.coordinator import coordinator_thread
from protocol.spec.sections import InnerSpec
from tests.worker import toy
from tests.worker.toy import Killed, MortalClient, Toy
from worker.diloco import DiLoCo
from worker.inner.micro_batch import MicroBatches
from worker.inner.step import InnerStep
from worker.link.client import open_http

pytestmark = pytest.mark.slow

# Too large at first, and it doubles after three steps: so that steps are skipped in every round.
SCALE, GROWS_AFTER, LOSS_TIMES = 2.0**122, 3, 64


class Regression:
    """The toy's loss, of rows that are its x and y."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def targets(self, rows: Tensor) -> int:
        return len(rows)

    def __call__(self, rows: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.model(rows[:, :-1]), rows[:, -1:]) * LOSS_TIMES


def work(run: Toy, state_dir: Path, device: torch.device, dies_at: int | None = None) -> list[int]:
    """As `outerstep worker` does it, but killed after so many units; the units whose step was skipped."""
    model, skipped = toy.make_model().to(device), list[int]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=toy.LR)
    scaler = torch.amp.GradScaler(device.type, init_scale=SCALE, growth_interval=GROWS_AFTER)
    loss = cast(Any, Regression(model))
    step = InnerStep(loss, [optimizer], MicroBatches(None, 64), inner=InnerSpec(), scaler=scaler)
    with open_http(run.coordinator.url) as http:
        client = MortalClient(http, "toy", run.token, dies=lambda what, number: False)
        given: dict[str, Any] = {"client": client, "run": client.run_detail(), "name": "a", "state_dir": state_dir}
        with DiLoCo(model, optimizer, scaler=scaler, **given) as diloco:
            for trained, unit in enumerate(diloco.units()):
                if trained == dies_at:
                    client.die()
                rows = torch.cat(toy.batch(unit), dim=1).to(device)
                before = scaler.get_scale()
                diloco.report_loss(step.gradient(rows))
                step.apply()
                if scaler.get_scale() < before:
                    skipped.append(unit)
    return skipped


@pytest.mark.parametrize("sync", ["", 'offsets = "spread"\noverlap = 2'], ids=["classic", "spread"])
def test_a_resume_is_exact(tmp_path: Path, device: torch.device, sync: str) -> None:
    """A restarted worker had a new scale, skipped other steps, and ended in other bits."""
    torch.set_num_threads(1)
    digests, skipped = [], []
    for dies_at in (None, 9):
        directory = tmp_path / str(dies_at)
        with coordinator_thread(directory / "coordinator") as coordinator:
            run = Toy(coordinator, toy.spec(steps=6, sync=sync), directory)
            if dies_at is not None:
                with pytest.raises(Killed):
                    work(run, directory / "a", device, dies_at)
            skipped.append([unit for unit in work(run, directory / "a", device) if unit >= 6])
            digests.append(run.final().state_digest)
    assert skipped[0], "or nothing of the scale is tested"
    assert skipped[0] == skipped[1]
    assert digests[0] == digests[1]
