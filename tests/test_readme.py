"""The commands and snippets of the README, and of the pages it leads to, run as they are against a real coordinator."""

import os
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.coordinator import coordinator_thread
from protocol.messages import Scope
from protocol.spec.run import parse_spec
from tests.support.text import replaced, write_text
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {"README": README} | {
    name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("data", "models", "multi-gpu", "scripts", "settings")
}
REMOTE = "https://coordinator.example.org"

# Replacements that shorten the example run; everything else of the README's spec stays as it is.
SMALL = {
    "llama-150m": "tiny",
    "sequence_length = 1024": "sequence_length = 32",
    "batch_size = 16": "batch_size = 2",
    "rounds = 200": "rounds = 2",
    "inner_steps = 500": "inner_steps = 2",
}


def blocks(language: str, page: str = "README") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL)


def shell(script: str, directory: Path, **environment: str) -> str:
    """Run a script with the tested `outerstep` on the PATH, stopping at the first failure."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **environment}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_picture_is_there_and_small() -> None:
    shown = re.findall(r'<img src="([^"]+)" alt="[^"]+"', README)
    assert len(shown) == README.count("<img ") >= 2
    for name in shown:
        assert (ROOT / name).is_file(), f"{name}: make screenshots"
    assert max(path.stat().st_size for path in (ROOT / "docs" / "pictures").iterdir()) < 200_000


def test_every_spec_on_the_pages_is_one() -> None:
    found = [block for page in PAGES for block in blocks("toml", page)]
    assert len(found) >= 3
    for block in found:
        parse_spec(block if "name" in tomllib.loads(block) else f'name = "r"\n{block}\n[sync]\nrounds = 1')


@pytest.mark.system
def test_a_run_works_as_the_readme_says(tmp_path: Path) -> None:
    _, serve, create, join = blocks("sh")
    toml, _ = blocks("toml")
    toml = replaced(toml, SMALL).replace('"/data/text"', f'"{write_text(tmp_path / "text", seed=1)}"')
    assert tomllib.loads(toml)["name"] == "my-run"
    (tmp_path / "run.toml").write_text(toml)
    assert re.search(r"^pip install -c constraints.txt '\.\[coordinator\]'$", serve, re.MULTILINE)
    assert "outerstep coordinator --data-dir ./data" in serve

    with coordinator_thread(tmp_path / "data") as running:
        local = create.replace("http://127.0.0.1:8470", running.url)
        assert local != create
        shell(local, tmp_path)
        install, *rest = join.strip().splitlines()
        assert install == "pip install -c constraints.txt '.[worker]'"
        assert len(rest) == 2
        join = "\n".join(rest).replace(REMOTE, running.url).replace("--data-root /data", f"--data-root {tmp_path}")
        shell(join, tmp_path, XDG_STATE_HOME=str(tmp_path), HOME=str(tmp_path))
        shown = shell(
            "outerstep run export my-run --out ./model && outerstep run show my-run && outerstep run watch my-run",
            tmp_path,
            OUTERSTEP_URL=running.url,
            OUTERSTEP_TOKEN=running.admin_token,
        )
        assert "finished" in shown
        load = (
            'from transformers import AutoModelForCausalLM as M; print(M.from_pretrained("./model").num_parameters())'
        )
        assert shell(f"python -c '{load}'", tmp_path).strip() == "139584"


def own_loop() -> str:
    return blocks("python")[0]


def own_loop_with_a_loader() -> str:
    """The README's script, with the loop over a DataLoader of docs/scripts.md."""
    script = own_loop()
    (loader,) = (block for block in blocks("python", "scripts") if block.startswith("loader = "))
    head, _, _ = script.partition("    for unit in")
    data = "dataset = torch.randn(100, 4)\n"
    step = "loss = model(batch).square().mean(); loss.backward(); diloco.report_loss(loss); optimizer.step()"
    looped = textwrap.indent(loader.replace("...", step), "    ")
    return "from torch.utils.data import DataLoader\n" + head.replace("with DiLoCo", f"{data}with DiLoCo") + looped


@pytest.mark.system
@pytest.mark.parametrize("written", [own_loop, own_loop_with_a_loader])
def test_the_script_in_the_readme_trains(tmp_path: Path, written: Callable[[], str]) -> None:
    spec = blocks("toml")[1].replace("rounds = 100", "rounds = 3").replace("inner_steps = 100", "inner_steps = 5")
    assert tomllib.loads(spec)["sync"] == {"rounds": 3, "inner_steps": 5}
    with coordinator_thread(tmp_path / "data") as running:
        running.create_run(spec)
        (tmp_path / "train.py").write_text(written())
        token = running.token(Scope.WORKER)
        shell("python train.py", tmp_path, OUTERSTEP_URL=running.url, OUTERSTEP_TOKEN=token, HOME=str(tmp_path))
        with running.client() as client:
            info = client.get("/v1/runs/my-script").raise_for_status().json()
            (worker,) = client.get("/v1/runs/my-script/workers").raise_for_status().json()["items"]
    assert info["state"] == "finished"
    assert worker["state_digest"] == info["state_digest"]
