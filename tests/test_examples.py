"""The scripts in examples/: each trains in two workers that end with the same model, and marks all of Outerstep's lines."""

import re
from pathlib import Path

import pytest

from harness.coordinator import coordinator_thread
from tests.support.cases import in_the_night
from tests.support.forks import Forked
from tests.support.shown import finished, workers_of
from tests.support.text import replaced, write_text
from tests.support.workers import script_environment

EXAMPLES = Path(__file__).parents[1] / "examples"
SPEC = (EXAMPLES / "example.toml").read_text(encoding="utf-8")
SMALL = {"rounds = 20": "rounds = 2", "inner_steps = 50": "inner_steps = 3"}
# How many lines Outerstep adds or changes.
LINES = {"plain.py": 3, "trainer.py": 2, "lora.py": 2, "lightning_fit.py": 2, "accelerate_loop.py": 3}

# Run a script as if on another machine: a worker is named after its host.
ON_ANOTHER_MACHINE = """
import platform, runpy, sys
_, node, script, *_ = sys.argv
platform.node = lambda: node
sys.argv = sys.argv[2:]
runpy.run_path(script, run_name="__main__")
"""


def code(name: str) -> list[str]:
    """The script's lines after its docstring."""
    return (EXAMPLES / name).read_text(encoding="utf-8").split('"""', 2)[2].splitlines()


def test_every_example_is_counted() -> None:
    assert sorted(LINES) == sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", LINES)
def test_all_lines_of_outerstep_are_marked(name: str) -> None:
    marked = [line for line in code(name) if "# +" in line]
    others = [line for line in code(name) if "# +" not in line]
    assert len(marked) == LINES[name]
    assert [line for line in others if re.search("diloco|outerstep", line, re.IGNORECASE)] == []


@pytest.mark.system
@pytest.mark.parametrize(
    "name", ["plain.py", "lora.py", *(in_the_night(name) for name in LINES if name not in ("plain.py", "lora.py"))]
)
def test_two_workers_end_with_the_same_model(tmp_path: Path, name: str) -> None:
    spec = SPEC.replace("[sync]", '[sync]\nwait = "always"') + "[members]\nmin_workers = 2\n"
    spec = replaced(spec, SMALL)
    text = write_text(tmp_path / "text", seed=1)
    file = next(path for path in sorted(text.rglob("*")) if path.is_file())
    with coordinator_thread(tmp_path / "coordinator") as running:
        running.create_run(spec)
        workers = {}
        for worker in "ab":
            home = tmp_path / worker
            home.mkdir()
            environment = script_environment(running, home)
            log, arguments = home / "log", [worker, str(EXAMPLES / name), str(file)]
            workers[log] = Forked(ON_ANOTHER_MACHINE, arguments, environment, log, log, home)
        for log, process in workers.items():
            assert process.wait() == 0, log.read_text()
        run, told = finished(running, "example"), workers_of(running, "example")
    assert run.state == "finished"
    assert [each.state_digest for each in told] == [run.state_digest] * 2
    assert run.tokens == 2 * 2 * 3 * run.spec.unit_tokens
