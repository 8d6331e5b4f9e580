"""A script that trains on the run's own data, beside `outerstep worker`."""

from pathlib import Path

import pytest
import torch
from torch.optim import Optimizer

from harness.coordinator import InThread, coordinator_thread
from outerstep.common.exit_codes import Exit
from protocol.errors import Problem
from protocol.messages import RunState, Scope
from protocol.spec.run import RunSpec
from tests.support.text import write_chapters
from tests.support.waiting import wait_until
from tests.worker import toy
from tests.worker.runs import create, join, shown, work
from tests.worker.toy import Toy, at_once
from worker.diloco import DiLoCo
from worker.errors import NotAllowed
from worker.models.building import build_model, logits_of


def connected(coordinator: InThread, spec: RunSpec) -> tuple[DiLoCo, Optimizer]:
    model = build_model(spec, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    where = {"run": spec.name, "url": coordinator.url, "token": coordinator.token(Scope.WORKER)}
    return DiLoCo.connect(model, optimizer, **where, name="script", state_dir=None), optimizer


def train(coordinator: InThread, spec: RunSpec, root: Path) -> Exit:
    diloco, optimizer = connected(coordinator, spec)
    data = diloco.training_set(data_root=[str(root)])
    with diloco:
        for unit in diloco.units():
            tokens = data.unit(unit)
            logits = logits_of(diloco.model, tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            diloco.report_loss(loss)
            optimizer.step()
            optimizer.zero_grad()
    return Exit.DONE


@pytest.mark.slow
def test_it_shares_a_run_with_outerstep_worker(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        create(coordinator, tmp_path, "words", 'preset = "tiny"', min_workers=2)
        spec = shown(coordinator, "words").spec
        done = at_once(
            {
                "worker": lambda: work(coordinator, tmp_path, "words", "worker"),
                "script": lambda: train(coordinator, spec, tmp_path),
            }
        )
        assert set(done.values()) == {Exit.DONE}
        wait_until(lambda: shown(coordinator, "words").state_digest is not None)
        assert shown(coordinator, "words").state is RunState.FINISHED


def test_other_data_and_other_places_are_refused(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        create(coordinator, tmp_path, "words", 'preset = "tiny"')
        diloco, _ = connected(coordinator, shown(coordinator, "words").spec)
        with pytest.raises(NotAllowed, match="data.source"):
            diloco.training_set()
        with diloco, pytest.raises(RuntimeError, match="before `with`"):
            diloco.training_set(data_root=[str(tmp_path)])


@pytest.mark.slow
def test_a_script_with_other_data_cannot_join(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        create(coordinator, tmp_path, "words", 'preset = "tiny"')
        join(coordinator, "words")
        diloco, _ = connected(coordinator, shown(coordinator, "words").spec)
        diloco.training_set(str(write_chapters(tmp_path / "other", chapters=3, repeats=21)))
        with pytest.raises(Problem) as refused, diloco:
            pytest.fail("it joined")
        assert refused.value.slug == "data-mismatch"


def test_a_custom_run_has_none(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run, model = Toy(coordinator, toy.spec(), tmp_path), toy.make_model()
        with pytest.raises(ValueError, match="custom"):
            run.connect(model, torch.optim.SGD(model.parameters())).training_set()
