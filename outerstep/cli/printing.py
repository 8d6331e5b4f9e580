"""The output of commands: lines and tables for people, or JSON for programs.

All output of commands goes through this module, because much of it comes from workers and coordinators: characters that
a terminal would obey instead of showing are escaped (`protocol/text.py`).
"""

import json
import sys
from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from protocol.text import printable, printable_json, printable_lines

UNBOUNDED_WIDTH = 4096  # columns; output to a file or a pipe is not cut


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="A table to read, or JSON for programs.")]
LinesFormatOption = Annotated[Format, typer.Option("--format", help="Text to read, or one JSON object per line.")]


class PrintableConsole(Console):
    """A console that escapes unprintable text; only rich itself moves the cursor and sets colours."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable_lines(segment.text), segment.style)


def console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console that wraps and cuts lines at the terminal's width, or at `width`."""
    stream = sys.stderr if stderr else sys.stdout
    if width is None and not stream.isatty():
        width = UNBOUNDED_WIDTH
    return PrintableConsole(stderr=stderr, width=width, highlight=False)


def say(text: str, *, err: bool = False, end: bool = True) -> None:
    """Print one line; without `end`, print no line break after it."""
    typer.echo(printable(text), err=err, nl=end)


def say_part(text: str) -> None:
    """Print a part of a text of several lines, as it arrives."""
    typer.echo(printable_lines(text), nl=False)


def say_lines(text: str, *, err: bool = False) -> None:
    """Print several lines."""
    typer.echo(printable_lines(text), err=err)


def print_json(value: BaseModel | Iterable[BaseModel] | dict[str, Any]) -> None:
    """Print a message as a JSON object, or messages as a JSON array."""
    typer.echo(printable_json(json.dumps(plain(value), indent=2, ensure_ascii=False)))


def print_json_line(value: BaseModel | dict[str, Any]) -> None:
    """Print a message as a JSON object on one line, for output of several messages."""
    typer.echo(printable_json(json.dumps(plain(value), ensure_ascii=False)))


def plain(value: Any) -> Any:
    """Return `value` with its messages as dicts, ready for JSON."""
    match value:
        case BaseModel():
            return value.model_dump(mode="json")
        case dict():
            return {key: plain(item) for key, item in value.items()}
        case str() | int() | float() | None:
            return value
        case _:
            return [plain(item) for item in value]


def time_text(seconds: float) -> str:
    """Format seconds since 1970 as local date and time."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
