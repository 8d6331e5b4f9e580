"""docs/rest.md lists every request that the coordinator answers and every problem that it can answer with, and no others."""

import re
from pathlib import Path

from coordinator.app import create_app
from coordinator.service import Coordinator
from coordinator.settings import Settings
from protocol.errors import PROBLEM_PREFIX, PROBLEMS, Remedy
from protocol.messages import Action, RunState, Scope

PAGE = (Path(__file__).parents[1] / "docs" / "rest.md").read_text(encoding="utf-8")


def nameless(path: str) -> str:
    return re.sub(r"\{\w+\}", "{}", path)


def test_every_request_and_no_other(tmp_path: Path) -> None:
    coordinator = Coordinator(Settings(data_dir=tmp_path))
    try:
        paths = create_app(coordinator).openapi()["paths"]
    finally:
        coordinator.close()
    served = {(method.upper(), nameless(path)) for path, methods in paths.items() for method in methods}
    documented = {
        (method, nameless(path)) for method, path in re.findall(r"^\| `([A-Z]+) (/\S+)` \|", PAGE, re.MULTILINE)
    }
    assert documented - served == set()
    assert served - documented == set()


def test_every_problem_and_no_other() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| (\d{3}) \| (\w+) \| (.*) \|$", PAGE, re.MULTILINE)
    assert rows == [(slug, str(int(row.status)), row.remedy, row.title) for slug, row in PROBLEMS.items()]
    for remedy in Remedy:
        assert f"- `{remedy}`: " in PAGE
    assert PROBLEM_PREFIX in PAGE


def test_every_word_of_the_messages() -> None:
    for word in [*Action, *RunState, *Scope]:
        assert re.search(rf"`{word}`|\"{word}\"|\| {word} \|", PAGE), word
