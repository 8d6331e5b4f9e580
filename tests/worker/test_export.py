"""Exports with their tokenizer: what `from_pretrained` makes of them."""

import errno
import json
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.coordinator import InThread, coordinator_thread
from outerstep.common.connections import error_text
from outerstep.common.exit_codes import Exit
from outerstep.common.files import UNFINISHED
from protocol.messages import Scope
from protocol.spec.run import parse_spec
from tests.support.full_disk import SmallDisk, small_disk
from tests.support.tokenizers import END, write_tokenizer
from tests.worker import toy
from tests.worker.runs import create, work
from tests.worker.toy import Toy
from worker.data.tokens.tokenizer import load_tokenizer
from worker.errors import ModelError
from worker.export import export
from worker.link.client import Client, open_http
from worker.models.building import build_model

pytestmark = pytest.mark.slow

WORDS = "all work and no play"


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A coordinator with the finished run `words`, whose tokenizer is in the directory `tokenizer`."""
    write_tokenizer(tmp_path / "tokenizer", WORDS)
    with coordinator_thread(tmp_path / "coordinator") as running:
        data = f'tokenizer = "{tmp_path / "tokenizer"}"'
        create(running, tmp_path, "words", 'preset = "tiny", vocab_size = 300', rounds=1, data=data)
        assert work(running, tmp_path, "words") == Exit.DONE
        yield running


def exported(running: InThread, directory: Path) -> Path:
    with open_http(running.url) as http:
        export(Client(http, "words", running.token(Scope.VIEWER)), directory)
    return directory


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
        exported(trained, directory)
    assert full.value.errno == errno.ENOSPC
    assert re.search(r"no space left on device.* \([\d.]+ \S*B free there\)$", error_text(full.value))
    assert not directory.exists()
    monkeypatch.setattr("worker.export.check_room", lambda *_: None)  # found while it is written, by safetensors
    with pytest.raises(OSError, match=f"{directory}|{UNFINISHED}") as full:
        exported(trained, directory)
    assert full.value.errno == errno.ENOSPC
    assert not directory.exists()
    disk.make_room()
    (directory / UNFINISHED).mkdir(parents=True)  # what a process leaves that was killed
    assert (exported(trained, directory) / "model.safetensors").is_file()
    assert not (directory / UNFINISHED).exists()


def test_an_export_has_the_runs_tokenizer_and_generates(trained: InThread, tmp_path: Path) -> None:
    directory = exported(trained, tmp_path / "model")
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
    tmp_path: Path, more: str, tokenizer: str, expected: tuple[Any, ...], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A class's default named a quotation mark as the end, and every fourth sample stopped at one."""
    directory = write_tokenizer(tmp_path / "tokenizer", WORDS)
    names = {"eos_token": END, "pad_token": "Ġ", "bos_token": None}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    padding = load_tokenizer(str(directory)).pad
    assert padding is not None
    with coordinator_thread(tmp_path / "coordinator") as running:
        named = directory if tokenizer == "tokenizer" else "bytes"
        create(running, tmp_path, "words", LLAMA.format(more=more), rounds=1, data=f'tokenizer = "{named}"')
        assert work(running, tmp_path, "words") == Exit.DONE
        model: Any = AutoModelForCausalLM.from_pretrained(exported(running, tmp_path / "model"))
    end, begin, pads = expected
    for each in (model.config, model.generation_config):
        assert (each.eos_token_id, each.bos_token_id) == (end, begin)
        assert each.pad_token_id == (padding if pads else None)
    assert ("eos_token_id = 5" in caplog.text) == warned


def test_a_machine_without_the_tokenizer_exports_without_it_and_says_so(
    trained: InThread, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.move(tmp_path / "tokenizer", tmp_path / "elsewhere")
    directory = exported(trained, tmp_path / "model")
    assert (directory / "model.safetensors").exists()
    assert not (directory / "tokenizer.json").exists()
    assert "exported without a tokenizer: data.tokenizer = " in caplog.text
    assert "exported without a tokenizer" in caplog.text


def test_of_a_run_whose_scripts_bring_the_model_the_parameters_are_exported(tmp_path: Path) -> None:
    text = toy.spec(rounds=1).replace('[model]\nfactory = "tests.worker.toy:make_model"\n', "")
    assert not parse_spec(text).model.is_given
    with coordinator_thread(tmp_path / "coordinator") as running:
        run = Toy(running, text, tmp_path)
        trained = run.worker("a").model
        with open_http(running.url) as http:
            client = Client(http, "toy", running.token(Scope.VIEWER))
            export(client, tmp_path / "model")
            with pytest.raises(ModelError, match="its workers are scripts"):
                build_model(client.run_detail().spec, torch.device("cpu"))
    model = toy.make_model()
    load_model(model, tmp_path / "model" / "model.safetensors")
    assert all(map(torch.equal, model.parameters(), trained.parameters()))


def test_buffers_are_named_at_join_and_export(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = toy.spec(rounds=1).replace("toy:make_model", "test_export:with_buffers")
    with coordinator_thread(tmp_path / "coordinator") as running:
        run = Toy(running, text, tmp_path)
        run.worker("a", model=with_buffers)
        assert caplog.text.count("2 buffers, such as 1.running_mean") == 1
        with open_http(running.url) as http:
            client = Client(http, "toy", running.token(Scope.VIEWER))
            export(client, tmp_path / "model", factories=("tests.worker.test_export:with_buffers",))
    assert caplog.text.count("2 buffers, such as 1.running_mean") == 2


def with_buffers() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 1), nn.BatchNorm1d(1))


def test_another_tokenizer_is_not_exported(trained: InThread, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model that is asked in ids of another vocabulary writes nonsense, and nobody knows why."""
    write_tokenizer(tmp_path / "tokenizer", "other words than those")
    directory = exported(trained, tmp_path / "model")
    assert not (directory / "tokenizer.json").exists()
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "on this machine is not the run's (BLAKE3 " in told


def test_bytes_have_no_tokenizer_to_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with coordinator_thread(tmp_path / "coordinator") as running:
        create(running, tmp_path, "words", 'preset = "tiny"', rounds=1, data='tokenizer = "bytes"')
        assert work(running, tmp_path, "words") == Exit.DONE
        directory = exported(running, tmp_path / "model")
    assert not (directory / "tokenizer.json").exists()
    assert "without a tokenizer" not in caplog.text
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    written = model.generate(torch.tensor([list(WORDS.encode())]), max_new_tokens=5, do_sample=False)
    assert bytes(written[0].tolist()).startswith(WORDS.encode())
