"""Every row of docs/security.md and every promise of docs/reliability.md has a test, named by `pytest.mark.covers`."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
SECTIONS = {"security": "Attacks", "reliability": "Promised"}


def rows(page: str) -> dict[str, str]:
    """The rows of a page's table by `page:slug`, which is in the first cell. Rows without a slug are left out."""
    section = (DOCS / f"{page}.md").read_text(encoding="utf-8").split(f"\n## {SECTIONS[page]}\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| `([a-z-]+)` \|(.*)\|$", section, re.MULTILINE)
    assert len(dict(found)) == len(found), "a slug occurs twice"
    return {f"{page}:{slug}": row for slug, row in found}


def markers() -> dict[str, list[str]]:
    """The tests of each row that a `pytest.mark.covers` names. Files are read, not imported."""
    tests: dict[str, list[str]] = defaultdict(list)
    for path in TESTS.rglob("test_*.py"):
        source = path.read_text(encoding="utf-8")
        if "@pytest.mark.covers(" not in source or path == Path(__file__):
            continue
        for function in ast.walk(ast.parse(source)):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for decorator in function.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.covers":
                    assert function.name.startswith("test_"), f"{path}: {function.name} is no test"
                    for row in decorator.args:
                        tests[ast.literal_eval(row)].append(f"{path.relative_to(TESTS)}::{function.name}")
    return tests


def test_every_row_is_covered_and_every_marker_names_a_row() -> None:
    known = {row: text for page in SECTIONS for row, text in rows(page).items()}
    covered = markers()
    assert len(known) > 100
    assert not covered.keys() - known.keys(), "these rows do not exist"
    bare = {row for row in known.keys() - covered.keys() if "simulation" not in known[row].rpartition("|")[2]}
    assert not bare, "no test covers these rows"
