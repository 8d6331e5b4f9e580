"""docs/security.md: its files exist, its limits are those of the code, every kind of token is there."""

import re
from pathlib import Path
from typing import Any

import pytest

from coordinator.http import uploads
from coordinator.run import step_rates
from coordinator.screening import judging
from coordinator.settings import Settings
from coordinator.store import data_directory, partial_uploads
from coordinator.sync import admission
from coordinator.trust import evaluating, guard, quarantine, verdicts
from protocol import messages
from protocol.messages import Scope
from protocol.spec.sections import GuardSpec, RetentionSpec, SyncSpec

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
LINKS_OF = ["docs/security.md", "SECURITY.md"]

# A limit on the page is a default of one of these models, or a constant of one of these modules.
MODELS = (Settings, SyncSpec, GuardSpec, RetentionSpec)
MODULES = (
    *(judging, evaluating, quarantine, admission, guard, step_rates, verdicts, messages),
    *(uploads, partial_uploads, data_directory),
)
# Values in attacks, which are no limits.
CLAIMED = {"inner_steps_per_second", "carried", "factory", "aggregation", "weights_only"}


def rows(section: str) -> list[list[str]]:
    """Return the cells of each row of the tables in a section, without the headers."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [row for row in found if not set(row[0]) <= set("- ") and row[0] not in ("who", "row")]


ATTACKS = rows("Attacks")


def limits() -> dict[str, Any]:
    known: dict[str, Any] = {}
    for module in MODULES:
        known |= {name: value for name, value in vars(module).items() if name.isupper()}
    for model in MODELS:
        known |= {name: field.default for name, field in model.model_fields.items()}
    return known


@pytest.mark.parametrize("row", ATTACKS, ids=lambda row: row[0].strip("`"))
def test_an_attack_has_a_defence_or_says_what_is_not_defended(row: list[str]) -> None:
    assert len(row) == 4
    slug, attack, defence, undefended = row
    assert attack
    assert defence
    assert re.fullmatch("`[a-z-]+`", slug) or undefended, "a row without a test must say what is not defended"


def test_every_file_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`([\w.-]+/[\w./-]*)`", PAGE)) | {"pyproject.toml", "constraints.txt"}
    assert len(named) > 5
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_limit_on_the_page_is_the_code_s() -> None:
    stated = [each for each in re.findall(r"`(\w+) = ([^`]+)`", PAGE) if each[0] not in CLAIMED]
    assert len(stated) > 15
    known = limits()
    for name, value in stated:
        actual = known[name]
        assert (float(value) == actual) if isinstance(actual, int | float) else (value == actual), (name, actual)


def test_every_kind_of_token_is_trusted_with_something() -> None:
    who = {row[0] for row in rows("Who is trusted with what")}
    assert {*Scope, "member"} <= who


@pytest.mark.parametrize("page", LINKS_OF)
def test_every_link_leads_somewhere(page: str) -> None:
    source = ROOT / page
    for link in re.findall(r"\]\(([^)]+)\)", source.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = source.parent / path if path else source
        assert target.exists(), link
        if anchor:
            heads = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", head).strip().lower().replace(" ", "-") for head in heads}
            assert anchor in slugs, link


def test_readme_and_the_security_policy_link_to_the_page() -> None:
    assert "(SECURITY.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "(docs/security.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "(docs/security.md)" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")
