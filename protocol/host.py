"""The facts that a worker reports about its machine, and their limits."""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

MAX_FACTS, MAX_NAME, MAX_TEXT, MAX_PHASE = 32, 64, 256, 32  # facts, and characters

Tell = Literal["all", "some", "nothing"]
HostValue = str | int | float | bool | None


def _told(host: Any) -> Any:
    """Return `host`. Raises ValueError for more, longer or other facts than a coordinator keeps, before they are looked
    at one by one."""
    if not isinstance(host, dict):
        return host
    if len(host) > MAX_FACTS:
        raise ValueError(f"{len(host)} facts about a machine; tell {MAX_FACTS} at most")
    for name, value in host.items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise ValueError(f"a fact is named by 1 to {MAX_NAME} characters that can be printed, not {_short(name)}")
        if not _is_fact(value):
            raise ValueError(
                f"{name} = {_short(value)}: give a text that can be printed, of {MAX_TEXT} characters at most, a "
                "finite number, true, false or null"
            )
    return host


ToldHost = Annotated[dict[str, HostValue], BeforeValidator(_told)]


def _is_fact(value: Any) -> bool:
    match value:
        case None | bool():
            return True
        case int():
            return -(1 << 63) <= value < 1 << 63
        case float():
            return math.isfinite(value)
        case str():
            return len(value) <= MAX_TEXT and value.isprintable()
        case _:
            return False


def _short(value: Any) -> str:
    """Return what is wrong, in short, without making a long text of it first."""
    return repr(value[:MAX_NAME]) if isinstance(value, str) else type(value).__name__
