"""docs/scripts.md: its code parses, and what it names of `DiLoCo` and `connect` exists."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from outerstep import DiLoCo, DiLoCoOptimizer

PAGE = (Path(__file__).parents[1] / "docs/scripts.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PARAMETERS = {
    name
    for function in (DiLoCo.__init__, DiLoCo.connect, DiLoCoOptimizer.__init__)
    for name in inspect.signature(function).parameters
}


@pytest.mark.parametrize("block", BLOCKS)
def test_the_code_parses(block: str) -> None:
    ast.parse(block)


def test_what_a_script_uses_of_diloco_exists() -> None:
    named = set(re.findall(r"\bdiloco\.(\w+)", PAGE))
    assert named >= {"units", "batches", "unit_sampler", "training_set", "upcoming", "data_seed", "weights"}
    assert [name for name in named if not hasattr(DiLoCo, name)] == []


def test_options_of_connect_exist() -> None:
    calls = re.findall(r"(?:connect|DiLoCoOptimizer)\(([^`]*)\)", PAGE)
    named = {option for call in calls for option in re.findall(r"(\w+)=", call)}
    assert named >= {"run", "scheduler", "evaluate", "data", "max_up"}
    assert named <= PARAMETERS
