"""Quantities as people write and read them: counts, bytes, rates, durations, losses, and the time that remains."""

import math
import re
import statistics
import sys
from collections.abc import Sequence
from typing import TypeGuard

UNKNOWN = "–"
SHOWN_LOSSES = 20
PACE_ROUNDS = 20  # the remaining time is estimated from this many rounds
OVERDUE = 3.0  # times the usual length, and at least OVERDUE_S: such a round does not predict the length of others
OVERDUE_S = 30.0
PREFIXES = ("", "k", "M", "G", "T", "P")
_BARS = "▁▂▃▄▅▆▇█"

_QUANTITY = re.compile(r"(?P<number>\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*(?P<unit>[a-z/]*)", re.IGNORECASE)
_FACTORS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_SECONDS = {"": 1, "us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86_400}


# --- parsing ------------------------------------------------------------------------------------------------------


def parse_count(text: str) -> int:
    """Parse a count: '1.2e9' or '1.2B' -> 1200000000. Raises ValueError."""
    return round(_parse(text, _FACTORS, "a number such as 1.2e9, 150M or 1.2B"))


def parse_rate(text: str) -> float:
    """Parse a rate in bits per second: '10mbit', '2.5Gbit/s'. Raises ValueError, also if the unit is missing."""
    units = {f"{prefix}bit{end}": _FACTORS[prefix] for prefix in ("", "k", "m", "g", "t") for end in ("", "/s")}
    return _parse(text, units, "a rate in bits per second such as 10mbit or 2.5Gbit/s")


def parse_bytes(text: str) -> int:
    """Parse a number of bytes: '24gb', '1.5 TB' or '80GiB'. Raises ValueError, also if the unit is missing."""
    decimal = {f"{prefix}b": _FACTORS[prefix] for prefix in ("k", "m", "g", "t")}
    binary = {f"{prefix}ib": 1024.0**power for power, prefix in enumerate(("k", "m", "g", "t"), 1)}
    return round(_parse(text, decimal | binary, "a number of bytes such as 24gb or 80GiB"))


def parse_seconds(text: str, *, least: float = 0.0) -> float:
    """Parse a duration in seconds: '40ms', '1.5', '2min' or '30d'. Raises ValueError, also for less than `least`."""
    return _parse(text, _SECONDS, "a time such as 40ms or 1.5 (seconds)", least=least)


def _parse(text: str, units: dict[str, float], expected: str, least: float = sys.float_info.min) -> float:
    found = _QUANTITY.fullmatch(text.strip())
    factor = units.get(found["unit"].lower()) if found else None
    if found is None or factor is None:
        raise ValueError(f"{text!r} is not {expected}")
    value = float(found["number"]) * factor
    if not least <= value < math.inf:
        raise ValueError(f"{text!r} is too {'small' if value < least else 'large'}; give {expected}")
    return value


# --- formatting: decimal prefixes, few digits, a dash for None ----------------------------------------------------


def count_text(count: float | None) -> str:
    """Format a count: 1234567 -> '1.23 M'."""
    if count is None:
        return UNKNOWN
    scaled, prefix = float(count), 0
    while abs(scaled) >= 999.5 and prefix < len(PREFIXES) - 1:
        scaled, prefix = scaled / 1000, prefix + 1
    if prefix == 0:
        return f"{scaled:.0f}"
    return f"{scaled:.3g} {PREFIXES[prefix]}"


def bytes_text(count: float | None) -> str:
    """Format bytes: 1234567 -> '1.23 MB'."""
    if count is None:
        return UNKNOWN
    text = count_text(count)
    return f"{text}B" if " " in text else f"{text} B"


def duration_text(seconds: float | None) -> str:
    """Format seconds: 75.2 -> '1 min 15 s'; below a minute with one decimal."""
    if seconds is None:
        return UNKNOWN
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def learning_rate_text(rate: float | None) -> str:
    """Format a learning rate: 0.00038 -> '3.80e-04'."""
    return UNKNOWN if rate is None else f"{rate:.2e}"


def loss_text(loss: float | None) -> str:
    return UNKNOWN if loss is None else f"{loss:.4f}"


def held_out_text(loss: float | None, bits_per_byte: float | None) -> str:
    """Format a held-out loss in nats per token: '1.8561 (2.6778 bits/byte)', without the bits if unknown."""
    return loss_text(loss) if bits_per_byte is None else f"{loss_text(loss)} ({loss_text(bits_per_byte)} bits/byte)"


def share_text(share: float | None) -> str:
    """Format a fraction as a percentage: 0.4567 -> '45.7%'."""
    return UNKNOWN if share is None else f"{share:.1%}"


def counted(number: int, noun: str) -> str:
    """Return the number with its noun: '1 worker', '2 workers'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def natural(name: str) -> tuple[object, ...]:
    """Return a key that sorts names in natural order: box-4 before box-14."""
    parts = re.split(r"([0-9]+)", name)  # alternates text and digits, so that only like parts are compared
    numbers = (digits.lstrip("0") for digits in parts[1::2])
    return *((text, len(number), number) for text, number in zip(parts[::2], [*numbers, ""], strict=True)), (name,)


def sparkline(losses: Sequence[float | None]) -> str:
    """Return the last losses as bars from the lowest to the highest: '█▆▃▁'; a dash for each unknown one."""
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


# --- the time that remains ----------------------------------------------------------------------------------------


def remaining_s(lengths: Sequence[float], left: int, spent_s: float = 0.0) -> float | None:
    """Return the estimated seconds for the `left` remaining rounds, given the `lengths` of the last ones in seconds and
    `spent_s` since the last one ended. None without a finished round, and while the current one is overdue.

    The estimate uses their median, which a pause of an hour does not change.
    """
    if not lengths or left < 0:
        return None
    length = statistics.median(lengths)
    if left and spent_s > max(OVERDUE * length, OVERDUE_S):
        return None
    return max(left * length - spent_s, max(left - 1, 0) * length)
