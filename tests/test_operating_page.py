"""docs/operating.md: its example output is real, and every alert has a section. Its commands and options, and those of the
README and of other pages, exist."""

import re
import shlex
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from outerstep.cli import app
from outerstep.plan import Workload, sync_cost
from protocol.spec.sections import CheckpointSpec
from tests.test_monitoring import ALERTS

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
    for command in re.findall(r"outerstep (?:coordinator|migrate|run|token|plan|doctor|worker|data)\b[^\n#]*", block)
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


def test_every_alert_has_its_section_and_every_section_its_alert() -> None:
    alerts = PAGE.partition("\n## Alerts\n")[2]
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", alerts, re.MULTILINE | re.DOTALL))
    assert list(sections) == list(ALERTS)
    for name, section in sections.items():
        named = set(re.findall(r"outerstep ((?:run |coordinator )?\w+)", section))
        asked = set(re.findall(r"outerstep ((?:run |coordinator )?\w+)", ALERTS[name]["annotations"]["remedy"]))
        assert asked <= named | {"doctor"}, f"{name}: the alert has {asked - named}, which its section lacks"
        assert named or "curl" in section, name


def test_the_settings_on_the_page_exist() -> None:
    settings = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    for section, key in re.findall(r"`(members|checkpoints|guard|sync|model)\.(\w+)(?: = [^`]*)?`", PAGE):
        table = settings.partition(f"### `[{section}]`")[2].partition("\n### ")[0]
        assert f"| `{key}` |" in table, f"{section}.{key}"


def test_the_disk_sizes_follow_from_the_planner_and_the_defaults() -> None:
    parameters, workers, kept = 1_200_000_000, 8, CheckpointSpec()
    workload = Workload(parameters, 20e6, 100e6, 1.0, workers, 0.04, 100_000)
    moved = sync_cost(workload, "int4", "int4")
    state = 8 * parameters  # θ and u, fp32
    needed = {
        "checkpoints": state * (kept.keep + 1),
        "its own state": state * 2,
        "deltas": moved.download_bytes * kept.keep * kept.every_rounds,
        "contributions": moved.upload_bytes * workers * kept.every_rounds,
    }
    rows = re.findall(r"^\| disk: ([^|]+) \|[^|]+\| (\d+)[^|]* GB \|$", PAGE, re.MULTILINE)
    assert {name: int(gigabytes) for name, gigabytes in rows} == {
        name: round(size / 1e9) for name, size in needed.items()
    }
