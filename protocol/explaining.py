"""What pydantic finds wrong, for people: in a run spec, a request, a setting or an index."""

from typing import Any


def explain(fault: Any) -> str:
    """Return one pydantic fault as a sentence: key, value, what is allowed."""
    key = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"{key}: there is no such key"
    if fault["type"] == "missing":
        return f"{key}: this key is missing"
    message = fault["msg"].removeprefix("Value error, ")
    value = fault["input"]
    if not key:
        return f"{message}" if isinstance(value, dict) else f"{value!r}: {message}"
    shown = "" if isinstance(value, dict) else f" = {value!r}"
    return f"{key}{shown}: {message[0].lower()}{message[1:]}"
