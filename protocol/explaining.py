"""What pydantic finds wrong, for people: in a run spec, a request, a setting or an index."""

import difflib
import re
import reprlib
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from protocol.printable import printable
from protocol.spec.sections import NAME_PATTERN

_MOST = 200  # characters, or items, of a value that is told
# What pydantic calls a member of a union, which it puts behind the key: none of it is in what was given.
_MEMBER = re.compile(
    r"constrained-\w+|(str|int|float|bool|bytes|path|none|list|dict|tuple|set|any|datetime|date|url)"
    r"|[a-z][a-z-]*\[.*\]|[A-Z]\w*",
    re.DOTALL,
)
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = _MOST
_short.maxlist = _short.maxtuple = 20


def key_of(fault: Any) -> str:
    """Return the dotted key that a fault is about, as whoever gave it knows it; empty for the whole."""
    first, *rest = fault["loc"] or ("",)
    # Behind the first part come the members of unions; a number is a place in a list.
    parts = [first, *(part for part in rest if isinstance(part, int) or not _MEMBER.fullmatch(part))]
    return printable(".".join(str(part)[:_MOST] for part in parts))


def explain_all(
    faults: Iterable[Any], *, echo: bool = True, most: int | None = None, one: Callable[..., str] | None = None
) -> str:
    """Return pydantic's faults as sentences, `most` of them at most, one for each key: where a key may be one of
    several things, pydantic has a fault for each. `one` explains one, by default `explain`."""
    sentences: dict[str, str] = {}
    for fault in faults:
        key = key_of(fault)
        if key not in sentences:
            sentences[key] = one(fault) if one else explain(fault, echo=echo)
        elif (also := _said(fault, echo)) not in sentences[key]:
            sentences[key] += f"; or {also}"
    return "; ".join(islice(sentences.values(), most))


def _said(fault: Any, echo: bool) -> str:
    message = _message(fault, fault["input"] if echo else {}).removeprefix("Value error, ")
    return f"{message[0].lower()}{message[1:]}"


def explain(fault: Any, *, echo: bool = True) -> str:
    """Return one pydantic fault as a sentence: key, value, what is allowed. Without `echo` the value is not in it: it
    may be a secret, and the sentence be read by others than who gave it."""
    key = key_of(fault)
    if fault["type"] == "extra_forbidden":
        return f"{key}: there is no such key"
    if fault["type"] == "missing":
        return f"{key}: this key is missing"
    value = (str(fault["input"]) if isinstance(fault["input"], Path) else fault["input"]) if echo else {}
    value = value[:_MOST] if isinstance(value, str) else value
    message = _message(fault, value).removeprefix("Value error, ")
    if not key:
        return f"{message}" if isinstance(value, dict) else f"{_short.repr(value)}: {message}"
    shown = "" if isinstance(value, dict) else f" = {_short.repr(value)}"
    return f"{key}{shown}: {message[0].lower()}{message[1:]}"


def _message(fault: Any, value: Any) -> str:
    message: str = fault["msg"]
    if fault["type"] == "literal_error":
        known = re.findall(r"'([^']*)'", fault["ctx"]["expected"])
        alike = difflib.get_close_matches(str(value or "").lower(), known, 1)
        return f"{message}; did you mean {alike[0]!r}?" if alike else message
    if fault["type"] != "string_pattern_mismatch":
        return message
    pattern: str = fault["ctx"]["pattern"]
    if pattern == NAME_PATTERN:
        valid = re.sub(r"[^a-z0-9._-]+", "-", str(value or "").lower()).strip("._-")[:63] or "my-run"
        return (
            "a name is of small letters, digits, '.', '_' and '-', begins with one of the first two, and has 63 at "
            f"most, such as {valid!r}"
        )
    if pattern.endswith((r"[\w.]+:\w+$", r"[\w.]+:\w+)$")):
        *words, last = [*pattern.removeprefix("^").lstrip("(").split("|")[:-1], "module:function"]
        choices = f"{', '.join(words)} or {last}" if words else last
        return f"give {choices}, such as 'my_module:my_function'"
    return message
