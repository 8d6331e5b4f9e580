"""docs/reliability.md names tests that exist."""

import re
from pathlib import Path

from tests.simulation.mutants import MUTANTS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 10
    for path, test in named:
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path} has no {test}"


def test_every_promise_names_what_shows_it() -> None:
    table = PAGE.split("## Promised")[1].split("## Not promised")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ")][2:]
    for _, promise, shown, _ in rows:
        assert "simulation" in shown or "::" in shown, promise


def test_the_page_counts_the_planted_bugs_right() -> None:
    assert f"plants {len(MUTANTS)} bugs" in PAGE
