"""Text received from others, made safe to print; text files; and lists of the names that exist.

Characters that move the cursor, set colours, rename the window, reverse the writing direction or start a new line are
replaced by their escapes, such as \\x1b, before they reach a terminal or a log.
"""

import codecs
import difflib
import logging
from collections.abc import Collection
from types import TracebackType

SHOWN_NAMES = 5

UTF_16 = (
    "UTF-16, not UTF-8: convert it with `iconv -f UTF-16 -t UTF-8`, or in PowerShell, which writes UTF-16, with "
    "`Get-Content FILE | Set-Content -Encoding utf8 NEW`"
)


def printable(text: str) -> str:
    """Return `text` as one line, with an escape for each character that cannot be printed."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def printable_lines(text: str) -> str:
    """Return `text` with its line breaks, and an escape for every other character that cannot be printed."""
    return "\n".join(map(printable, text.split("\n")))


def printable_json(document: str) -> str:
    """Return an equivalent JSON document that is safe to print."""
    return "\n".join(
        line if line.isprintable() else "".join(map(_escaped_in_json, line)) for line in document.split("\n")
    )


def check_printable(text: str) -> str:
    """Return `text`. Raises ValueError if a character in it cannot be printed."""
    if not text.isprintable():
        odd = next(each for each in text if not each.isprintable())
        raise ValueError(f"{_escaped(odd)} cannot be printed; leave it out")
    return text


class PrintableFormatter(logging.Formatter):
    """Formats a log record as one printable line, followed by the printable lines of its traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, logging's name
        return printable(super().formatMessage(record))

    def formatException(  # noqa: N802, logging's name
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        return printable_lines(super().formatException(ei))


def existing_names(wanted: str, existing: Collection[str], what: str) -> str:
    """Return a few of the existing names, those most similar to `wanted` first: "runs here: a, b and 3 more"."""
    if not existing:
        return f"there are no {what} here yet"
    nearest = difflib.get_close_matches(wanted, existing, SHOWN_NAMES)
    shown = [*nearest, *(name for name in sorted(existing) if name not in nearest)][:SHOWN_NAMES]
    more = f" and {len(existing) - len(shown)} more" if len(existing) > len(shown) else ""
    return f"{what} here: {', '.join(shown)}{more}"


def decoded(content: bytes) -> str:
    """Return the text in a file's content, which is UTF-8, with or without a byte-order mark. Raises ValueError with
    what it is instead."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(UTF_16 if is_utf_16(content) else "not UTF-8 text") from error


def is_utf_16(content: bytes) -> bool:
    """Return True if the content is text after a byte-order mark of UTF-16."""
    return len(content) > 2 and content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _escaped_in_json(character: str) -> str:
    if character.isprintable():
        return character
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
