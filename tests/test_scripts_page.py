"""docs/scripts.md says the truth: its tests are there, and what it quotes is what is said."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs/scripts.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| ---") and not line.endswith("| test |")
]
# A message goes over several lines of the source.
SOURCE = re.sub(
    r"""["']\s*\n\s*f?["']""",
    "",
    "\n".join(
        path.read_text(encoding="utf-8")
        for package in ("worker", "coordinator", "outerstep")
        for path in sorted((ROOT / package).rglob("*.py"))
    ),
)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_is_a_test_and_says_what_is_said(row: list[str]) -> None:
    _, said, test = row
    name, _, function = test.strip("`").partition("::")
    assert re.search(rf"^def {function}\(", (ROOT / "tests" / name).read_text(encoding="utf-8"), re.MULTILINE)
    for sentence in re.findall("“(.*?)”", said):
        assert sentence in SOURCE


def test_the_page_has_its_rows() -> None:
    assert len(ROWS) > 30
