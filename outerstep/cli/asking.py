"""Commands that ask the coordinator something and print what it answers."""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, NamedTuple

from pydantic import BaseModel
from rich.console import RenderableType

from outerstep.cli.options import Connection, with_connection
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

    kind = inspect.Parameter.KEYWORD_ONLY
    signature = inspect.signature(ask, eval_str=True)
    _, *own = (each.replace(kind=kind) for each in signature.parameters.values())
    output = inspect.Parameter("output", kind, default=Format.TABLE, annotation=FormatOption)
    connection = inspect.Parameter("connection", kind, annotation=Connection)
    parameters = [*own, output, connection]
    command.__signature__ = signature.replace(parameters=parameters, return_annotation=None)  # type: ignore[attr-defined]
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
