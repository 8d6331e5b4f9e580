"""accelerate in a plain loop: all that it wraps is given as it is, and it accumulates as it likes."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from tests.worker import toy
from tests.worker.toy import Toy, coordinator_thread

pytestmark = pytest.mark.slow

BATCH, ROUNDS = 4, 3
STEPS = ROUNDS * toy.STEPS
ROWS = BATCH * STEPS


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_loop_of_accelerate_trains_on_every_row_once_at_the_run_s_rate(tmp_path: Path, accumulated: int) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=accumulated, cpu=True)
    model = toy.make_model()
    bare = AdamW(model.parameters(), lr=0.01)
    data = TensorDataset(torch.arange(ROWS), torch.randn(ROWS, 20))
    model, optimizer, scheduler = accelerator.prepare(model, bare, CosineAnnealingLR(bare, STEPS))
    rows, rates = list[int](), list[float]()
    bare.register_step_post_hook(lambda *_: rates.append(bare.param_groups[0]["lr"]))
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(rounds=ROUNDS, inner=f"batch_size = {BATCH}"), tmp_path)
        with run.connect(model, optimizer, scheduler=scheduler) as diloco:
            sampler = diloco.unit_sampler(data, BATCH // accumulated)
            loader = accelerator.prepare(DataLoader(data, batch_sampler=sampler))
            while not diloco.finished:
                for taken, x in loader:
                    with accelerator.accumulate(model):
                        rows += taken.tolist()
                        loss = model(x).square().mean()
                        accelerator.backward(loss)
                        diloco.report_loss(loss)
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()
        info = run.final()
        assert sorted(rows) == list(range(ROWS))
        assert info.tokens == STEPS * info.spec.unit_tokens
        assert run.told("a").state_digest == info.state_digest
    reference = CosineAnnealingLR(AdamW(model.parameters(), lr=0.01), STEPS)
    for rate in rates:
        assert rate == reference.get_last_lr()[0]
        reference.optimizer.step()
        reference.step()
    assert len(rates) == STEPS
