"""Printing what a command found: a table for people, or JSON for programs."""

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
    """Standard output; not wrapped or cut where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else UNBOUNDED_WIDTH, highlight=False)


def print_json(value: BaseModel | Iterable[BaseModel] | dict[str, Any]) -> None:
    """A message as a JSON object, messages as a JSON array."""
    typer.echo(json.dumps(plain(value), indent=2, ensure_ascii=False))


def plain(value: Any) -> Any:
    """`value` with its messages as what JSON knows."""
    match value:
        case BaseModel():
            return value.model_dump(mode="json")
        case dict():
            return {key: plain(item) for key, item in value.items()}
        case _:
            return [plain(item) for item in value]


def time_text(seconds: float) -> str:
    """Seconds since 1970 as local date and time."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
