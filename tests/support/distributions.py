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
    """Names of all distributions that `requirements` bring, as installed here."""
    todo, seen = [Requirement(text) for text in requirements], set[str]()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name not in seen and not (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            seen.add(name)
            todo += [Requirement(text) for text in importlib.metadata.requires(name) or []]
    return seen
