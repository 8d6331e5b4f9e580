"""`outerstep compare` with one model: the loss of a checkpoint or an export on this machine, on what the run holds out."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from harness.coordinator import InThread, coordinator_thread
from outerstep import models
from protocol.messages import CheckpointDetail, RunDetail
from protocol.wire import Payload
from tests.outerstep.conftest import Served
from tests.support.file_server import FileServer, file_server
from tests.support.specs import tiny_spec
from tests.support.text import write_chapters
from tests.support.tokenizers import write_tokenizer
from tests.support.trained import save_trained
from tests.support.workers import worker_settings
from tests.worker.runs import create, work
from worker.agent import run_worker
from worker.data.sources.rows import Rows
from worker.data.sources.source import find_source
from worker.data.tokens.encoding import DocumentEncoding
from worker.data.tokens.preparing import Recipe, prepare
from worker.data.tokens.tokenizer import load_tokenizer
from worker.export import tokenizer_of
from worker.state.fragments import Fragments

RUN = "evaluated"


class Trained:
    """A finished run of two rounds on its coordinator."""

    def __init__(self, running: InThread, text: Path) -> None:
        self.running, self.text = running, text
        self.anywhere = ["--data-root", "/"]  # the run's text is in a directory of the test
        self.served = Served(running.url, running.data_dir, child=None)  # type: ignore[arg-type]
        with running.client() as http:
            self.run = http.get(f"/v1/runs/{RUN}").json()
            self.rounds = http.get(f"/v1/runs/{RUN}/rounds").json()["items"]

    def evaluate(self, *arguments: str) -> dict[str, Any]:
        code, out, err = self.served.outerstep("compare", *arguments, "--format", "json", *self.anywhere)
        assert code == 0, err
        found: dict[str, Any] = json.loads(out)["models"][0]
        return found

    def refused(self, *arguments: str) -> tuple[int, str]:
        code, out, err = self.served.outerstep("compare", *arguments, *self.anywhere)
        assert out == ""
        return code, err


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("evaluate")
    text = write_chapters(root / "text")
    with coordinator_thread(root / "coordinator") as running:
        running.create_run(tiny_spec(RUN, text, seed=1, rounds=2, min_workers=1))
        assert run_worker(worker_settings(running, RUN, root / "state")) == 0
        yield Trained(running, text)


@pytest.fixture(scope="module")
def exported(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("exported") / "model"
    assert trained.served.outerstep("run", "export", RUN, "--out", str(directory))[0] == 0
    return directory


@pytest.mark.slow
def test_a_checkpoint_has_the_loss_that_the_worker_has_measured(trained: Trained) -> None:
    last, first = trained.evaluate(RUN), trained.evaluate(f"{RUN}@0", "--device", "cpu")
    assert last["loss"] == pytest.approx(trained.run["held_out_loss"], abs=1e-6)
    assert first["loss"] == pytest.approx(trained.rounds[-1]["held_out_loss"], abs=1e-6)
    assert last["bits_per_byte"] == pytest.approx(trained.run["held_out_bits_per_byte"], abs=1e-6)
    assert last["bits_per_byte"] == pytest.approx(last["loss"] / math.log(2))
    code, out, err = trained.served.outerstep("compare", RUN, *trained.anywhere)
    header, row, _ = out.splitlines()
    assert (code, err, header.split()[-1]) == (0, f"measuring {RUN}\n", "bits/byte")
    assert f"{last['loss']:.4f}" in row.split()


def test_what_is_exported_is_the_point_that_the_outer_optimizer_has_reached(trained: Trained, exported: Path) -> None:
    """Bit for bit, from the bytes of the checkpoint: θ is where training would go on, a look ahead from there."""
    with trained.running.client() as http:
        checkpoint = CheckpointDetail.model_validate(http.get(f"/v1/runs/{RUN}/checkpoints/latest").json())
        at = f"/v1/runs/{RUN}/checkpoints/{checkpoint.round}/fragments"
        bodies = [http.get(f"{at}/{p}").raise_for_status().content for p in range(len(checkpoint.fragments))]
    outer = trained.run["spec"]["outer"]
    fragments = Fragments(LlamaForCausalLM.from_pretrained(exported), checkpoint.layout)
    for p, body in enumerate(bodies):
        state = np.empty(2 * checkpoint.layout.elements[p], np.float32)
        Payload.from_bytes(body).decode(state)
        theta, momentum = state.reshape(2, -1)
        ahead = np.float32(outer["learning_rate"]) * (np.float32(outer["momentum"]) * momentum)
        assert np.abs(ahead).max() > 1e-3
        assert fragments.gather(p).numpy().tobytes() == (theta + ahead).tobytes()


def test_other_text_is_evaluated_on_only_if_it_is_asked_for(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies at the run's data.source on this machine may be something else: its loss would be taken for the run's."""
    other = write_chapters(tmp_path / "other", words="the quick brown fox jumps over the lazy dog")
    assert trained.evaluate(RUN, "--on", str(other))["loss"] > trained.run["held_out_loss"] + 0.01
    monkeypatch.setenv("OUTERSTEP_DATA", str(other))  # of a worker of another run
    assert trained.evaluate(RUN)["loss"] == pytest.approx(trained.run["held_out_loss"], abs=1e-6)
    chapter = trained.text / "0.txt"
    before = chapter.read_text()
    chapter.write_text(before + "!")
    try:
        code, said = trained.refused(RUN)
    finally:
        chapter.write_text(before)
    assert code == 3
    assert "other text on this machine" in said
    assert "give --on" in said


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        pytest.param([RUN, "/tmp"], 3, "/tmp was not written by `outerstep run export`", id="no model there"),
        pytest.param([RUN, "--on", "/nowhere"], 3, "'/nowhere' matches no files", id="no text"),
        pytest.param([RUN, "--on", ""], 2, "--on: give a directory", id="no name"),
        pytest.param([RUN, "--plot", "x.svg"], 2, "--plot draws the differences of several", id="nothing to draw"),
    ],
)  # fmt: skip
def test_what_cannot_be_evaluated_is_told(trained: Trained, arguments: list[str], code: int, said: str) -> None:
    found, message = trained.refused(*arguments)
    assert (found, said in message) == (code, True), message


def test_text_of_which_nothing_is_held_out_is_told(trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("short. " * 60)
    code, said = trained.refused(RUN, "--on", str(tmp_path / "one.txt"))
    assert (code, "nothing held out, or less than one sequence of 32 tokens" in said) == (3, True), said


def test_parameters_that_are_not_finite_are_told(trained: Trained, exported: Path, tmp_path: Path) -> None:
    """They have no loss; a nan among the figures would be all that is seen of it."""
    for name in ("config.json", "spec.toml"):
        (tmp_path / name).write_bytes((exported / name).read_bytes())
    tensors = load_file(exported / "model.safetensors")
    broken = sorted(tensors)[0]
    tensors[broken][0] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    code, said = trained.refused(str(tmp_path))
    assert (code, f"the tensor {broken} of the model has values that are not finite" in said) == (3, True), said


# --- what a spec may name -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        (["run", "export", "{}", "--out", "unused"], ["model.pretrained", "data.tokenizer"]),
        (["run", "chat", "{}"], ["model.pretrained", "data.tokenizer"]),
        (["compare", "{}", "{}@0"], ["data.source", "data.tokenizer"]),
    ],
    ids=["export", "chat", "compare"],
)
@pytest.mark.covers("security:foreign-data-source")
def test_no_command_reads_what_a_spec_names_without_permission(
    trained: Trained, command: list[str], asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of commands that an operator types, only `run pin` asked."""
    monkeypatch.chdir(tmp_path)
    name = f"curious-{command[-2] if command[0] == 'compare' else command[1]}".replace("{}", "compare")
    trained.running.create_run(
        f'name = "{name}"\nmodel.pretrained = "{tmp_path}/weights"\nsync.rounds = 1\n'
        f'[data]\nsource = "{tmp_path}/text"\ntokenizer = "{tmp_path}/tokenizer"\n'
    )
    places = [tmp_path / each for each in ("weights", "text", "tokenizer")]
    code, out, err = trained.served.outerstep(*[each.replace("{}", name) for each in command])
    assert (code, out) == (3, "")
    for key in asked:
        assert f"{key} = '{tmp_path}/" in err
    assert "If you trust the author of its spec, add: --data-root" in err
    assert not (tmp_path / "unused").exists()
    assert not any(each.exists() for each in places)


def test_of_what_the_first_worker_reports_only_the_digest_is_used(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its name of a tokenizer is free text, and was loaded from the hub or from wherever it said."""
    loaded: list[str] = []
    monkeypatch.setattr("worker.export.load_tokenizer", loaded.append)
    detail = RunDetail.model_validate(trained.run)
    assert detail.spec.data.tokenizer is None
    assert detail.data is not None
    curious = detail.data.model_copy(update={"tokenizer": str(tmp_path), "tokenizer_digest": "0" * 64})
    assert tokenizer_of(detail.model_copy(update={"data": curious})) is None
    assert loaded == []
    assert f"(BLAKE3 {'0' * 64})" in caplog.text
    assert str(tmp_path) not in caplog.text


# --- other tokenizers, adapters, large batches --------------------------------------------------------------------


def test_a_batch_goes_through_the_model_in_parts(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's batch may be 512 sequences of 1024 tokens, whose logits take 67 GB; the worker takes them in parts."""
    rows: list[int] = []
    forward = LlamaForCausalLM.forward

    def counted(model: LlamaForCausalLM, tokens: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        rows.append(len(tokens))
        return forward(model, tokens, *arguments, **options)

    monkeypatch.setattr(LlamaForCausalLM, "forward", counted)
    monkeypatch.setattr(models, "TOKENS_AT_ONCE", 2 * 32)
    assert trained.evaluate(RUN)["loss"] == pytest.approx(trained.run["held_out_loss"], abs=1e-5)
    assert max(rows) == 2


def test_text_by_another_tokenizer_is_not_evaluated_on(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ids are those of other text to the model: their loss would be a number, and mean nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path / "tokenizer")))
    recipe = Recipe([find_source(str(trained.text), Rows(0.3))], DocumentEncoding(tokenizer))
    prepare(recipe, tmp_path / "set", processes=1)
    code, said = trained.refused(RUN, "--on", str(tmp_path / "set"))
    assert (code, "is trained on ids from 'bytes'" in said) == (3, True), said


@pytest.mark.slow
def test_a_set_behind_an_address_is_kept_where_a_worker_would_keep_it(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe([find_source(str(trained.text), Rows(0.3))], DocumentEncoding(load_tokenizer("bytes")))
    index = prepare(recipe, tmp_path / "set", processes=1)
    files = {f"/{path.name}": path.read_bytes() for path in (tmp_path / "set").iterdir() if path.is_file()}
    with file_server(FileServer(files)) as url:
        monkeypatch.setenv("OUTERSTEP_DATA_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("OUTERSTEP_DATA_CACHE_GB", "0.000001")
        code, said = trained.refused(RUN, "--on", url)
        assert (code, "OUTERSTEP_DATA_CACHE_GB" in said) == (3, True), said
        monkeypatch.setenv("OUTERSTEP_DATA_CACHE_GB", "0.1")
        found = trained.evaluate(RUN, "--on", url)
    assert found == trained.evaluate(RUN, "--on", str(tmp_path / "set"))
    assert {path.name for path in (tmp_path / "cache").glob("?" * 64)} == {shard.digest for shard in index.held_out}


@pytest.mark.parametrize("size", ["0", "nan", "inf"])
def test_a_cache_of_no_size_is_told(trained: Trained, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nan and inf, no bytes can be made: the command ended with a traceback, and so did a worker."""
    monkeypatch.setenv("OUTERSTEP_DATA_CACHE_GB", size)
    code, said = trained.refused(RUN)
    assert (code, "OUTERSTEP_DATA_CACHE_GB" in said, "Traceback" in said) == (2, True, False), said


def test_ids_that_a_model_does_not_have_are_told(trained: Trained, tmp_path: Path) -> None:
    """An export of another run, for one; it ended as an index out of range."""
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=100, **shape)).save_pretrained(tmp_path / "small")
    code, said = trained.refused(RUN, str(tmp_path / "small"))
    assert (code, "vocab_size = 100 is too small" in said) == (3, True), said


def test_an_export_that_lacks_a_tensor_is_told(trained: Trained, exported: Path, tmp_path: Path) -> None:
    """transformers would draw it at random, and say so in a log."""
    (tmp_path / "config.json").write_bytes((exported / "config.json").read_bytes())
    tensors = load_file(exported / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    code, said = trained.refused(RUN, str(tmp_path))
    assert (code, "its weights lack 1 tensors of the model, model.norm.weight for one" in said) == (3, True), said


@pytest.mark.slow
def test_adapters_are_evaluated_with_the_model_that_they_belong_to(trained: Trained, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs: pip install 'outerstep[peft]'")
    save_trained(tmp_path / "base")
    model = f'pretrained = "{tmp_path / "base"}", lora.rank = 2, lora.target_modules = ["q_proj", "v_proj"]'
    create(trained.running, tmp_path, "adapted", model)
    assert work(trained.running, tmp_path, "adapted") == 0
    directory = tmp_path / "adapters"
    assert trained.served.outerstep("run", "export", "adapted", *trained.anywhere, "--out", str(directory))[0] == 0

    loss = trained.evaluate(str(directory))["loss"]
    assert loss == pytest.approx(trained.evaluate("adapted")["loss"], abs=1e-5)
    assert loss != pytest.approx(trained.evaluate("adapted@0")["loss"], abs=1e-6)
    weights = (tmp_path / "base" / "model.safetensors").read_bytes()
    save_trained(tmp_path / "base", seed=8)  # whose loss with these adapters is a number as well, and nobody's
    code, said = trained.refused("adapted", str(directory))
    assert (code, "frozen" in said) == (3, True), said
    (tmp_path / "base" / "model.safetensors").write_bytes(weights)
    adapters = load_file(directory / "adapter_model.safetensors")
    del adapters[sorted(adapters)[0]]
    save_file(adapters, directory / "adapter_model.safetensors")
    code, said = trained.refused(str(directory))
    assert (code, "does not have the adapters that spec.toml" in said) == (3, True), said
