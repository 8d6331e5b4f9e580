"""docs/commands.md is what docs/write_commands.py writes, so every command and option is in it."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_current():
    written = runpy.run_path(str(DOCS / "write_commands.py"))["page"]()
    assert (DOCS / "commands.md").read_text(encoding="utf-8") == written, "run: python docs/write_commands.py"
