"""docs/scripts.md: its code parses, and what it names of `DiLoCo` and `connect` exists."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from outerstep import DiLoCo

PAGE = (Path(__file__).parents[1] / "docs/scripts.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PARAMETERS = {*inspect.signature(DiLoCo.__init__).parameters, *inspect.signature(DiLoCo.connect).parameters}


@pytest.mark.parametrize("block", BLOCKS)
def test_the_code_parses(block: str) -> None:
    ast.parse(block)


def test_what_a_script_uses_of_diloco_exists() -> None:
    named = set(re.findall(r"\bdiloco\.(\w+)", PAGE))
    assert named >= {"units", "batches", "unit_sampler", "training_set", "upcoming", "data_seed", "weights"}
    assert [name for name in named if not hasattr(DiLoCo, name)] == []


def test_options_of_connect_exist() -> None:
    calls = re.findall(r"connect\(([^`]*)\)", PAGE)
    named = {option for call in calls for option in re.findall(r"(\w+)=", call)}
    assert named >= {"run", "scheduler", "evaluate", "data", "max_up"}
    assert named <= PARAMETERS
