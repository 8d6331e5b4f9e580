"""What a worker says of its machine, as it may be told and as it is shown."""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from protocol.printable import printable

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


def _shown(host: Any) -> Any:
    """Return `host` as far as it can be shown, of older coordinators and of rows that they wrote."""
    if not isinstance(host, dict):
        return host
    facts = list(host.items())[:MAX_FACTS]
    return {printable(str(name)[:MAX_NAME]): value if _is_fact(value) else _readable(value) for name, value in facts}


def shown_metrics(metrics: Any) -> Any:
    """Return `metrics` with a phase that can be shown."""
    if isinstance(metrics, dict) and isinstance(metrics.get("phase"), str):
        return {**metrics, "phase": printable(metrics["phase"])[:MAX_PHASE]}
    return metrics


ToldHost = Annotated[dict[str, HostValue], BeforeValidator(_told)]
ShownHost = Annotated[dict[str, HostValue], BeforeValidator(_shown)]


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


def _readable(value: Any) -> str:
    match value:
        case int():
            return "a large number"
        case float() | str():
            return printable(str(value)[:MAX_TEXT])[:MAX_TEXT]
        case _:
            return "what is no fact"


def _short(value: Any) -> str:
    """Return what is wrong, in short, without making a long text of it first."""
    return repr(value[:MAX_NAME]) if isinstance(value, str) else type(value).__name__
