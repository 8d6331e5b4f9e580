"""`outerstep compare`: the difference of models on the same held-out tokens, and how sure it is."""

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from harness.coordinator import InThread, coordinator_thread
from outerstep import compare
from outerstep.cli.errors import UsageError
from outerstep.cli.run.baseline import baseline_of
from outerstep.compare import Difference, Losses, difference
from protocol.messages import CheckpointInfo
from protocol.spec.run import parse_spec
from tests.outerstep.conftest import Served
from tests.support.specs import tiny_spec
from tests.support.text import write_chapters
from tests.support.tokenizers import write_tokenizer
from tests.support.workers import worker_settings
from worker.agent import run_worker
from worker.errors import ModelError
from worker.joining.averaging import base_of

RUN = "compared"
ANYWHERE = ["--data-root", "/"]  # the run's text is in a directory of the test


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory):
    """A coordinator with a finished run of two rounds."""
    root = tmp_path_factory.mktemp("compare")
    write_chapters(root / "text", chapters=40, repeats=4)
    with coordinator_thread(root / "coordinator") as running:
        running.create_run(spec(root / "text"))
        assert run_worker(worker_settings(running, RUN, root / "state")) == 0
        yield running


def spec(text: Path) -> str:
    return tiny_spec(RUN, text, seed=1, rounds=2, min_workers=1)


@pytest.fixture(scope="module")
def served(running: InThread) -> Served:
    return Served(running.url, running.data_dir, child=None)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def exported(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("exported") / "model"
    assert served.outerstep("run", "export", RUN, "--out", str(directory))[0] == 0
    return directory


def compared(served: Served, *arguments: str) -> dict[str, Any]:
    code, out, err = served.outerstep("compare", "--format", "json", *ANYWHERE, *arguments)
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def refused(served: Served, *arguments: str) -> tuple[int, str]:
    code, out, err = served.outerstep("compare", *ANYWHERE, *arguments)
    assert out == ""
    return code, err


@pytest.mark.slow
def test_checkpoints_differ_by_what_each_of_them_is_evaluated_at(served: Served) -> None:
    found = compared(served, RUN, f"{RUN}@0")
    last, first = found["models"]
    assert found["drawn"]["unit"] == "documents"
    assert found["drawn"]["count"] > 1
    apart = first["difference"]
    assert apart["nats"] == pytest.approx(first["loss"] - last["loss"])
    assert 0 < apart["low"] < apart["nats"] < apart["high"]
    assert apart["perplexity"] == pytest.approx(math.exp(apart["nats"]) - 1)
    assert last["difference"] is None
    run = json.loads(served.outerstep("run", "show", RUN, "--format", "json")[1])
    assert last["trained_tokens"] == run["run"]["tokens"]
    assert last["upload_bytes"] == run["run"]["upload_bytes"]
    assert last["delta_bytes"] == sum(each["delta_bytes"] for each in run["rounds"]) > 0
    assert (first["trained_tokens"], first["upload_bytes"], first["delta_bytes"]) == (0, 0, 0)
    assert (last["rounds"], first["rounds"]) == (2, 0)


def test_an_export_is_the_run_s_model(served: Served, exported: Path) -> None:
    export = compared(served, RUN, str(exported))["models"][1]
    assert export["difference"]["nats"] == pytest.approx(0, abs=1e-6)
    assert export["trained_tokens"] is None


def test_directories_need_no_coordinator(served: Served, exported: Path, tmp_path: Path) -> None:
    """An export names its text; another model, of transformers, need not."""
    LlamaForCausalLM(LlamaConfig(**shape())).save_pretrained(tmp_path / "untrained")
    nowhere = ["--url", "http://127.0.0.1:9", "--format", "json", *ANYWHERE]
    code, out, err = served.outerstep("compare", str(exported), str(tmp_path / "untrained"), *nowhere)
    assert code == 0, err
    assert json.loads(out)["models"][1]["difference"]["low"] > 1
    code, said = refused(served, str(tmp_path / "untrained"), str(tmp_path / "untrained"))
    assert (code, "none of these names its held-out text" in said) == (3, True), said


@pytest.mark.slow
def test_a_table_and_a_plot(served: Served, exported: Path, tmp_path: Path) -> None:
    plot = tmp_path / "difference.svg"
    names = [RUN, f"{RUN}@0", str(exported)]
    code, out, err = served.outerstep("compare", *names, *ANYWHERE, "--plot", str(plot))
    assert code == 0, err
    assert [line.split()[0] for line in out.splitlines()[1:4]] == names
    assert "held-out documents" in out.splitlines()[4]
    assert err.splitlines()[:3] == [f"measuring {name}" for name in names]
    assert "held-out documents the intervals are too narrow" in err.splitlines()[3]
    assert len(err.splitlines()) == 4
    written = "".join(ElementTree.fromstring(plot.read_text()).itertext())
    assert f"{RUN}@0" in written
    code, said = refused(served, RUN, f"{RUN}@0", "--plot", "/nowhere/difference.svg")
    assert (code, "--plot: /nowhere/difference.svg: no such file or directory" in said) == (2, True), said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        pytest.param([RUN, "nobody"], 3, "nobody", id="no such run"),
        pytest.param([RUN, f"{RUN}@7"], 3, "no checkpoint 7", id="no such checkpoint"),
        pytest.param([RUN, f"{RUN}@last"], 2, "is neither RUN nor RUN@ROUND", id="no number"),
        pytest.param([RUN, "./nowhere"], 2, "./nowhere is not a directory", id="no such directory"),
        pytest.param(["./", "./", "--average", "2"], 2, "--average is for runs", id="average of directories"),
        pytest.param([RUN, f"{RUN}@0", "--device", "abacus"], 2, "device 'abacus' cannot be used", id="no such device"),
    ],
)
def test_what_cannot_be_compared_is_told(served: Served, arguments: list[str], code: int, said: str) -> None:
    found, message = refused(served, *arguments)
    assert (found, said in message) == (code, True), message


def test_a_model_of_other_ids_is_told(served: Served, tmp_path: Path) -> None:
    """Its loss would be a number, and mean nothing."""
    LlamaForCausalLM(LlamaConfig(**shape())).save_pretrained(tmp_path / "other")
    write_tokenizer(tmp_path / "other")
    code, said = refused(served, RUN, str(tmp_path / "other"))
    assert (code, "is trained on ids from" in said) == (3, True), said


def shape() -> dict[str, Any]:
    return {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1} | {
        "num_attention_heads": 2
    }


# --- the mean of the last states -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_mean_of_the_last_states_is_that_of_their_exports(
    served: Served, exported: Path, running: InThread, tmp_path: Path
) -> None:
    """Although the state in the middle has no checkpoint."""
    with running.client() as http:
        kept = [each["round"] for each in http.get(f"/v1/runs/{RUN}/checkpoints").json()["items"]]
    assert kept == [2, 0]
    assert served.outerstep("run", "export", RUN, "--average", "3", "--out", str(tmp_path / "mean"))[0] == 0
    last, first = (state_of(served, RUN, number, tmp_path) for number in (2, 0))
    two = tmp_path / "two"
    assert served.outerstep("run", "export", RUN, "--average", "2", "--out", str(two))[0] == 0
    mean, of_two = (load_file(each / "model.safetensors") for each in (tmp_path / "mean", two))
    for name, value in mean.items():
        middle = 2 * of_two[name].double() - last[name].double()
        assert torch.allclose(value.double(), (first[name].double() + middle + last[name].double()) / 3, atol=1e-6)
        assert not torch.equal(value, of_two[name])
    by_compare = compared(served, str(two), RUN, "--average", "2")["models"]
    assert by_compare[1]["difference"]["nats"] == pytest.approx(0, abs=1e-6)
    code, said = served.outerstep("run", "export", RUN, "--average", "4", "--out", str(tmp_path / "four"))[::2]
    assert (code, "has 3 states up to 2: average 3 of them at most" in said) == (3, True), said


def state_of(served: Served, run: str, number: int, tmp_path: Path) -> dict[str, torch.Tensor]:
    directory = tmp_path / f"state-{number}"
    assert served.outerstep("run", "export", run, "--round", str(number), "--out", str(directory))[0] == 0
    return load_file(directory / "model.safetensors")


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
def test_a_baseline_does_the_work_of_all_in_each_step(served: Served, running: InThread, tmp_path: Path) -> None:
    """So it is what several workers are compared with, at equal tokens."""
    text = Path(running.client().get(f"/v1/runs/{RUN}").json()["spec"]["data"]["source"])
    create = ["run", "create", "-", "--baseline", "--workers", "2"]
    code, out, err = served.outerstep(*create, stdin=spec(text))
    assert (code, out.split(":")[0]) == (0, f"run {RUN}-baseline is created"), err
    assert err == "one worker with 8 sequences per inner step, the work of 2\n"
    assert run_worker(worker_settings(running, f"{RUN}-baseline", tmp_path / "state")) == 0
    found = compared(served, RUN, f"{RUN}-baseline")["models"]
    assert found[1]["trained_tokens"] == 2 * found[0]["trained_tokens"]


def test_a_baseline_of_one_worker_is_no_baseline(served: Served) -> None:
    """min_workers is 1 by default, however many will come."""
    code, out, err = served.outerstep("run", "create", "-", "--baseline", stdin=spec(Path("text")))
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
