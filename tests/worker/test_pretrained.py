"""Trained models: what is loaded of a directory or of the hub, and what is refused."""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch import nn

from protocol.spec.run import RunSpec, parse_spec
from tests.support.http_server import Handler, serving
from tests.support.trained import save_trained
from worker.errors import ModelError
from worker.models.building import build_model, has_initial_parameters, load_weights, logits_of
from worker.models.pretrained import Pretrained

CPU = torch.device("cpu")
TOKENS = torch.arange(20)[None]


def spec(source: str = "me/model", more: str = "") -> RunSpec:
    return parse_spec(f'name = "r"\n[model]\npretrained = "{source}"\n{more}\n[sync]\nrounds = 1\n')


def loaded(directory: Path | str, more: str = "") -> nn.Module:
    run = spec(str(directory), more)
    model = build_model(run, CPU)
    load_weights(model, run.model)
    return model


def test_the_shape_comes_at_once_and_the_weights_when_they_are_asked_for(tmp_path: Path) -> None:
    trained = save_trained(tmp_path)
    run = spec(str(tmp_path))
    (tmp_path / "model.safetensors").rename(tmp_path / "elsewhere")
    model = build_model(run, CPU)
    assert not has_initial_parameters(model, run.model)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    (tmp_path / "elsewhere").rename(tmp_path / "model.safetensors")
    parameters = list(model.parameters())
    load_weights(model, run.model)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True)), "an optimizer holds them"
    for name, tensor in trained.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor.float()), name
    torch.testing.assert_close(logits_of(model, TOKENS), logits_of(trained.float(), TOKENS))
    assert model.generation_config.temperature == 0.5  # type: ignore[union-attr]


def test_weights_in_several_files(tmp_path: Path) -> None:
    trained = save_trained(tmp_path, shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(loaded(tmp_path).state_dict()["lm_head.weight"], trained.lm_head.weight.float())


def test_tied_embeddings(tmp_path: Path) -> None:
    trained = save_trained(tmp_path, tie_word_embeddings=True)
    model = loaded(tmp_path)
    torch.testing.assert_close(logits_of(model, TOKENS), logits_of(trained.float(), TOKENS))


def test_what_does_not_travel_is_loaded_by_everybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that is saved with the model is in no fragment: a worker that had built it from the configuration alone
    would have trained with another one than the worker that seeded."""
    from transformers import LlamaForCausalLM

    built = LlamaForCausalLM.__init__

    def with_buffer(self: nn.Module, *arguments: object, **options: object) -> None:
        built(self, *arguments, **options)  # type: ignore[arg-type]
        self.register_buffer("bias_of_experts", torch.zeros(3))

    monkeypatch.setattr(LlamaForCausalLM, "__init__", with_buffer)
    save_trained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["bias_of_experts"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    run = spec(str(tmp_path))
    model = build_model(run, CPU)
    assert has_initial_parameters(model, run.model)
    assert torch.equal(model.state_dict()["bias_of_experts"], torch.ones(3))
    assert torch.equal(model.state_dict()["lm_head.weight"], tensors["lm_head.weight"].float())


# --- what is refused ----------------------------------------------------------------------------------------------

Spoil = Callable[[Path], object]


def change(name: str, value: torch.Tensor | None) -> Spoil:
    """Give a tensor of the weights another value, or take it out."""

    def spoil(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        tensors.pop(name, None)
        save_file(tensors | ({} if value is None else {name: value}), directory / "model.safetensors", {"format": "pt"})

    return spoil


def configure(**changes: object) -> Spoil:
    def spoil(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


HEAD, NORM = "lm_head.weight", "model.norm.weight"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        *(
            (
                change(NORM, torch.tensor([1.0] * 15 + [bad], dtype=dtype)),
                "model.safetensors: tensor model.norm.weight has values that are not finite",
            )
            for bad in (float("nan"), float("inf"), float("-inf"))
            for dtype in (torch.bfloat16, torch.float32)
        ),
        (change(HEAD, None), "the weights lack 1 tensors of the model that config.json describes: lm_head.weight"),
        (change("model.extra", torch.ones(1)), "the weights also have 1 tensors .*: model.extra"),
        (change(NORM, torch.ones(8)), r"have in another shape 1 tensors .*: model.norm.weight \[8\] instead of \[16\]"),
        (configure(num_hidden_layers=1), r"the weights also have 9 tensors .*, …"),
        (configure(num_hidden_layers=3), r"the weights lack 9 tensors"),
        (configure(model_type="no-such-type"), "config.json: transformers rejects it"),
        (configure(hidden_size="wide"), "rejects it .*: Validation error for field 'hidden_size': .* expected int, got"),
        (configure(num_attention_heads=3), r"hidden size \(16\) is not a multiple of the number of attention heads"),
        (configure(num_attention_heads=0), r"config.json: transformers rejects it \(ZeroDivisionError"),
        (configure(hidden_act="nope"), r"transformers cannot build model.pretrained = .* \(KeyError: 'nope'\)"),
        (configure(vocab_size=-1), "transformers cannot build model.pretrained = .*negative dimension"),
        (configure(model_type="t5"), "transformers cannot build model.pretrained = .*: Unrecognized configuration class"),
        (configure(quantization_config={"quant_method": "fp8"}), "quantised model, which cannot be trained"),
        (lambda path: (path / "config.json").write_text("{"), "config.json: transformers rejects it"),
        (lambda path: (path / "config.json").unlink(), "has no config.json; .*adapters"),
        (lambda path: (path / "adapter_config.json").write_text("{}"), "adapter_config.json"),
        (lambda path: (path / "model.safetensors").unlink(), "has neither model.safetensors nor model.safetensors.index"),
        (lambda path: (path / "model.safetensors").write_bytes(b"nonsense"), "model.safetensors is damaged: .*fetch it"),
        (
            lambda path: (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-1]),
            "model.safetensors is damaged: .*fetch it",
        ),
        (lambda path: (path / "generation_config.json").write_text("{"), "generation_config.json: transformers rejects"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, spoil: Spoil, message: str) -> None:
    save_trained(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ModelError, match=message) as refused:
        loaded(tmp_path)
    assert str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not an index of weights"),
        ('{"weight_map": {}}', "does not name files"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "does not name files"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors, .*model.safetensors.index.json, is missing"),
    ],
)
def test_an_index_that_lies(tmp_path: Path, index: str, message: str) -> None:
    save_trained(tmp_path, shard_size="4KB")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=message):
        loaded(tmp_path)


def test_code_beside_the_weights_is_not_run(tmp_path: Path) -> None:
    save_trained(tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('this ran')\n")
    configure(model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})(tmp_path)
    with pytest.raises(ModelError, match="transformers rejects it"):
        loaded(tmp_path)
    assert not [name for name in sys.modules if name.endswith("evil")]


@pytest.mark.covers("security:code-in-weights")
def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    trained = save_trained(tmp_path)
    torch.save(trained.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="other formats can hold code"):
        loaded(tmp_path)


@pytest.mark.parametrize("source", ["/no/such/directory", "./model", "~/model", "a/b/c"])
def test_a_directory_that_is_not_there(source: str) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        build_model(spec(source), CPU)


@pytest.mark.covers("security:code-in-weights")
def test_no_part_of_a_configuration_names_code(tmp_path: Path) -> None:
    """Of a part that has some transformers asked on the terminal whether to run it."""
    code = {"AutoModel": "somebody/model--modeling.Model"}
    part = {"model_type": "persimmon", "auto_map": code}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "fuyu", "auto_map": code, "text_config": part}))
    config = Pretrained(str(tmp_path), None).config()
    assert config.text_config.model_type == "persimmon"
    assert "auto_map" not in json.dumps(config.to_dict())


def test_a_revision_is_of_the_hub(tmp_path: Path) -> None:
    save_trained(tmp_path)
    with pytest.raises(ModelError, match="is a directory.* model.revision = 'v1'"):
        build_model(spec(str(tmp_path), 'revision = "v1"'), CPU)


# --- models of the hub, which a server of the test's own stands for ------------------------------------------------


COMMIT, NEWER = "c" * 40, "d" * 40


class Hub(Handler):
    """One repository, `me/model`, as files of a directory per commit."""

    commits: dict[str, Path]
    revisions: dict[str, str]
    pushed: dict[str, str]  # revisions once somebody has asked for a config.json
    asked: list[str]

    def do_HEAD(self) -> None:  # noqa: N802
        self._answer(body=False)

    def do_GET(self) -> None:  # noqa: N802
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        self.asked.append(self.path)
        repository, _, rest = self.path.removeprefix("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        commit = self.revisions.get(revision, revision)
        directory = self.commits.get(commit)
        fault = "RepoNotFound" if repository != "me/model" else "RevisionNotFound" if directory is None else ""
        content = b""
        if directory is not None and not fault:
            path = directory / name
            fault = "" if path.is_file() else "EntryNotFound"
            content = b"" if fault else path.read_bytes()
        self.send_response(404 if fault else 200)
        if fault:
            self.send_header("X-Error-Code", fault)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)
        if name == "config.json":
            self.revisions.update(self.pushed)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """The hub with one commit, "main", of a model in several files."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    save_trained(tmp_path / COMMIT, shard_size="4KB")
    Hub.commits, Hub.revisions, Hub.pushed, Hub.asked = {COMMIT: tmp_path / COMMIT}, {"main": COMMIT}, {}, []
    with serving(Hub) as url:
        use(url, monkeypatch)
        yield Hub


def use(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def head_of(run: RunSpec) -> torch.Tensor:
    model = build_model(run, CPU)
    load_weights(model, run.model)
    return model.state_dict()["lm_head.weight"]


def test_the_shape_needs_no_weights_and_the_weights_are_those_of_the_hub(hub: type[Hub], tmp_path: Path) -> None:
    run = spec()
    model = build_model(run, CPU)
    assert not [path for path in hub.asked if "safetensors" in path]
    load_weights(model, run.model)
    assert torch.equal(model.state_dict()["lm_head.weight"], save_trained(tmp_path / "same").lm_head.weight.float())


@pytest.mark.covers("security:changed-data")
def test_all_files_are_of_one_commit(hub: type[Hub], tmp_path: Path) -> None:
    """The branch moves on between the configuration and the weights."""
    newer = save_trained(tmp_path / NEWER, seed=8, shard_size="4KB").lm_head.weight.float()
    hub.commits[NEWER] = tmp_path / NEWER
    run = spec()
    model = build_model(run, CPU)
    hub.pushed = {"main": NEWER}
    load_weights(model, run.model)
    assert hub.revisions == {"main": NEWER}
    older = model.state_dict()["lm_head.weight"]
    assert not torch.equal(older, newer)
    assert torch.equal(head_of(spec()), newer)
    assert torch.equal(head_of(spec(more=f'revision = "{COMMIT}"')), older)


def test_a_branch_that_moves_on_to_another_shape(hub: type[Hub], tmp_path: Path) -> None:
    """Between the worker's start and its seeding."""
    run = spec()
    model = build_model(run, CPU)
    save_trained(tmp_path / NEWER, num_hidden_layers=3)
    hub.commits[NEWER], hub.revisions = tmp_path / NEWER, {"main": NEWER}
    with pytest.raises(ModelError, match="'me/model' has changed .* model.revision"):
        load_weights(model, run.model)


def test_what_was_fetched_once_serves_while_the_hub_is_away(hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    before = head_of(spec())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    assert torch.equal(head_of(spec()), before)
    assert len(hub.asked) == asked


def test_a_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the library's own attempts, half a minute
    use("http://127.0.0.1:9", monkeypatch)
    remedy = "a directory with the model's files"
    with pytest.raises(ModelError, match=f"'me/model' is not a directory .* config.json .*; .*{remedy}"):
        build_model(spec(), CPU)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=f"config.json cannot be fetched .*; .*{remedy}"):
        build_model(spec(), CPU)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (spec("you/model"), "'you/model' is not a directory .* config.json cannot be fetched"),
        (spec(more='revision = "v9"'), "'me/model' is not a directory .* config.json cannot be fetched"),
        (spec("not a name"), "'not a name' is not a directory"),
    ],
)
def test_a_repository_that_is_not_there(hub: type[Hub], run: RunSpec, message: str) -> None:
    with pytest.raises(ModelError, match=message) as refused:
        build_model(run, CPU)
    assert "\n" not in str(refused.value)


def test_a_repository_without_safetensors(hub: type[Hub]) -> None:
    (hub.commits[COMMIT] / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match="'me/model' has neither model.safetensors nor model.safetensors.index.json"):
        head_of(spec())
