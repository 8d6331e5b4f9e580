"""The commands that change a run or its workers: `outerstep run pause|resume|drain|stop|rollback|rm|member`."""

from collections.abc import Callable
from typing import Annotated, Literal

import typer

from outerstep.cli.asking import Answer, asks
from outerstep.cli.errors import UsageError
from outerstep.cli.options import Connection, with_connection
from outerstep.cli.printing import say
from outerstep.cli.run.runs import RunArgument
from outerstep.common.exit_codes import Exit
from outerstep.common.quantities import bytes_text
from outerstep.rest import Client
from protocol.messages import RollBack, RunChange, RunState, WorkerChange

YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


def _setting(state: Literal["running", "paused", "draining", "stopped"], name: str, text: str) -> Callable[..., None]:
    """Return the command `name`, which sets a run to `state`. `text` says what it does."""

    def change(client: Client, run: RunArgument) -> Answer:
        info = client.change_run(run, RunChange(state=state))
        return Answer(info, lambda: f"run {info.name} is {info.state}: {info.reason}")

    change.__doc__ = f"{text}\n\n\b\nExample:\n  outerstep run {name} my-run"
    return asks(change)


pause = _setting("paused", "pause", "Pause a run: close the open round and open no other. Workers stay and wait.")
resume = _setting("running", "resume", "Resume a paused run.")
drain = _setting(
    "draining",
    "drain",
    "Drain a run: finish the open round, release its workers, then pause it.\n\nNothing is lost: a checkpoint of the "
    "last state is kept. `outerstep run resume` and new workers continue the run.",
)
stop = _setting("stopped", "stop", "Stop a run for good: its workers leave. Its last state can still be exported.")


@asks
def rollback(
    client: Client,
    run: RunArgument,
    to: Annotated[int, typer.Option(min=0, help="The checkpoint: the state before this round.", show_default=False)],
    without: Annotated[
        list[str] | None,
        typer.Option("--without", metavar="WORKER", help="A worker to exclude from now on. Repeatable."),
    ] = None,
    yes: YesOption = False,
) -> Answer:
    """Roll a run back to a checkpoint, because the model was damaged since.

    All workers rejoin by themselves and take that state. The work units of the discarded rounds are trained on again,
    and the files of these rounds are set aside in the coordinator's data directory. A run that had ended is paused
    afterwards. Excluded workers may join again once they are readmitted.

    \b
    Example:
      outerstep run show my-run --checkpoints
      outerstep run rollback my-run --to 40 --without box-7
    """
    detail = client.run(run)
    if not yes:
        confirm(f"Roll run {run} back from state {detail.round} to state {to}, and train again from there?")
    after = client.roll_back(run, RollBack(to=to, from_round=detail.round, without=without or []))
    hint = f"; continue with: outerstep run resume {run}" if after.state is RunState.PAUSED else ""
    return Answer(after, lambda: f"run {run} is at state {after.round}, and {after.state}{hint}")


@with_connection
def remove(run: RunArgument, yes: YesOption = False, *, connection: Connection) -> None:
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


# What can be done to a worker, and the state that this sets.
_STATES: dict[str, Literal["evicted", "banned", "readmitted", "released"]] = {
    "evict": "evicted",
    "ban": "banned",
    "readmit": "readmitted",
    "release": "released",
}


@asks
def member(
    client: Client,
    run: RunArgument,
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="The worker's name.")],
    action: Annotated[Literal["evict", "ban", "readmit", "release"], typer.Argument(help="What to do.")],
) -> Answer:
    """Evict a worker of a run, ban or readmit it, or release its name.

    evict: rounds no longer wait for it, and its work units return to the pool. Its process joins again by itself. ban:
    evict it, and it may not join again until it is readmitted. A ban applies to the worker's name: with a token for
    several names it may join under another one, so also revoke the token (`token ls`) if you do not trust its holder.

    release: its name will belong to the next token that joins under it. A name belongs to the token that first joined
    under it, so that nobody else can pose as that worker. Release it if a box lost its token or gets another one.

    \b
    Example:
      outerstep run member my-run box-7 evict
      outerstep run member my-run box-7 release
    """
    state = _STATES[action]
    changed = client.change_worker(run, worker, WorkerChange(state=state))
    return Answer(changed, lambda: f"worker {worker} of run {run} is {state}")
