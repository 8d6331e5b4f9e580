"""Exports with their tokenizer: what `from_pretrained` makes of them. And runs that start from weights: those of a trained
model, or of another run."""

import errno
import json
import logging
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.coordinator import InThread
from outerstep.common.connections import error_text
from outerstep.common.exit_codes import Exit
from outerstep.common.files import UNFINISHED
from protocol.errors import Problem
from protocol.messages import CheckpointDetail
from tests.support.full_disk import SmallDisk, small_disk
from tests.support.tokenizers import END, write_tokenizer
from tests.support.trained import save_trained
from tests.support.waiting import wait_until
from tests.worker import toy
from tests.worker.runs import create, exported, shown, state, train, work
from tests.worker.toy import MakeToy
from worker.data.tokens.tokenizer import load_tokenizer
from worker.errors import ModelError
from worker.link.client import Client
from worker.models.building import build_model

pytestmark = pytest.mark.slow

WORDS = "all work and no play"


@pytest.fixture
def trained(coordinator: InThread, tmp_path: Path) -> InThread:
    """A coordinator with the finished run `words`, whose tokenizer is in the directory `tokenizer`."""
    data = f'tokenizer = "{write_tokenizer(tmp_path / "tokenizer", WORDS)}"'
    train(coordinator, tmp_path, "words", 'preset = "tiny", vocab_size = 300', rounds=1, data=data)
    return coordinator


@pytest.fixture
def exported_to(tmp_path: Path) -> Iterator[tuple[SmallDisk, Path]]:
    with small_disk(tmp_path / "disk") as disk:
        yield disk, disk.root / "model"


def test_an_export_to_a_full_disk_leaves_nothing_that_blocks_the_next_try(
    trained: InThread, exported_to: tuple[SmallDisk, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It left half a directory."""
    disk, directory = exported_to
    disk.fill()
    with pytest.raises(OSError, match=f"{directory}|{UNFINISHED}") as full:
        exported(trained, "words", directory)
    assert full.value.errno == errno.ENOSPC
    assert re.search(r"no space left on device.* \([\d.]+ \S*B free there\)$", error_text(full.value))
    assert not directory.exists()
    monkeypatch.setattr("worker.export.check_room", lambda *_: None)  # found while it is written, by safetensors
    with pytest.raises(OSError, match=f"{directory}|{UNFINISHED}") as full:
        exported(trained, "words", directory)
    assert full.value.errno == errno.ENOSPC
    assert not directory.exists()
    disk.make_room()
    (directory / UNFINISHED).mkdir(parents=True)  # what a process leaves that was killed
    exported(trained, "words", directory)
    assert (directory / "model.safetensors").is_file()
    assert not (directory / UNFINISHED).exists()


def test_an_export_has_the_runs_tokenizer_and_generates(trained: InThread, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    exported(trained, "words", directory)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    assert tokenizer.decode(tokenizer(WORDS)["input_ids"]) == WORDS
    assert tokenizer.eos_token == END
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.use_cache
    assert model.generation_config.use_cache  # which generate() goes by
    modes = {file.name: file.stat().st_mode for file in directory.iterdir()}
    assert len(set(modes.values())) == 1, modes  # whoever may read one may read all
    written = model.generate(**tokenizer(WORDS, return_tensors="pt"), max_new_tokens=5, do_sample=False)
    assert tokenizer.decode(written[0]).startswith(WORDS)


LLAMA = (
    'config = {{model_type = "llama", vocab_size = 300, hidden_size = 16, intermediate_size = 16, num_hidden_layers = 1, '
    "num_attention_heads = 2, max_position_embeddings = 16{more}}}"
)


@pytest.mark.parametrize(
    ("more", "tokenizer", "expected", "warned"),
    [
        ("", "tokenizer", (0, None, True), False),  # LlamaConfig's own defaults are 2, 1 and None
        (", eos_token_id = 5, bos_token_id = 6", "tokenizer", (0, 6, True), True),
        (", eos_token_id = [5, 0]", "tokenizer", ([5, 0], None, True), False),
        ("", "bytes", (None, None, False), False),
        (", eos_token_id = 10", "bytes", (10, None, False), False),
    ],
)
def test_the_runs_tokenizer_decides_where_texts_end(
    coordinator: InThread,
    tmp_path: Path,
    more: str,
    tokenizer: str,
    expected: tuple[Any, ...],
    warned: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A class's default named a quotation mark as the end, and every fourth sample stopped at one."""
    directory = write_tokenizer(tmp_path / "tokenizer", WORDS)
    names = {"eos_token": END, "pad_token": "Ġ", "bos_token": None}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    padding = load_tokenizer(str(directory)).pad
    assert padding is not None
    named = directory if tokenizer == "tokenizer" else "bytes"
    train(coordinator, tmp_path, "words", LLAMA.format(more=more), rounds=1, data=f'tokenizer = "{named}"')
    exported(coordinator, "words", tmp_path / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    end, begin, pads = expected
    for each in (model.config, model.generation_config):
        assert (each.eos_token_id, each.bos_token_id) == (end, begin)
        assert each.pad_token_id == (padding if pads else None)
    assert ("eos_token_id = 5" in caplog.text) == warned


def test_a_machine_without_the_tokenizer_exports_without_it_and_says_so(
    trained: InThread, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.move(tmp_path / "tokenizer", tmp_path / "elsewhere")
    directory = tmp_path / "model"
    exported(trained, "words", directory)
    assert (directory / "model.safetensors").exists()
    assert not (directory / "tokenizer.json").exists()
    assert "exported without a tokenizer: data.tokenizer = " in caplog.text


@pytest.mark.parametrize("factory", [True, False], ids=["a function's model", "a script's model"])
def test_of_a_model_that_is_not_ours_the_parameters_are_exported(
    toy_run: MakeToy, tmp_path: Path, factory: bool
) -> None:
    text = toy.spec(rounds=1)
    run = toy_run(text if factory else text.replace(f'[model]\nfactory = "{toy.FACTORY}"\n', ""))
    spec = run.info().spec
    assert spec.model.is_given == factory
    trained = run.worker("a").model
    exported(run.coordinator, "toy", tmp_path / "model", factories=(toy.FACTORY,) if factory else ())
    if not factory:
        with pytest.raises(ModelError, match="its workers are scripts"):
            build_model(spec, torch.device("cpu"))
    model = toy.make_model()
    load_model(model, tmp_path / "model" / "model.safetensors")
    assert all(map(torch.equal, model.parameters(), trained.parameters()))


def test_buffers_are_named_at_join_and_export(
    toy_run: MakeToy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = toy.spec(rounds=1).replace("toy:make_model", "test_export:with_buffers")
    run = toy_run(text)
    run.worker("a", model=with_buffers)
    assert caplog.text.count("2 buffers, such as 1.running_mean") == 1
    exported(run.coordinator, "toy", tmp_path / "model", factories=("tests.worker.test_export:with_buffers",))
    assert caplog.text.count("2 buffers, such as 1.running_mean") == 2


def with_buffers() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 1), nn.BatchNorm1d(1))


def test_another_tokenizer_is_not_exported(trained: InThread, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model that is asked in ids of another vocabulary writes nonsense, and nobody knows why."""
    write_tokenizer(tmp_path / "tokenizer", "other words than those")
    directory = tmp_path / "model"
    exported(trained, "words", directory)
    assert not (directory / "tokenizer.json").exists()
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "on this machine is not the run's (BLAKE3 " in told


def test_bytes_have_no_tokenizer_to_write(
    coordinator: InThread, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(coordinator, tmp_path, "words", 'preset = "tiny"', rounds=1, data='tokenizer = "bytes"')
    directory = tmp_path / "model"
    exported(coordinator, "words", directory)
    assert not (directory / "tokenizer.json").exists()
    assert "without a tokenizer" not in caplog.text
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    written = model.generate(torch.tensor([list(WORDS.encode())]), max_new_tokens=5, do_sample=False)
    assert bytes(written[0].tolist()).startswith(WORDS.encode())


# --- runs that start from weights ----------------------------------------------------------------------------------


TINY = 'preset = "tiny"'


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    assert ours.keys() == theirs.keys()
    return all(torch.equal(tensor, theirs[name].float()) for name, tensor in ours.items())


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
    train(coordinator, tmp_path, "base", TINY, keep=1)
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
    train(coordinator, tmp_path, "base", TINY)
    train(coordinator, tmp_path, "second", f'{TINY}, run = "base"', fragment_elements=100_000)
    assert same(state(coordinator, "second", 0), state(coordinator, "base"))
    train(coordinator, tmp_path, "third", f'{TINY}, run = "base", round = 1')
    assert same(state(coordinator, "third", 0), state(coordinator, "base", 1))
    assert not same(state(coordinator, "third", 0), state(coordinator, "base"))


def test_a_run_starts_from_an_export(coordinator: InThread, tmp_path: Path) -> None:
    train(coordinator, tmp_path, "base", TINY)
    exported(coordinator, "base", tmp_path / "exported")
    train(coordinator, tmp_path, "tuned", f'pretrained = "{tmp_path / "exported"}"')
    assert same(state(coordinator, "tuned", 0), state(coordinator, "base"))
    model = exported(coordinator, "tuned", tmp_path / "again")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert same(loaded.state_dict(), model.state_dict())
    assert loaded.dtype == torch.float32


def test_what_a_trained_model_generates_with_is_exported(coordinator: InThread, tmp_path: Path) -> None:
    save_trained(tmp_path / "trained")
    train(coordinator, tmp_path, "tuned", f'pretrained = "{tmp_path / "trained"}"')
    exported(coordinator, "tuned", tmp_path / "model")
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
    train(coordinator, tmp_path, "base", TINY, rounds=1)
    create(coordinator, tmp_path, "second", model.format(tmp_path / "trained"))
    assert work(coordinator, tmp_path, "second") == Exit.REFUSED
    assert message in caplog.text
    assert shown(coordinator, "second").state == "seeding"
