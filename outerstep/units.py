"""Quantities as people read them: decimal prefixes, few digits, a dash for what is not known."""

UNKNOWN = "–"
PREFIXES = ("", "k", "M", "G", "T", "P")


def count_text(count: float | None) -> str:
    """1234567 -> '1.23 M'."""
    if count is None:
        return UNKNOWN
    scaled, prefix = float(count), 0
    while abs(scaled) >= 999.5 and prefix < len(PREFIXES) - 1:
        scaled, prefix = scaled / 1000, prefix + 1
    if prefix == 0:
        return f"{scaled:.0f}"
    return f"{scaled:.3g} {PREFIXES[prefix]}"


def bytes_text(count: float | None) -> str:
    """1234567 -> '1.23 MB'."""
    if count is None:
        return UNKNOWN
    text = count_text(count)
    return f"{text}B" if " " in text else f"{text} B"


def loss_text(loss: float | None) -> str:
    return UNKNOWN if loss is None else f"{loss:.4f}"


def duration_text(seconds: float | None) -> str:
    """75.2 -> '1 min 15 s'; below a minute one decimal."""
    if seconds is None:
        return UNKNOWN
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
