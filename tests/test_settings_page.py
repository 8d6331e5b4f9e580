"""docs/settings.md is what docs/write_settings.py writes, and every setting can really be set as it says."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]
WRITER = ROOT / "docs" / "write_settings.py"


def test_the_page_is_current() -> None:
    written = runpy.run_path(str(WRITER))["page"]()
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == written, "run: python docs/write_settings.py"


def test_the_least_run_spec_of_the_page_is_one() -> None:
    from protocol.spec.run import parse_spec

    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert parse_spec(page.partition("```toml\n")[2].partition("```")[0]).sync.rounds == 10
