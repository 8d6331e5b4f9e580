"""docs/rest.md lists every request of the OpenAPI document with the tokens that may send it, every problem, and no others.
Its payloads are those of docs/wire-format.md."""

import re
from pathlib import Path
from typing import Any

from docs.write_protocol import openapi
from protocol.errors import PROBLEM_PREFIX, PROBLEMS, Remedy

OPENAPI = openapi()
DOCS = Path(__file__).parents[1] / "docs"
PAGE, WIRE_PAGE = ((DOCS / name).read_text(encoding="utf-8") for name in ("rest.md", "wire-format.md"))


def nameless(path: str) -> str:
    return re.sub(r"\{\w+\}", "{}", path)


def who(operation: dict[str, Any]) -> str:
    """Return the kinds of tokens in an operation's `security`, as the page writes them."""
    if "security" not in operation:
        return "anybody"
    (needed,) = operation["security"]
    return ", ".join(needed["HTTPBearer"]) or "any"


def test_every_request_and_no_other_and_who_may_send_it() -> None:
    served = {
        (method.upper(), nameless(path)): who(operation)
        for path, methods in OPENAPI["paths"].items()
        for method, operation in methods.items()
    }
    rows = re.findall(r"^\| `([A-Z]+) (/\S+)` \| ([^|]+) \|", PAGE, re.MULTILINE)
    assert {(method, nameless(path)): said for method, path, said in rows} == served


def test_every_problem_and_no_other() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| (\d{3}) \| (\w+) \| (.*) \|$", PAGE, re.MULTILINE)
    assert rows == [(slug, str(int(row.status)), row.remedy, row.title) for slug, row in PROBLEMS.items()]
    for remedy in Remedy:
        assert f"- `{remedy}`: " in PAGE
    assert PROBLEM_PREFIX in PAGE


def test_its_payloads_are_those_of_the_wire_format_s_example() -> None:
    shown = [re.sub(r"\s+", " ", block) for block in re.findall(r"```http\n(.*?)```", PAGE, re.DOTALL)]
    examples = re.findall(r"```hex\n(.*?)```", WIRE_PAGE, re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        rows = re.findall(r"^\s*((?:[0-9a-f]{2} ?)+)(?: {2,}|$)", example, re.MULTILINE)
        payload = " ".join(" ".join(rows).split())
        assert sum(payload in message for message in shown) == 1
