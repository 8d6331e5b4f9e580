"""What somebody may have meant who named what is not there."""

import difflib
from collections.abc import Collection, Iterable

from pydantic import BaseModel

SHOWN = 5


def those_here(wanted: str, known: Collection[str], what: str) -> str:
    """Return a few of the names that are there, the nearest to `wanted` first: "runs here: a, b and 3 more"."""
    if not known:
        return f"there are no {what} here yet"
    nearest = difflib.get_close_matches(wanted, known, SHOWN)
    shown = [*nearest, *(name for name in sorted(known) if name not in nearest)][:SHOWN]
    more = f" and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
    return f"{what} here: {', '.join(shown)}{more}"


def meant(key: str, model: type[BaseModel]) -> str | None:
    """Return the dotted key of `model`, or of a section of it, that the unknown `key` may stand for: one that is
    spelled alike, or has this name in another section. None if there is none."""
    keys = list(_keys(model))
    leaf = key.rpartition(".")[2]
    alike = difflib.get_close_matches(key, keys, 1, 0.8)
    return next(iter(alike or [each for each in keys if each.rpartition(".")[2] == leaf]), None)


def _keys(model: type[BaseModel], prefix: str = "") -> Iterable[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from _keys(section, f"{prefix}{name}.")
