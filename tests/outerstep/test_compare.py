"""`outerstep compare`: the loss of checkpoints and exports on this machine, on what the run holds out; the difference of
models on the same held-out tokens, and how sure it is."""

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from harness.coordinator import InThread, coordinator_thread
from outerstep import compare, models
from outerstep.cli.errors import UsageError
from outerstep.cli.run.baseline import baseline_of
from outerstep.compare import Difference, Losses, difference
from protocol.messages import CheckpointDetail, CheckpointInfo, RunDetail
from protocol.spec.run import parse_spec
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
from worker.errors import ModelError
from worker.export import tokenizer_of
from worker.joining.averaging import base_of
from worker.state.fragments import Fragments

RUN = "compared"
ANYWHERE = ["--data-root", "/"]  # the run's text is in a directory of the test


def spec(text: Path) -> str:
    return tiny_spec(RUN, text, seed=1, rounds=2, min_workers=1)


class Trained:
    """A finished run of two rounds on its coordinator."""

    def __init__(self, running: InThread, text: Path) -> None:
        self.running, self.text = running, text
        self.served = Served(running.url, running.data_dir, child=None)  # type: ignore[arg-type]
        with running.client() as http:
            self.run = http.get(f"/v1/runs/{RUN}").json()
            self.rounds = http.get(f"/v1/runs/{RUN}/rounds").json()["items"]

    def compared(self, *arguments: str) -> dict[str, Any]:
        found: dict[str, Any] = self.served.shown("compare", *ANYWHERE, *arguments)
        return found

    def evaluated(self, *arguments: str) -> dict[str, Any]:
        """Of the first model."""
        return dict(self.compared(*arguments)["models"][0])

    def check_refused(self, said: str, *arguments: str, code: int = 3) -> str:
        found, out, err = self.served.outerstep("compare", *ANYWHERE, *arguments)
        assert (found, out, said in err) == (code, "", True), err
        return err

    def export(self, directory: Path, *options: str, run: str = RUN) -> Path:
        code, _, err = self.served.outerstep("run", "export", run, *options, "--out", str(directory))
        assert code == 0, err
        return directory


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("compare")
    text = write_chapters(root / "text", chapters=40, repeats=10)
    with coordinator_thread(root / "coordinator") as running:
        running.create_run(spec(text))
        assert run_worker(worker_settings(running, RUN, root / "state")) == 0
        yield Trained(running, text)


@pytest.fixture(scope="module")
def exported(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained.export(tmp_path_factory.mktemp("exported") / "model")


def shape() -> dict[str, Any]:
    return {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.slow
def test_a_checkpoint_has_the_loss_that_the_worker_has_measured(trained: Trained) -> None:
    last, first = trained.evaluated(RUN), trained.evaluated(f"{RUN}@0", "--device", "cpu")
    assert last["loss"] == pytest.approx(trained.run["held_out_loss"], abs=1e-6)
    assert first["loss"] == pytest.approx(trained.rounds[-1]["held_out_loss"], abs=1e-6)
    assert last["bits_per_byte"] == pytest.approx(trained.run["held_out_bits_per_byte"], abs=1e-6)
    assert last["bits_per_byte"] == pytest.approx(last["loss"] / math.log(2))
    code, out, err = trained.served.outerstep("compare", RUN, *ANYWHERE)
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
    assert trained.evaluated(RUN, "--on", str(other))["loss"] > trained.run["held_out_loss"] + 0.01
    monkeypatch.setenv("OUTERSTEP_DATA", str(other))  # of a worker of another run
    assert trained.evaluated(RUN)["loss"] == pytest.approx(trained.run["held_out_loss"], abs=1e-6)
    chapter = trained.text / "0.txt"
    before = chapter.read_text()
    chapter.write_text(before + "!")
    try:
        assert "give --on" in trained.check_refused("other text on this machine", RUN)
    finally:
        chapter.write_text(before)


def test_text_of_which_nothing_is_held_out_is_told(trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("short. " * 60)
    trained.check_refused(
        "nothing held out, or less than one sequence of 32 tokens", RUN, "--on", str(tmp_path / "one.txt")
    )


def test_parameters_that_are_not_finite_are_told(trained: Trained, exported: Path, tmp_path: Path) -> None:
    """They have no loss; a nan among the figures would be all that is seen of it."""
    for name in ("config.json", "spec.toml"):
        (tmp_path / name).write_bytes((exported / name).read_bytes())
    tensors = load_file(exported / "model.safetensors")
    broken = sorted(tensors)[0]
    tensors[broken][0] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    trained.check_refused(f"the tensor {broken} of the model has values that are not finite", str(tmp_path))


@pytest.mark.slow
def test_checkpoints_differ_by_what_each_of_them_is_evaluated_at(trained: Trained) -> None:
    found = trained.compared(RUN, f"{RUN}@0")
    last, first = found["models"]
    assert found["drawn"]["unit"] == "documents"
    assert found["drawn"]["count"] > 1
    apart = first["difference"]
    assert apart["nats"] == pytest.approx(first["loss"] - last["loss"])
    assert 0 < apart["low"] < apart["nats"] < apart["high"]
    assert apart["perplexity"] == pytest.approx(math.exp(apart["nats"]) - 1)
    assert last["difference"] is None
    run = trained.served.shown("run", "show", RUN)
    assert last["trained_tokens"] == run["run"]["tokens"]
    assert last["upload_bytes"] == run["run"]["upload_bytes"]
    assert last["delta_bytes"] == sum(each["delta_bytes"] for each in run["rounds"]) > 0
    assert (first["trained_tokens"], first["upload_bytes"], first["delta_bytes"]) == (0, 0, 0)
    assert (last["rounds"], first["rounds"]) == (2, 0)


@pytest.mark.slow
def test_an_export_is_the_run_s_model(trained: Trained, exported: Path) -> None:
    export = trained.compared(RUN, str(exported))["models"][1]
    assert export["difference"]["nats"] == pytest.approx(0, abs=1e-6)
    assert export["trained_tokens"] is None


def test_directories_need_no_coordinator(trained: Trained, exported: Path, tmp_path: Path) -> None:
    """An export names its text; another model, of transformers, need not."""
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape())).save_pretrained(tmp_path / "untrained")
    nowhere = ["--url", "http://127.0.0.1:9", "--format", "json", *ANYWHERE]
    code, out, err = trained.served.outerstep("compare", str(exported), str(tmp_path / "untrained"), *nowhere)
    assert code == 0, err
    assert json.loads(out)["models"][1]["difference"]["low"] > 1
    trained.check_refused(
        "none of these names its held-out text", str(tmp_path / "untrained"), str(tmp_path / "untrained")
    )


@pytest.mark.slow
def test_a_table_and_a_plot(trained: Trained, exported: Path, tmp_path: Path) -> None:
    plot = tmp_path / "difference.svg"
    names = [RUN, f"{RUN}@0", str(exported)]
    code, out, err = trained.served.outerstep("compare", *names, *ANYWHERE, "--plot", str(plot))
    assert code == 0, err
    assert [line.split()[0] for line in out.splitlines()[1:4]] == names
    assert "held-out documents" in out.splitlines()[4]
    assert err.splitlines()[:3] == [f"measuring {name}" for name in names]
    assert "held-out documents the intervals are too narrow" in err.splitlines()[3]
    assert len(err.splitlines()) == 4
    written = "".join(ElementTree.fromstring(plot.read_text()).itertext())
    assert f"{RUN}@0" in written
    trained.check_refused(
        "--plot: /nowhere/difference.svg: no such file or directory",
        RUN,
        f"{RUN}@0",
        "--plot",
        "/nowhere/difference.svg",
        code=2,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        pytest.param([RUN, "/tmp"], 3, "/tmp was not written by `outerstep run export`", id="no model there"),
        pytest.param([RUN, "--on", "/nowhere"], 3, "'/nowhere' matches no files", id="no text"),
        pytest.param([RUN, "--on", ""], 2, "--on: give a directory", id="no name"),
        pytest.param([RUN, "--plot", "x.svg"], 2, "--plot draws the differences of several", id="nothing to draw"),
        pytest.param([RUN, "nobody"], 3, "nobody", id="no such run"),
        pytest.param([RUN, f"{RUN}@7"], 3, "no checkpoint 7", id="no such checkpoint"),
        pytest.param([RUN, f"{RUN}@last"], 2, "is neither RUN nor RUN@ROUND", id="no number"),
        pytest.param([RUN, "./nowhere"], 2, "./nowhere is not a directory", id="no such directory"),
        pytest.param(["./", "./", "--average", "2"], 2, "--average is for runs", id="average of directories"),
        pytest.param([RUN, f"{RUN}@0", "--device", "abacus"], 2, "device 'abacus' cannot be used", id="no such device"),
    ],
)
def test_what_cannot_be_compared_is_told(trained: Trained, arguments: list[str], code: int, said: str) -> None:
    trained.check_refused(said, *arguments, code=code)


def test_a_model_of_other_ids_is_told(trained: Trained, tmp_path: Path) -> None:
    """Its loss would be a number, and mean nothing."""
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape())).save_pretrained(tmp_path / "other")
    write_tokenizer(tmp_path / "other")
    trained.check_refused("is trained on ids from", RUN, str(tmp_path / "other"))


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


@pytest.mark.slow
def test_a_batch_goes_through_the_model_in_parts(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's batch may be 512 sequences of 1024 tokens, whose logits take 67 GB; the worker takes them in parts."""
    rows: list[int] = []
    forward = LlamaForCausalLM.forward

    def counted(model: LlamaForCausalLM, tokens: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        rows.append(len(tokens))
        return forward(model, tokens, *arguments, **options)

    monkeypatch.setattr(LlamaForCausalLM, "forward", counted)
    monkeypatch.setattr(models, "TOKENS_AT_ONCE", 2 * 32)
    assert trained.evaluated(RUN)["loss"] == pytest.approx(trained.run["held_out_loss"], abs=1e-5)
    assert max(rows) == 2


def test_text_by_another_tokenizer_is_not_evaluated_on(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ids are those of other text to the model: their loss would be a number, and mean nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path / "tokenizer")))
    recipe = Recipe([find_source(str(trained.text), Rows(0.3))], DocumentEncoding(tokenizer))
    prepare(recipe, tmp_path / "set", processes=1)
    trained.check_refused("is trained on ids from 'bytes'", RUN, "--on", str(tmp_path / "set"))


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
        trained.check_refused("OUTERSTEP_DATA_CACHE_GB", RUN, "--on", url)
        monkeypatch.setenv("OUTERSTEP_DATA_CACHE_GB", "0.1")
        found = trained.evaluated(RUN, "--on", url)
    assert found == trained.evaluated(RUN, "--on", str(tmp_path / "set"))
    assert {path.name for path in (tmp_path / "cache").glob("?" * 64)} == {shard.digest for shard in index.held_out}


@pytest.mark.parametrize("size", ["0", "nan", "inf"])
def test_a_cache_of_no_size_is_told(trained: Trained, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nan and inf, no bytes can be made: the command ended with a traceback, and so did a worker."""
    monkeypatch.setenv("OUTERSTEP_DATA_CACHE_GB", size)
    trained.check_refused("OUTERSTEP_DATA_CACHE_GB", RUN, code=2)


def test_ids_that_a_model_does_not_have_are_told(trained: Trained, tmp_path: Path) -> None:
    """An export of another run, for one; it ended as an index out of range."""
    LlamaForCausalLM(LlamaConfig(vocab_size=100, **shape())).save_pretrained(tmp_path / "small")
    trained.check_refused("vocab_size = 100 is too small", RUN, str(tmp_path / "small"))


def test_an_export_that_lacks_a_tensor_is_told(trained: Trained, exported: Path, tmp_path: Path) -> None:
    """transformers would draw it at random, and say so in a log."""
    (tmp_path / "config.json").write_bytes((exported / "config.json").read_bytes())
    tensors = load_file(exported / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    trained.check_refused("its weights lack 1 tensors of the model, model.norm.weight for one", RUN, str(tmp_path))


@pytest.mark.slow
def test_adapters_are_evaluated_with_the_model_that_they_belong_to(trained: Trained, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs: pip install 'outerstep[peft]'")
    save_trained(tmp_path / "base")
    model = f'pretrained = "{tmp_path / "base"}", lora.rank = 2, lora.target_modules = ["q_proj", "v_proj"]'
    create(trained.running, tmp_path, "adapted", model)
    assert work(trained.running, tmp_path, "adapted") == 0
    directory = trained.export(tmp_path / "adapters", *ANYWHERE, run="adapted")
    loss = trained.evaluated(str(directory))["loss"]
    assert loss == pytest.approx(trained.evaluated("adapted")["loss"], abs=1e-5)
    assert loss != pytest.approx(trained.evaluated("adapted@0")["loss"], abs=1e-6)
    weights = (tmp_path / "base" / "model.safetensors").read_bytes()
    save_trained(tmp_path / "base", seed=8)  # whose loss with these adapters is a number as well, and nobody's
    trained.check_refused("frozen", "adapted", str(directory))
    (tmp_path / "base" / "model.safetensors").write_bytes(weights)
    adapters = load_file(directory / "adapter_model.safetensors")
    del adapters[sorted(adapters)[0]]
    save_file(adapters, directory / "adapter_model.safetensors")
    trained.check_refused("does not have the adapters that spec.toml", str(directory))


# --- the mean of the last states -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_mean_of_the_last_states_is_that_of_their_exports(trained: Trained, exported: Path, tmp_path: Path) -> None:
    """Although the state in the middle has no checkpoint."""
    with trained.running.client() as http:
        kept = [each["round"] for each in http.get(f"/v1/runs/{RUN}/checkpoints").json()["items"]]
    assert kept == [2, 0]
    three, two = (trained.export(tmp_path / number, "--average", number) for number in ("3", "2"))
    last, first = (
        load_file(trained.export(tmp_path / f"state-{number}", "--round", str(number)) / "model.safetensors")
        for number in (2, 0)
    )
    mean, of_two = (load_file(each / "model.safetensors") for each in (three, two))
    for name, value in mean.items():
        middle = 2 * of_two[name].double() - last[name].double()
        assert torch.allclose(value.double(), (first[name].double() + middle + last[name].double()) / 3, atol=1e-6)
        assert not torch.equal(value, of_two[name])
    by_compare = trained.compared(str(two), RUN, "--average", "2")["models"]
    assert by_compare[1]["difference"]["nats"] == pytest.approx(0, abs=1e-6)
    code, said = trained.served.outerstep("run", "export", RUN, "--average", "4", "--out", str(tmp_path / "four"))[::2]
    assert (code, "has 3 states up to 2: average 3 of them at most" in said) == (3, True), said


def test_states_whose_deltas_are_not_kept_are_told() -> None:
    def info(number: int, damage: str | None = None) -> CheckpointInfo:
        return CheckpointInfo(round=number, created_at=0, bytes=1, state_digest="0" * 64, damage=damage)

    kept = [info(40), info(30), info(20, "lost")]
    assert base_of(kept, 40, 5, "r") == 30
    assert base_of(kept, 40, 11, "r") == 30
    assert base_of(kept, 30, 1, "r") == 30
    with pytest.raises(ModelError, match=r"needs checkpoint 29 or an earlier one, .* average 11 at most"):
        base_of(kept, 40, 12, "r")


# --- the baseline -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_baseline_does_the_work_of_all_in_each_step(trained: Trained, tmp_path: Path) -> None:
    """So it is what several workers are compared with, at equal tokens."""
    baseline = ["run", "create", "-", "--baseline", "--workers", "2"]
    code, out, err = trained.served.outerstep(*baseline, stdin=spec(trained.text))
    assert (code, out.split(":")[0]) == (0, f"run {RUN}-baseline is created"), err
    assert err == "one worker with 8 sequences per inner step, the work of 2\n"
    assert run_worker(worker_settings(trained.running, f"{RUN}-baseline", tmp_path / "state")) == 0
    found = trained.compared(RUN, f"{RUN}-baseline")["models"]
    assert found[1]["trained_tokens"] == 2 * found[0]["trained_tokens"]


def test_a_baseline_of_one_worker_is_no_baseline(trained: Trained) -> None:
    """min_workers is 1 by default, however many will come."""
    code, out, err = trained.served.outerstep("run", "create", "-", "--baseline", stdin=spec(Path("text")))
    assert (code, out) == (2, "")
    assert "give --workers" in err


SPEC = """
name = "shared"  # of several
seed = 3
model = { config = { model_type = "llama", hidden_size = 32, "rope_parameters" = { rope_theta = 500.5 } } }
[data]
source = "a \\"b\\""
[inner]
batch_size = 4
learning_rate = 1e-3
[outer]
momentum = 0.9
[sync]
rounds = 30
inner_steps = 40
most_steps = 90
upload_codec = "ternary"
[members]
min_workers = 5
grace_min_s = 9
"""


def test_its_spec_is_that_of_one_worker_without_compression() -> None:
    given = parse_spec(SPEC)
    made = parse_spec(baseline_of(SPEC, given, 8))
    assert (made.name, made.seed, made.model, made.data) == ("shared-baseline", 3, given.model, given.data)
    assert made.inner == given.inner.model_copy(update={"batch_size": 32})
    assert (made.outer.learning_rate, made.outer.momentum) == (1.0, 0.0)
    assert (made.sync.rounds, made.sync.inner_steps) == (30, 40)
    assert (made.sync.wait, made.sync.upload_codec, made.sync.download_codec) == ("always", "fp32", "fp32")
    assert made.members == given.members.model_copy(update={"min_workers": 1})


def test_private_text_has_no_baseline() -> None:
    text = 'name = "r"\nmodel.preset = "tiny"\nsync.rounds = 9\ndata.private = true\ndata.tokenizer = "bytes"\n'
    with pytest.raises(UsageError, match="no worker has the text of all"):
        baseline_of(text, parse_spec(text), 8)


# --- the interval -------------------------------------------------------------------------------------------------


def drawn(seed: int, documents: int = 200, apart: float = 0.02) -> tuple[Losses, Losses]:
    """Two models whose losses differ by `apart` on average, less than documents differ from each other."""
    generator = np.random.default_rng(seed)
    targets = generator.integers(10, 100, documents)
    difficulty = generator.normal(2.0, 0.5, documents)
    base = Losses(difficulty * targets, targets)
    return Losses((difficulty + generator.normal(apart, 0.1, documents)) * targets, targets), base


@pytest.mark.slow
def test_the_interval_covers_the_true_difference_nineteen_times_in_twenty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "DRAWN", 300)
    found = [difference(*drawn(seed)) for seed in range(200)]
    covered = sum(each.low <= 0.02 <= each.high for each in found)
    assert 180 <= covered <= 198


def test_it_is_that_of_the_difference_and_not_of_either_loss() -> None:
    """Documents differ by 0.5, the models by 0.1 on each of them."""
    ours, base = drawn(1)
    nothing = Losses(np.zeros_like(base.nats), base.targets)
    together, alone = difference(ours, base), difference(ours, nothing)
    assert together.high - together.low < (alone.high - alone.low) / 3
    assert together.nats == pytest.approx(ours.mean - base.mean)


def test_a_document_counts_by_its_tokens() -> None:
    targets = np.array([1, 99])
    found = difference(Losses(np.array([10.0, 99.0]), targets), Losses(np.array([0.0, 99.0]), targets))
    assert found.nats == pytest.approx(0.1)
    assert found == Difference(found.nats, 0.0, 10.0)  # either document twice
