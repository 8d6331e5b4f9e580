"""How a training goes, for people, as workers log it and operators watch it: time, what is to go, the losses, names in
order, and counted nouns."""

import math
import re
import statistics
from collections.abc import Sequence
from typing import TypeGuard

UNKNOWN = "–"
SHOWN_LOSSES = 20
PACE_ROUNDS = 20  # the last rounds, by which it is guessed what is to go
OVERDUE = 3.0  # times its usual length, and at least OVERDUE_S: then a round tells nothing of how long others take
OVERDUE_S = 30.0
_BARS = "▁▂▃▄▅▆▇█"


def natural(name: str) -> tuple[object, ...]:
    """Return the key that sorts names as people count: box-4 before box-14."""
    parts = re.split(r"([0-9]+)", name)  # text and digits in turn, so that like is compared with like
    numbers = (digits.lstrip("0") for digits in parts[1::2])
    return *((text, len(number), number) for text, number in zip(parts[::2], [*numbers, ""], strict=True)), (name,)


def counted(number: int, noun: str) -> str:
    """Return the number with its noun: '1 worker', '2 workers'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration_text(seconds: float | None) -> str:
    """Format seconds: 75.2 -> '1 min 15 s'; below a minute with one decimal."""
    if seconds is None:
        return UNKNOWN
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def rate_text(rate: float | None) -> str:
    """Format a learning rate: 0.00038 -> '3.80e-04'."""
    return UNKNOWN if rate is None else f"{rate:.2e}"


def to_go_s(lengths: Sequence[float], left: int, spent_s: float = 0.0) -> float | None:
    """Return what the `left` next rounds will take, in seconds, by the `lengths` of the last ones; None before there
    is one, and while the next one is overdue. `spent_s`: since the last one was over.

    By their median, which a pause of an hour leaves alone. The next round is over at once, at the earliest.
    """
    if not lengths or left < 0:
        return None
    length = statistics.median(lengths)
    if left and spent_s > max(OVERDUE * length, OVERDUE_S):
        return None
    return max(left * length - spent_s, max(left - 1, 0) * length)


def sparkline(losses: Sequence[float | None]) -> str:
    """Return the last losses as bars from the least to the largest: '█▆▃▁'; a dash for each that is not known."""
    shown = losses[-SHOWN_LOSSES:]
    known = [loss for loss in shown if _is_known(loss)]
    if not known:
        return UNKNOWN
    low, span = min(known), max(known) - min(known)

    def bar(loss: float) -> str:
        return _BARS[round((loss - low) / span * (len(_BARS) - 1))] if span else _BARS[0]

    return "".join(bar(loss) if _is_known(loss) else UNKNOWN for loss in shown)


def _is_known(loss: float | None) -> TypeGuard[float]:
    return loss is not None and math.isfinite(loss)
