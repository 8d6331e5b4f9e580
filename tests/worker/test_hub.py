"""Models of the Hugging Face hub, which a server of the test's own stands for."""

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from protocol.spec.run import RunSpec, parse_spec
from tests.support.http_server import Handler, serving
from tests.support.trained import save_trained
from worker.errors import ModelError
from worker.models.building import build_model, load_weights

CPU = torch.device("cpu")
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


def spec(source: str = "me/model", more: str = "") -> RunSpec:
    return parse_spec(f'name = "r"\n[model]\npretrained = "{source}"\n{more}\n[sync]\nrounds = 1\n')


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
