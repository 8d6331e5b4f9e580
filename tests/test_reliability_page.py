"""docs/reliability.md: its figures."""

from pathlib import Path

from tests.simulation.mutants import MUTANTS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")


def test_the_page_counts_the_planted_bugs_right() -> None:
    assert f"plants {len(MUTANTS)} bugs" in PAGE
