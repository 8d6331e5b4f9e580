"""Commands that ask the coordinator something and print what it answers."""

from collections.abc import Callable, Iterable
from functools import wraps
from inspect import Signature
from typing import Any, NamedTuple

from pydantic import BaseModel
from rich.console import RenderableType

from outerstep.cli.options import Connection, option, parameters, with_connection
from outerstep.cli.printing import Format, FormatOption, console, print_json, say


class Answer(NamedTuple):
    """What a command prints: with --format json the `document`, otherwise what `text` returns, a line or a table."""

    document: BaseModel | Iterable[BaseModel] | dict[str, Any]
    text: Callable[[], RenderableType]


def asks(ask: Callable[..., Answer]) -> Callable[..., None]:
    """Make a command of `ask`, which gets a client of the coordinator as its first argument. Its other parameters are
    the command's, which also gets --format and the options of `with_connection`."""

    @wraps(ask)
    def command(*, output: Format, connection: Connection, **given: Any) -> None:
        with connection.open() as client:
            print_answer(ask(client, **given), output)

    added = option("output", FormatOption, Format.TABLE), option("connection", Connection)
    command.__signature__ = Signature([*parameters(ask, "client"), *added])  # type: ignore[attr-defined]
    return with_connection(command)


def print_answer(answer: Answer, output: Format) -> None:
    """Print an answer in the format that was asked for."""
    if output is Format.JSON:
        print_json(answer.document)
        return
    text = answer.text()
    if isinstance(text, str):
        say(text)  # on one line, however long
    else:
        console().print(text)
