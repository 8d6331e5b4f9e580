"""Quantities as people read them: decimal prefixes, few digits, a dash for the unknown."""

from outerstep.common.text import UNKNOWN, duration_text

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
