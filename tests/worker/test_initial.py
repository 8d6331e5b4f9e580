"""Runs that start from weights: those of a trained model, or of another run."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from harness.coordinator import InThread, coordinator_thread
from outerstep.common.exit_codes import Exit
from protocol.errors import Problem
from protocol.messages import CheckpointDetail, Scope
from tests.support.trained import save_trained
from tests.support.waiting import wait_until
from tests.worker.runs import create, shown, state, work
from worker.export import export
from worker.link.client import Client, open_http

pytestmark = pytest.mark.slow

TINY = 'preset = "tiny"'


@pytest.fixture
def coordinator(tmp_path: Path):
    with coordinator_thread(tmp_path / "coordinator") as running:
        yield running


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    assert ours.keys() == theirs.keys()
    return all(torch.equal(tensor, theirs[name].float()) for name, tensor in ours.items())


def test_a_run_starts_from_a_trained_model(coordinator: InThread, tmp_path: Path) -> None:
    trained = save_trained(tmp_path / "trained")
    create(coordinator, tmp_path, "tuned", f'pretrained = "{tmp_path / "trained"}"')
    assert work(coordinator, tmp_path, "tuned") == Exit.DONE
    assert same(state(coordinator, "tuned", 0), trained.state_dict())
    assert not same(state(coordinator, "tuned"), trained.state_dict())


def test_only_the_worker_that_seeds_needs_the_weights(
    coordinator: InThread, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another one joins with the configuration alone, and does not take what it built for state 0."""
    directory = tmp_path / "trained"
    trained = save_trained(directory)
    create(coordinator, tmp_path, "tuned", f'pretrained = "{directory}"', min_workers=2)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(work, coordinator, tmp_path, "tuned", "a")
        wait_until(lambda: shown(coordinator, "tuned").state == "running")
        (directory / "model.safetensors").unlink()
        caplog.set_level(logging.INFO)
        second = threads.submit(work, coordinator, tmp_path, "tuned", "b")
        assert (first.result(), second.result()) == (Exit.DONE, Exit.DONE)
    assert "loaded checkpoint 0: fetched 1 of 1 fragments" in caplog.text
    assert same(state(coordinator, "tuned", 0), trained.state_dict())
    assert shown(coordinator, "tuned").divergences == 0


def test_spoilt_weights_are_named_before_anything_is_uploaded(
    coordinator: InThread, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run waits for a worker that has better ones."""
    directory = tmp_path / "trained"
    save_trained(directory)
    good = load_file(directory / "model.safetensors")
    bad = good | {"model.norm.weight": torch.full((16,), torch.nan)}
    save_file(bad, directory / "model.safetensors", {"format": "pt"})
    create(coordinator, tmp_path, "tuned", f'pretrained = "{directory}"')
    assert work(coordinator, tmp_path, "tuned") == Exit.REFUSED
    assert "model.safetensors: tensor model.norm.weight has values that are not finite" in caplog.text
    assert shown(coordinator, "tuned").state == "seeding"
    save_file(good, directory / "model.safetensors", {"format": "pt"})
    assert work(coordinator, tmp_path, "tuned", "b") == Exit.DONE


def test_a_checkpoint_that_is_deleted_while_it_is_fetched_is_followed_by_the_next(
    coordinator: InThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other run went on, and retention deleted what was the latest: the worker ended, and had to be started again."""
    create(coordinator, tmp_path, "base", TINY, keep=1)
    assert work(coordinator, tmp_path, "base") == Exit.DONE
    ask, asked = Client.checkpoint, []

    def before_it_was_deleted(client: Client, state_round: int | None = None) -> CheckpointDetail:
        asked.append(state_round)
        found = ask(client, state_round)
        return found.model_copy(update={"round": 0}) if len(asked) == 1 else found

    latest = state(coordinator, "base")
    monkeypatch.setattr(Client, "checkpoint", before_it_was_deleted)
    assert same(state(coordinator, "base"), latest)
    assert asked == [None, None]
    with pytest.raises(Problem, match="checkpoints below 2 were deleted"):
        state(coordinator, "base", 0)


def test_a_run_starts_from_another_run(coordinator: InThread, tmp_path: Path) -> None:
    """From the latest checkpoint, or that of a round, whatever its fragments are."""
    create(coordinator, tmp_path, "base", TINY)
    assert work(coordinator, tmp_path, "base") == Exit.DONE
    create(coordinator, tmp_path, "second", f'{TINY}, run = "base"', fragment_elements=100_000)
    assert work(coordinator, tmp_path, "second") == Exit.DONE
    assert same(state(coordinator, "second", 0), state(coordinator, "base"))
    create(coordinator, tmp_path, "third", f'{TINY}, run = "base", round = 1')
    assert work(coordinator, tmp_path, "third") == Exit.DONE
    assert same(state(coordinator, "third", 0), state(coordinator, "base", 1))
    assert not same(state(coordinator, "third", 0), state(coordinator, "base"))


def test_a_run_starts_from_an_export(coordinator: InThread, tmp_path: Path) -> None:
    create(coordinator, tmp_path, "base", TINY)
    assert work(coordinator, tmp_path, "base") == Exit.DONE
    with open_http(coordinator.url) as http:
        export(Client(http, "base", coordinator.token(Scope.VIEWER)), tmp_path / "exported")
    create(coordinator, tmp_path, "tuned", f'pretrained = "{tmp_path / "exported"}"')
    assert work(coordinator, tmp_path, "tuned") == Exit.DONE
    assert same(state(coordinator, "tuned", 0), state(coordinator, "base"))
    with open_http(coordinator.url) as http:
        model = export(Client(http, "tuned", coordinator.token(Scope.VIEWER)), tmp_path / "again")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert same(loaded.state_dict(), model.state_dict())
    assert loaded.dtype == torch.float32


def test_what_a_trained_model_generates_with_is_exported(coordinator: InThread, tmp_path: Path) -> None:
    save_trained(tmp_path / "trained")
    create(coordinator, tmp_path, "tuned", f'pretrained = "{tmp_path / "trained"}"')
    assert work(coordinator, tmp_path, "tuned") == Exit.DONE
    with open_http(coordinator.url) as http:
        export(Client(http, "tuned", coordinator.token(Scope.VIEWER)), tmp_path / "model")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert (loaded.generation_config.temperature, loaded.generation_config.eos_token_id) == (0.5, 10)
    written = loaded.generate(torch.tensor([[97, 108, 108]]), max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert written.shape == (1, 8)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (f'{TINY}, run = "base", round = 99', "model.run = 'base', model.round = 99: "),
        (f'{TINY}, vocab_size = 300, run = "base"', "model.embed_tokens.weight is [300, 64], the run's is"),
        ('pretrained = "{0}", run = "base"', "or the run's export as model.pretrained"),
    ],
)
def test_another_run_that_cannot_be_started_from(
    coordinator: InThread, tmp_path: Path, caplog: pytest.LogCaptureFixture, model: str, message: str
) -> None:
    save_trained(tmp_path / "trained")
    create(coordinator, tmp_path, "base", TINY, rounds=1)
    assert work(coordinator, tmp_path, "base") == Exit.DONE
    create(coordinator, tmp_path, "second", model.format(tmp_path / "trained"))
    assert work(coordinator, tmp_path, "second") == Exit.REFUSED
    assert message in caplog.text
    assert shown(coordinator, "second").state == "seeding"
