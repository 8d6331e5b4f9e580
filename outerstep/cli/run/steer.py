"""The commands that change a run or its workers: `outerstep run pause|resume|drain|stop|rollback|rm|evict|…`."""

from typing import Annotated, Literal

import typer

from outerstep.cli.errors import UsageError
from outerstep.cli.options import Connection, with_connection
from outerstep.cli.printing import Format, FormatOption, print_json, say
from outerstep.cli.run.runs import RunArgument, WorkerArgument
from outerstep.common.exit_codes import Exit
from outerstep.common.quantities import bytes_text
from protocol.messages import RollBack, RunChange, RunInfo, RunState, WorkerChange


@with_connection
def pause(
    run: RunArgument,
    output: FormatOption = Format.TABLE,
    *,
    connection: Connection,
) -> None:
    """Pause a run: close the open round and open no other. Workers stay and wait.

    \b
    Example:
      outerstep run pause my-run
    """
    _change(run, "paused", output, connection)


@with_connection
def resume(
    run: RunArgument,
    output: FormatOption = Format.TABLE,
    *,
    connection: Connection,
) -> None:
    """Resume a paused run.

    \b
    Example:
      outerstep run resume my-run
    """
    _change(run, "running", output, connection)


@with_connection
def drain(
    run: RunArgument,
    output: FormatOption = Format.TABLE,
    *,
    connection: Connection,
) -> None:
    """Drain a run: finish the open round, release its workers, then pause it.

    Nothing is lost: a checkpoint of the last state is kept. `outerstep run resume` and new workers continue the run.

    \b
    Example:
      outerstep run drain my-run
    """
    _change(run, "draining", output, connection)


@with_connection
def stop(
    run: RunArgument,
    output: FormatOption = Format.TABLE,
    *,
    connection: Connection,
) -> None:
    """Stop a run for good: its workers leave. Its last state can still be exported.

    \b
    Example:
      outerstep run stop my-run
    """
    _change(run, "stopped", output, connection)


def _change(
    run: str,
    state: Literal["running", "paused", "draining", "stopped"],
    output: Format,
    connection: Connection,
) -> None:
    with connection.open() as client:
        info: RunInfo = client.change_run(run, RunChange(state=state))
    if output is Format.JSON:
        print_json(info)
    else:
        say(f"run {info.name} is {info.state}: {info.reason}")


@with_connection
def rollback(
    run: RunArgument,
    to: Annotated[int, typer.Option(min=0, help="The checkpoint: the state before this round.", show_default=False)],
    without: Annotated[
        list[str] | None,
        typer.Option("--without", metavar="WORKER", help="A worker to exclude from now on. Repeatable."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    output: FormatOption = Format.TABLE,
    *,
    connection: Connection,
) -> None:
    """Roll a run back to a checkpoint, because the model was damaged since.

    All workers rejoin by themselves and take that state. The work units of the discarded rounds are trained on again,
    and the files of these rounds are set aside in the coordinator's data directory. A run that had ended is paused
    afterwards. Excluded workers may join again once they are readmitted.

    \b
    Example:
      outerstep run checkpoints my-run
      outerstep run rollback my-run --to 40 --without box-7
    """
    with connection.open() as client:
        detail = client.run(run)
        if not yes:
            confirm(f"Roll run {run} back from state {detail.round} to state {to}, and train again from there?")
        order = RollBack(to=to, from_round=detail.round, without=without or [])
        after = client.roll_back(run, order)
    if output is Format.JSON:
        print_json(after)
        return
    hint = f"; continue with: outerstep run resume {run}" if after.state is RunState.PAUSED else ""
    say(f"run {run} is at state {after.round}, and {after.state}{hint}")


@with_connection
def remove(
    run: RunArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    *,
    connection: Connection,
) -> None:
    """Remove an ended run for good: its checkpoints, its history and everything else on the coordinator.

    \b
    Example:
      outerstep run rm my-run
    """
    with connection.open() as client:
        if not yes:
            size = bytes_text(sum(client.run(run).disk_bytes.model_dump().values()))
            confirm(f"Remove the run {run} with its checkpoints and history, {size}, for good?")
        client.remove_run(run)
    say(f"run {run} is removed")


def confirm(question: str) -> None:
    """Return if the answer at the terminal is yes; exit if it is no. Raises UsageError if there is no terminal."""
    try:
        if typer.confirm(question, err=True):
            return
    except typer.Abort as error:  # the end of the input
        raise UsageError("there is no terminal to ask for confirmation: give --yes") from error
    say("nothing was changed", err=True)
    raise typer.Exit(Exit.REFUSED)


@with_connection
def evict(
    run: RunArgument,
    worker: WorkerArgument,
    ban: Annotated[bool, typer.Option("--ban", help="It may not join again until it is readmitted.")] = False,
    output: FormatOption = Format.TABLE,
    *,
    connection: Connection,
) -> None:
    """Evict a worker: rounds no longer wait for it, and its work units return to the pool.

    Its process joins again by itself unless it is banned. A ban applies to the worker's name: with a token for several
    names it may join under another one, so also revoke the token (`token ls`) if you do not trust its holder.

    \b
    Example:
      outerstep run evict my-run box-7 --ban
    """
    _change_worker(run, worker, "banned" if ban else "evicted", output, connection)


@with_connection
def readmit(
    run: RunArgument,
    worker: WorkerArgument,
    output: FormatOption = Format.TABLE,
    *,
    connection: Connection,
) -> None:
    """Let a banned worker join again.

    \b
    Example:
      outerstep run readmit my-run box-7
    """
    _change_worker(run, worker, "readmitted", output, connection)


@with_connection
def release(
    run: RunArgument,
    worker: WorkerArgument,
    output: FormatOption = Format.TABLE,
    *,
    connection: Connection,
) -> None:
    """Release a worker's name: it will belong to the next token that joins under it.

    A name belongs to the token that first joined under it, so that nobody else can pose as that worker. Release it if
    a box lost its token or gets another one.

    \b
    Example:
      outerstep run release my-run box-7
    """
    _change_worker(run, worker, "released", output, connection)


def _change_worker(
    run: str,
    worker: str,
    state: Literal["evicted", "banned", "readmitted", "released"],
    output: Format,
    connection: Connection,
) -> None:
    with connection.open() as client:
        changed = client.change_worker(run, worker, WorkerChange(state=state))
    if output is Format.JSON:
        print_json(changed)
    else:
        say(f"worker {worker} of run {run} is {state}")
