"""docs/rounds.md is what docs/write_rounds.py writes from coordinator/run/decide.py."""

import runpy
from pathlib import Path

from coordinator.run.decide import TRANSITIONS

DOCS = Path(__file__).parents[1] / "docs"


def test_the_page_is_current() -> None:
    written = runpy.run_path(str(DOCS / "write_rounds.py"))["page"]()
    assert (DOCS / "rounds.md").read_text(encoding="utf-8") == written, "run: python docs/write_rounds.py"


def test_every_state_is_explained() -> None:
    page = (DOCS / "rounds.md").read_text(encoding="utf-8")
    for state, outcomes in TRANSITIONS.items():
        assert f"- **{state}**:" in page
        for what in outcomes:
            assert f'"{what}" is' in page or f"- **{what}**:" in page, what
