"""What pydantic finds wrong, for people: in a run spec, a request, a setting or an index."""

import difflib
import re
import reprlib
from pathlib import Path
from typing import Any

from protocol.printable import printable
from protocol.spec.sections import NAME_PATTERN

_MOST = 200  # characters, or items, of a value that is told
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = _MOST
_short.maxlist = _short.maxtuple = 20


def explain(fault: Any, *, echo: bool = True) -> str:
    """Return one pydantic fault as a sentence: key, value, what is allowed. Without `echo` the value is not in it: it
    may be a secret, and the sentence be read by others than who gave it."""
    key = printable(".".join(str(part)[:_MOST] for part in fault["loc"]))
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
