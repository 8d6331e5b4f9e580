"""What pyproject.toml asks for, and what that brings."""

import importlib.metadata
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BASE: list[str] = PROJECT["dependencies"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def closure(requirements: list[str]) -> set[str]:
    """Names of all distributions that `requirements` bring, with the extras that they ask for, as installed here."""
    todo: list[tuple[Requirement, str]] = [(Requirement(text), "") for text in requirements]
    seen = set[tuple[str, str]]()
    while todo:
        requirement, of_extra = todo.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": of_extra}):
            continue
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                todo += [(Requirement(text), extra) for text in importlib.metadata.requires(name) or []]
    return {name for name, _ in seen}
