"""Quantities as people write them: counts, rates, times."""

import math
import re
import sys

_QUANTITY = re.compile(r"(?P<number>\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*(?P<unit>[a-z/]*)", re.IGNORECASE)
_FACTORS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_SECONDS = {"": 1, "us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86_400}


def parse_count(text: str) -> int:
    """Parse a count: '1.2e9' or '1.2B' -> 1200000000. Raises ValueError."""
    return round(_parse(text, _FACTORS, "a number such as 1.2e9, 150M or 1.2B"))


def parse_rate(text: str) -> float:
    """Parse a rate in bits per second: '10mbit', '2.5Gbit/s'. Raises ValueError, also for a rate without a unit."""
    units = {f"{prefix}bit{end}": _FACTORS[prefix] for prefix in ("", "k", "m", "g", "t") for end in ("", "/s")}
    return _parse(text, units, "a rate in bits per second such as 10mbit or 2.5Gbit/s")


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
