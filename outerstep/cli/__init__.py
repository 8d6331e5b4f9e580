"""The command line. Each command imports what it needs when it runs, so that --help is quick and needs no extra."""

import logging
from typing import Annotated

import typer

from outerstep import __version__
from outerstep.cli import (
    backup,
    coordinator,
    data,
    demo,
    doctor,
    evaluate,
    pin,
    plan,
    privacy,
    rollback,
    run,
    status,
    token,
    track,
    watch,
    worker,
    workers,
)
from outerstep.cli.faults import CommandGroup
from outerstep.cli.printing import say
from protocol.exit_codes import IN_WORDS
from protocol.printable import PrintableFormatter

app = typer.Typer(
    name="outerstep",
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(__version__)
        raise typer.Exit


@app.callback(epilog=IN_WORDS)
def outerstep(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train one model with DiLoCo on GPU boxes that are far apart.

    A coordinator holds the run; workers join it by outbound requests alone, train, and average every few hundred steps.

    \b
    See it work on this machine:
      outerstep demo

    \b
    The way of a run:
      outerstep coordinator --data ./data
      export OUTERSTEP_TOKEN=$(cat ./data/admin.token)
      outerstep run create run.toml
      outerstep token create --scope join > join.token
      outerstep worker http://127.0.0.1:8470 --run my-run --token-file join.token
      outerstep run watch my-run
      outerstep run export my-run --out ./model
    """
    if logging.lastResort is not None:  # what commands log that set up no logging
        logging.lastResort.setFormatter(PrintableFormatter())


app.add_typer(coordinator.app, name="coordinator")
coordinator.app.command("backup")(backup.backup)
coordinator.app.command("backups")(backup.backups)
coordinator.app.command("restore")(backup.restore)
coordinator.app.command()(status.status)
coordinator.app.command("notify-test")(coordinator.notify_test)
app.command()(coordinator.migrate)
app.command(epilog=IN_WORDS)(worker.worker)
app.command(epilog=IN_WORDS)(doctor.doctor)
run.app.command()(workers.workers)
run.app.command()(workers.worker)
run.app.command()(watch.watch)
run.app.command()(watch.events)
run.app.command()(evaluate.evaluate)
run.app.command()(track.track)
run.app.command()(rollback.rollback)
run.app.command()(pin.pin)
run.app.command()(privacy.privacy)
app.add_typer(run.app, name="run")
app.add_typer(token.app, name="token")
app.add_typer(data.app, name="data")
app.command()(demo.demo)
app.command()(plan.plan)
app.command("privacy")(privacy.preview)


def main() -> None:
    """Run the command `outerstep`."""
    app(prog_name="outerstep")
