"""The options by which a machine's owner allows what a run's spec asks of it, and the question where they lack."""

import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from outerstep.cli.faults import UsageError
from outerstep.common.quantities import parse_count
from protocol.spec.model import MAX_PARAMETERS
from protocol.text import printable

AllowFactoryOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-factory",
        metavar="MODULE:NAME",
        help="Code that the run's spec may name, which is run on this machine; once for each. Default: none.",
        show_default=False,
    ),
]
DataRootOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data-root",
        metavar="DIR|ADDRESS",
        help="Where the run's spec may find data, tokenizers and weights: a directory, the beginning of an address, "
        "hub:NAME; once for each. Default: nowhere.",
        show_default=False,
    ),
]
MaxParametersOption = Annotated[
    str | None,
    typer.Option(
        "--max-parameters",
        metavar="COUNT",
        help="The largest model that is built where the run's spec describes it: 70B. Default: 20B.",
        show_default=False,
    ),
]


def parse_max_parameters(given: str | None) -> int:
    """Return the value of MaxParametersOption, or its default. Raises UsageError."""
    try:
        return MAX_PARAMETERS if given is None else parse_count(given)
    except ValueError as error:
        raise UsageError(f"--max-parameters: {error}") from error


def owner_at_terminal() -> Callable[[str], bool] | None:
    """Return what asks the machine's owner; None where nobody sits at a terminal, and in processes of torchrun's."""
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty() and "LOCAL_RANK" not in os.environ
    return _ask if at_terminal else None


def _ask(question: str) -> bool:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C is an answer
    try:
        return typer.confirm(printable(question), err=True)
    except typer.Abort:
        return False
    finally:
        signal.signal(signal.SIGINT, before)
