"""Quantities as people read and write them: decimal prefixes, few digits, a dash for the unknown."""

import math
import re
import sys

from protocol.telling import UNKNOWN, duration_text

__all__ = ["UNKNOWN", "duration_text"]

PREFIXES = ("", "k", "M", "G", "T", "P")


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


def loss_text(loss: float | None) -> str:
    return UNKNOWN if loss is None else f"{loss:.4f}"


def held_out_text(loss: float | None, bits_per_byte: float | None) -> str:
    """Format a held-out loss, in nats per token: '1.8561 (2.6778 bits/byte)', or without the bits where unknown."""
    return loss_text(loss) if bits_per_byte is None else f"{loss_text(loss)} ({loss_text(bits_per_byte)} bits/byte)"


def share_text(share: float | None) -> str:
    """Format a share of one: 0.4567 -> '45.7%'."""
    return UNKNOWN if share is None else f"{share:.1%}"


# --- read ---------------------------------------------------------------------------------------------------------

_QUANTITY = re.compile(r"(?P<number>\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*(?P<unit>[a-z/]*)", re.IGNORECASE)
_FACTORS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_SECONDS = {"": 1, "us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600}


def parse_count(text: str) -> int:
    """Parse a count: '1.2e9' or '1.2B' -> 1200000000. Raises ValueError."""
    return round(_parse(text, _FACTORS, "a number such as 1.2e9, 150M or 1.2B"))


def parse_rate(text: str) -> float:
    """Parse a rate in bits per second: '10mbit', '2.5Gbit/s'. Raises ValueError, also for a rate without a unit."""
    units = {f"{prefix}bit{end}": _FACTORS[prefix] for prefix in ("", "k", "m", "g", "t") for end in ("", "/s")}
    return _parse(text, units, "a rate in bits per second such as 10mbit or 2.5Gbit/s")


def parse_seconds(text: str, *, least: float = 0.0) -> float:
    """Parse a duration in seconds: '40ms', '1.5' or '2min'. Raises ValueError, also for less than `least`."""
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
