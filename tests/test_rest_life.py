"""In docs/rest.md the life of a worker equals a real coordinator's answers, and the tables equal the code."""

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

from protocol.messages import RunState, WorkerState

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "rest.md").read_text(encoding="utf-8")
WIRE_PAGE = (ROOT / "docs" / "wire-format.md").read_text(encoding="utf-8")
KIND = re.compile(r"[a-z]+(-[a-z]+)*")


def test_the_life_of_a_worker_is_current() -> None:
    written = runpy.run_path(str(ROOT / "docs" / "write_life.py"))["page"]()
    assert written == PAGE, "run: python -m docs.write_life"


def test_its_payloads_are_those_of_the_wire_format_s_example() -> None:
    shown = [re.sub(r"\s+", " ", block) for block in re.findall(r"```http\n(.*?)```", PAGE, re.DOTALL)]
    examples = re.findall(r"```hex\n(.*?)```", WIRE_PAGE, re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        rows = re.findall(r"^\s*((?:[0-9a-f]{2} ?)+)(?: {2,}|$)", example, re.MULTILINE)
        payload = " ".join(" ".join(rows).split())
        assert sum(payload in message for message in shown) == 1


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table below `heading`."""
    section = PAGE.partition(f"### {heading}\n")[2].partition("\n#")[0]
    return [re.split(r" ?\| ?", line.strip("|").strip()) for line in section.splitlines() if line.startswith("| `")]


def calls(name: str) -> Iterator[ast.Call]:
    """Yield every call of a function or method with this name in the coordinator."""
    for path in sorted((ROOT / "coordinator").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and name in (getattr(node.func, "id", ""), getattr(node.func, "attr", "")):
                yield node


def words(nodes: list[ast.expr]) -> list[str]:
    """Return the values of those `nodes` that are a slug or a kind of event."""
    constants = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [value for value in constants if KIND.fullmatch(value)]


def test_every_extension_member_and_no_other() -> None:
    members, retried = set(), set()
    for call in calls("Problem"):
        for keyword in call.keywords:
            (slug,) = words(call.args[:1])
            if keyword.arg == "retry_after_s":
                retried.add(slug)
            else:
                members.add((f"`{slug}`", f"`{keyword.arg}`"))
    assert {(row[0], row[1]) for row in rows("Extension members")} == members
    (sentence,) = re.findall(r"^`Retry-After` comes with (.*?);", PAGE, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`([a-z-]+)`", sentence)) == retried


def test_every_kind_of_event_with_its_data_and_no_other() -> None:
    recorded: dict[str, set[str]] = {}
    for call in calls("record"):
        for kind in words(call.args):
            recorded.setdefault(kind, set()).update(str(keyword.arg) for keyword in call.keywords)
    assert len(recorded) > 15
    states = [RunState.PAUSED, RunState.DRAINING, RunState.RUNNING, RunState.STOPPED]
    ends = [WorkerState.LOST, WorkerState.LEFT, WorkerState.EVICTED, WorkerState.BANNED]
    recorded |= {str(state): set() for state in states} | {str(state): {"worker"} for state in ends}
    # Recorded through a helper.
    recorded |= {
        "drained": set(),
        "storage-full": set(),
        "storage-room": set(),
        "storage-unavailable": set(),
        "readmitted": {"worker"},
    }

    on_the_page = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[1])) for row in rows("Kinds of events")}
    assert on_the_page == recorded
