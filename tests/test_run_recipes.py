"""The recipes: each trains in miniature."""

import tomllib
from pathlib import Path

import pytest

from docs import write_recipes
from harness.coordinator import coordinator_thread
from outerstep.common.exit_codes import Exit
from protocol.spec.run import parse_spec
from tests.support.miniature import SMALL, miniature
from tests.support.shown import finished, workers_of
from tests.support.workers import worker_settings
from worker.agent import run_worker

RECIPES = sorted(write_recipes.FOLDER.glob("*.toml"))
OFTEN = {"opendiloco-150m-h500", "muloco-150m", "qlora-32b"}  # trained before a merge; the others are like one of these


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=pytest.mark.system if path.stem in OFTEN else pytest.mark.nightly)
        for path in RECIPES
    ],
)
def test_a_recipe_trains_in_miniature(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker on a real coordinator, to the end."""
    text = path.read_text(encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if "[model.lora]" in text:
        pytest.importorskip("peft", reason="needs: pip install 'outerstep[peft]'")
    if 'base = "nf4"' in text:
        pytest.importorskip("bitsandbytes", reason="needs: pip install 'outerstep[qlora]'")
    small = miniature(text, tmp_path)
    name = parse_spec(text).name
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        coordinator.create_run(small)
        assert run_worker(worker_settings(coordinator, name, tmp_path / "a")) == Exit.DONE
        run, (worker,) = finished(coordinator, name), workers_of(coordinator, name)
    assert (run.state, run.state_digest) == ("finished", worker.state_digest)
    of_unit = run.data.unit_tokens if run.data is not None else None  # those that are trained on, in conversations
    assert run.tokens == run.spec.total_inner_steps * (of_unit or run.spec.unit_tokens)
    assert run.held_out_loss is not None


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_a_miniature_changes_only_sizes(path: Path, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    whole, small = tomllib.loads(text), tomllib.loads(miniature(text, tmp_path))
    for section, keys in whole.items():
        if isinstance(keys, dict) and section != "model":
            cut = {*SMALL.get(section, {}), "source", "tokenizer"}
            assert {key: value for key, value in keys.items() if key not in cut}.items() <= small[section].items()
            assert small[section].keys() <= keys.keys() | SMALL.get(section, {}).keys() | {"tokenizer"}
    assert whole["name"] == small["name"] == path.stem
