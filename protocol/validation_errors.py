"""pydantic's validation errors as sentences for people: in a run spec, a request, a setting or an index."""

import difflib
import re
import reprlib
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from protocol.spec.sections import NAME_PATTERN
from protocol.text import printable

_MOST = 200  # characters, or items, of a value that is shown
# pydantic appends the names of union members to the location; they are not in the input.
_UNION_MEMBER = re.compile(
    r"constrained-\w+|(str|int|float|bool|bytes|path|none|list|dict|tuple|set|any|datetime|url)"
    r"|[a-z][a-z-]*\[.*\]|[A-Z]\w*",
    re.DOTALL,
)
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = _MOST
_short.maxlist = _short.maxtuple = 20


def key_of(error: Any) -> str:
    """Return the dotted key that an error is about, as it appears in the input; empty for the whole input."""
    first, *rest = error["loc"] or ("",)
    # Union members come after the first part; a number is an index into a list.
    parts = [first, *(part for part in rest if isinstance(part, int) or not _UNION_MEMBER.fullmatch(part))]
    return printable(".".join(str(part)[:_MOST] for part in parts))


def explain_all(
    errors: Iterable[Any], *, echo: bool = True, most: int | None = None, one: Callable[..., str] | None = None
) -> str:
    """Return at most `most` sentences about pydantic's errors, one per key: for a union, pydantic reports an error for
    each member. `one` explains a single error; default: `explain`."""
    sentences: dict[str, str] = {}
    for error in errors:
        key = key_of(error)
        if key not in sentences:
            sentences[key] = one(error) if one else explain(error, echo=echo)
        elif (also := _alternative(error, echo)) not in sentences[key]:
            sentences[key] += f"; or {also}"
    return "; ".join(islice(sentences.values(), most))


def _alternative(error: Any, echo: bool) -> str:
    message = _message(error, error["input"] if echo else {}).removeprefix("Value error, ")
    return f"{message[0].lower()}{message[1:]}"


def explain(error: Any, *, echo: bool = True) -> str:
    """Return one pydantic error as a sentence: key, value, what is allowed. Without `echo` it omits the value, which
    may be a secret, because others may read the sentence."""
    key = key_of(error)
    if error["type"] == "extra_forbidden":
        return f"{key}: unknown key"
    if error["type"] == "missing":
        return f"{key}: this key is missing"
    value = (str(error["input"]) if isinstance(error["input"], Path) else error["input"]) if echo else {}
    value = value[:_MOST] if isinstance(value, str) else value
    message = _message(error, value).removeprefix("Value error, ")
    if not key:
        return f"{message}" if isinstance(value, dict) else f"{_short.repr(value)}: {message}"
    shown = "" if isinstance(value, dict) else f" = {_short.repr(value)}"
    return f"{key}{shown}: {message[0].lower()}{message[1:]}"


def _message(error: Any, value: Any) -> str:
    message: str = error["msg"]
    if error["type"] == "literal_error":
        known = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        similar = difflib.get_close_matches(str(value or "").lower(), known, 1)
        return f"{message}; did you mean {similar[0]!r}?" if similar else message
    if error["type"] != "string_pattern_mismatch":
        return message
    pattern: str = error["ctx"]["pattern"]
    if pattern == NAME_PATTERN:
        valid = re.sub(r"[^a-z0-9._-]+", "-", str(value or "").lower()).strip("._-")[:63] or "my-run"
        return (
            "a name has at most 63 characters: lower-case letters, digits, '.', '_' and '-', and starts with a letter "
            f"or digit, such as {valid!r}"
        )
    if pattern.endswith((r"[\w.]+:\w+$", r"[\w.]+:\w+)$")):
        *words, last = [*pattern.removeprefix("^").lstrip("(").split("|")[:-1], "module:function"]
        choices = f"{', '.join(words)} or {last}" if words else last
        return f"give {choices}, such as 'my_module:my_function'"
    return message


def similar_key(key: str, model: type[BaseModel]) -> str | None:
    """Return the dotted key of `model` or of a section that the unknown `key` probably means: one with a similar
    spelling, or the same name in another section. None if there is none."""
    keys = list(_keys(model))
    leaf = key.rpartition(".")[2]
    similar = difflib.get_close_matches(key, keys, 1, 0.8)
    return next(iter(similar or [each for each in keys if each.rpartition(".")[2] == leaf]), None)


def _keys(model: type[BaseModel], prefix: str = "") -> Iterable[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from _keys(section, f"{prefix}{name}.")
