"""The output of commands: a table for people, or JSON for programs."""

import json
import sys
from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console

UNBOUNDED_WIDTH = 4096  # columns; output that goes to a file or a pipe is not cut


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="A table to read, or JSON for programs.")]


def console() -> Console:
    """Return a console on standard output, which wraps and cuts lines on a terminal only."""
    return Console(width=None if sys.stdout.isatty() else UNBOUNDED_WIDTH, highlight=False)


def print_json(value: BaseModel | Iterable[BaseModel] | dict[str, Any]) -> None:
    """Print a message as a JSON object, or messages as a JSON array."""
    typer.echo(json.dumps(plain(value), indent=2, ensure_ascii=False))


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
    """Return seconds since 1970 as local date and time."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
