"""What others wrote, made harmless before a terminal or a log gets it: characters that move the cursor, colour, rename
a window, turn the direction of writing or begin a line of their own are shown as what they are, such as \\x1b."""

import logging
from types import TracebackType


def printable(text: str) -> str:
    """Return `text` in one line, with an escape in place of each character that is none to look at."""
    return text if text.isprintable() else "".join(map(_shown, text))


def printable_lines(text: str) -> str:
    """Return `text` likewise, but for its ends of lines."""
    return "\n".join(map(printable, text.split("\n")))


def printable_json(document: str) -> str:
    """Return JSON that means the same and is harmless to look at."""
    return "\n".join(line if line.isprintable() else "".join(map(_in_json, line)) for line in document.split("\n"))


def check_printable(text: str) -> str:
    """Return `text`. Raises ValueError if something in it cannot be printed."""
    if not text.isprintable():
        odd = next(each for each in text if not each.isprintable())
        raise ValueError(f"{_shown(odd)} cannot be printed; leave it out")
    return text


class PrintableFormatter(logging.Formatter):
    """Formats a record as one line of what can be printed, and a traceback below it as such lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, logging's name
        return printable(super().formatMessage(record))

    def formatException(  # noqa: N802, logging's name
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        return printable_lines(super().formatException(ei))


def _shown(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _in_json(character: str) -> str:
    if character.isprintable():
        return character
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
