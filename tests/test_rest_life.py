"""docs/rest.md and docs/wire-format.md show the same payloads."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "rest.md").read_text(encoding="utf-8")
WIRE_PAGE = (ROOT / "docs" / "wire-format.md").read_text(encoding="utf-8")


def test_its_payloads_are_those_of_the_wire_format_s_example() -> None:
    shown = [re.sub(r"\s+", " ", block) for block in re.findall(r"```http\n(.*?)```", PAGE, re.DOTALL)]
    examples = re.findall(r"```hex\n(.*?)```", WIRE_PAGE, re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        rows = re.findall(r"^\s*((?:[0-9a-f]{2} ?)+)(?: {2,}|$)", example, re.MULTILINE)
        payload = " ".join(" ".join(rows).split())
        assert sum(payload in message for message in shown) == 1
