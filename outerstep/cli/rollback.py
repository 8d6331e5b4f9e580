"""The command `outerstep run rollback`."""

from typing import Annotated

import typer

from outerstep.cli.connection import DEFAULT_URL, CaOption, TokenFileOption, TokenOption, UrlOption, operator_client
from outerstep.cli.printing import Format, FormatOption, print_json, say
from outerstep.cli.run import RunArgument, confirm
from protocol.messages import RollBack, RunState


def rollback(
    run: RunArgument,
    to: Annotated[int, typer.Option(min=0, help="The checkpoint: the state before this round.", show_default=False)],
    without: Annotated[
        list[str] | None,
        typer.Option("--without", metavar="WORKER", help="It takes no part any more. May be given again."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    output: FormatOption = Format.TABLE,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """Go back to a checkpoint, because what was learned since is spoilt.

    All workers join again by themselves and take that state; the work units of the rounds that are given up are trained
    on again. What was of these rounds is set aside in the coordinator's data directory. A run that had ended is paused
    afterwards. Workers that are left out may join again once they are readmitted.

    \b
    Example:
      outerstep run checkpoints my-run
      outerstep run rollback my-run --to 40 --without box-7
    """
    with operator_client(url, token, token_file, ca) as client:
        detail = client.run(run)
        if not yes:
            confirm(f"Go back from state {detail.round} of the run {run} to state {to}, and train again from there?")
        order = RollBack(to=to, from_round=detail.round, without=without or [])
        after = client.roll_back(run, order)
    if output is Format.JSON:
        print_json(after)
        return
    hint = f"; go on with: outerstep run resume {run}" if after.state is RunState.PAUSED else ""
    say(f"run {run} is at state {after.round}, and {after.state}{hint}")
