"""`outerstep compare`: the held-out losses of models, and their differences."""

import math
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType

from outerstep import rest
from outerstep.cli.asking import Answer, print_answer
from outerstep.cli.errors import UsageError, import_extra
from outerstep.cli.options import Connection, owner_at_terminal, with_connection
from outerstep.cli.printing import Format, FormatOption, say
from outerstep.cli.run.models import AverageOption, box_settings
from outerstep.cli.worker import with_permissions
from outerstep.common.connections import error_text
from outerstep.common.quantities import UNKNOWN, bytes_text, count_text
from outerstep.display import lines, table
from protocol.messages import RunState

_RUN = re.compile(r"([^@]+)(?:@(\d{1,12}))?")
_PERCENT = 100


@with_connection
@with_permissions
def compare(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL …",
            help="The name of a run, RUN@ROUND for its checkpoint before that round, or a directory, written with a "
            "slash (./model). The others are compared with the first.",
            show_default=False,
        ),
    ],
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="SOURCE",
            help="Measure on the held-out part of this text. Default: that of the first run or export.",
        ),
    ] = None,
    average: AverageOption = 1,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw the differences into this file.")
    ] = None,
    *,
    given: dict[str, Any],
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, mps …")] = "auto",
    output: FormatOption = Format.TABLE,
    connection: Connection,
) -> None:
    """Measure and compare the held-out loss of runs, checkpoints, exports and directories of transformers.

    Shows the loss of each on the same held-out tokens, and by how much it is above the first one's, with a 95 %
    confidence interval from a paired bootstrap over documents; for runs also the tokens trained on and the bytes moved.
    At most evaluation.max_tokens are used. Needs the worker's libraries (torch, transformers), but no GPU.

    \b
    Example:
      outerstep compare my-run@100
      outerstep compare my-run-baseline my-run my-run@50 --plot difference.svg
      outerstep compare ./one ./other --on ./text
    """
    if plot is not None and len(models) < 2:
        raise UsageError("--plot draws the differences of several models: give two or more")
    if on == "":
        raise UsageError("--on: give a directory, a glob, or another source of text")
    if average > 1 and all(map(_is_directory, models)):
        raise UsageError("--average is for runs: a directory has one state")
    box = box_settings(data=on, device=device, **given)
    with ExitStack() as stack:
        client: rest.Client | None = None
        if any(not _is_directory(each) for each in models):
            client = stack.enter_context(connection.open())
        comparing = import_extra("outerstep.compare", extra="worker", command="outerstep compare")
        contenders = [_contender(each, client, comparing) for each in models]
        costs = [None if each.run is None or client is None else _cost(each, client) for each in contenders]
        http, token = (None, "") if client is None else (client.http, connection.token())
        try:
            measured = comparing.measure(
                contenders,
                http,
                token,
                box,
                average=average,
                report=lambda name: say(f"measuring {name}", err=True),
                ask=owner_at_terminal(),
            )
        except ValueError as error:
            raise UsageError(f"--device: {error}") from error
    differences = [comparing.difference(each, measured.losses[0]) for each in measured.losses[1:]]
    if plot is not None:
        try:
            plot.write_text(comparing.plot(models, differences))
        except OSError as error:
            raise UsageError(f"--plot: {error_text(error)}") from error
    rows = [
        _row(name, cost, losses, apart, comparing.perplexity_change, measured.bytes_per_token)
        for name, cost, losses, apart in zip(models, costs, measured.losses, [None, *differences], strict=True)
    ]
    for note in measured.notes:
        say(f"note: {note}", err=True)
    first = measured.losses[0]
    drawn = {"unit": measured.unit, "count": len(first.targets)}
    document = {"tokens": int(first.targets.sum()), "drawn": drawn, "models": rows}
    print_answer(Answer(document, lambda: _text(document)), output)


def _is_directory(text: str) -> bool:
    return "/" in text


def _contender(text: str, client: rest.Client | None, comparing: Any) -> Any:
    """Return what an argument names. Raises UsageError, and Problem for a run that does not exist."""
    if _is_directory(text):
        directory = Path(text)
        if not directory.is_dir():
            raise UsageError(f"{text} is not a directory; a run is named without a slash")
        return comparing.Contender(text, directory=directory)
    found = _RUN.fullmatch(text)
    if found is None:
        raise UsageError(f"{text!r} is neither RUN nor RUN@ROUND, nor a directory, which has a slash: ./{text}")
    assert client is not None
    state = None if found[2] is None else int(found[2])
    return comparing.Contender(text, run=client.run(found[1]), state=state)


def _cost(contender: Any, client: rest.Client) -> dict[str, int]:
    """Return what a run took until the state: tokens and bytes up of all its workers, and bytes that each downloads."""
    run, state = contender.run, contender.state
    if state is None and run.state is not RunState.FINISHED:
        state = next((each.round for each in client.checkpoints(run.name)), 0)
    rounds = [each for each in client.rounds(run.name) if state is None or each.round < state]
    return {
        "rounds": len(rounds),
        "trained_tokens": sum(each.tokens for each in rounds),
        "upload_bytes": sum(each.upload_bytes for each in rounds),
        "delta_bytes": sum(each.delta_bytes for each in rounds),
    }


def _row(
    name: str,
    cost: dict[str, int] | None,
    losses: Any,
    apart: Any,
    perplexity_change: Any,
    bytes_per_token: float | None,
) -> dict[str, Any]:
    """Return one model's figures, as for JSON."""
    row: dict[str, Any] = {"model": name, "loss": losses.mean, "bits_per_byte": None, "difference": None}
    row |= cost or dict.fromkeys(("rounds", "trained_tokens", "upload_bytes", "delta_bytes"))
    if bytes_per_token:
        row["bits_per_byte"] = losses.mean / math.log(2) / bytes_per_token
    if apart is not None:
        row["difference"] = {"nats": apart.nats, "low": apart.low, "high": apart.high}
        row["difference"] |= {"perplexity": perplexity_change(apart.nats)}
    return row


def _text(document: dict[str, Any]) -> RenderableType:
    rows, drawn = document["models"], document["drawn"]
    columns = ["model", ">rounds", ">tokens", ">up", ">down each", ">loss", ">bits/byte"]
    apart = [">above the first", ">95 % interval", ">perplexity"] if len(rows) > 1 else []
    cells = [
        [
            row["model"],
            UNKNOWN if row["rounds"] is None else str(row["rounds"]),
            count_text(row["trained_tokens"]),
            bytes_text(row["upload_bytes"]),
            bytes_text(row["delta_bytes"]),
            f"{row['loss']:.4f}",
            UNKNOWN if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.4f}",
            *(_difference(row["difference"]) if apart else []),
        ]
        for row in rows
    ]
    over = f"over {count_text(document['tokens'])} tokens in {drawn['count']} held-out {drawn['unit']}"
    return Group(table([*columns, *apart], cells), lines([over]))


def _difference(apart: dict[str, float] | None) -> list[str]:
    if apart is None:
        return ["", "", ""]
    interval = f"{apart['low']:+.4f} … {apart['high']:+.4f}"
    return [f"{apart['nats']:+.4f}", interval, f"{_PERCENT * apart['perplexity']:+.2f} %"]
