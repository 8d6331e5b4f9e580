"""The planner's example in docs/operating.md is real. Commands and options of that page, the README and other pages exist.
The code of docs/scripts.md parses, and what it names of `DiLoCo` and `connect` exists."""

import ast
import inspect
import re
import shlex
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from outerstep import DiLoCo
from outerstep.cli import app

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
TOP = get_command(app)
NAMED = ("concepts", "data", "faq", "index", "models", "multi-gpu", "scripts", "tutorial")
OTHERS = [(ROOT / path).read_text(encoding="utf-8") for path in ("README.md", *(f"docs/{name}.md" for name in NAMED))]
BLOCK = re.compile(r"^```(?:sh|console|ini)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Commands on the pages: lines in code blocks, and code spans in the text, which may be over two lines.
IN_BLOCKS = [
    command
    for page in (PAGE, *OTHERS)
    for block in BLOCK.findall(page)
    for command in re.findall(r"outerstep (?:coordinator|compare|run|token|plan|doctor|worker|data)\b[^\n#]*", block)
]
IN_TEXT = [
    " ".join(command.split())
    for page in (PAGE, *OTHERS)
    for command in re.findall(r"`(outerstep [^`]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL))
]


def test_the_planner_prints_what_the_page_shows() -> None:
    (block,) = (block for block in BLOCK.findall(PAGE) if block.startswith("$ outerstep plan "))
    command, _, shown = block.partition("\n")
    done = CliRunner().invoke(app, shlex.split(command.removeprefix("$ outerstep ")), env={"COLUMNS": "200"})
    assert done.exit_code == 0
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    for line in shown.splitlines():
        if line != "…":
            assert " ".join(line.split()) in lines, line


@pytest.mark.parametrize("text", sorted({*IN_BLOCKS, *IN_TEXT}))
def test_the_commands_and_options_on_the_pages_exist(text: str) -> None:
    words = shlex.split(text)[1:]
    command = TOP
    while isinstance(command, TyperGroup) and words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    assert command is not TOP
    known = {option for each in command.params for option in [*each.opts, *each.secondary_opts]}
    options = {word for word in words if word.startswith("-")}
    assert options <= known, text
    if isinstance(command, TyperGroup):
        assert command.invoke_without_command, text


# --- docs/scripts.md -----------------------------------------------------------------------------------------------

SCRIPTS = (ROOT / "docs/scripts.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", SCRIPTS, re.MULTILINE | re.DOTALL)
PARAMETERS = {*inspect.signature(DiLoCo.__init__).parameters, *inspect.signature(DiLoCo.connect).parameters}


@pytest.mark.parametrize("block", SNIPPETS)
def test_the_code_parses(block: str) -> None:
    ast.parse(block)


def test_what_a_script_uses_of_diloco_exists() -> None:
    named = set(re.findall(r"\bdiloco\.(\w+)", SCRIPTS))
    assert named >= {"units", "batches", "unit_sampler", "training_set", "upcoming", "data_seed", "weights"}
    assert [name for name in named if not hasattr(DiLoCo, name)] == []


def test_options_of_connect_exist() -> None:
    calls = re.findall(r"connect\(([^`]*)\)", SCRIPTS)
    named = {option for call in calls for option in re.findall(r"(\w+)=", call)}
    assert named >= {"run", "scheduler", "evaluate", "data", "max_up"}
    assert named <= PARAMETERS
