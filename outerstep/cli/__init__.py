"""The command line. A command's module is imported only when that command is used, so `outerstep --help` is quick.
Commands import their heavy libraries only when they run, so their --help needs no extra."""

import errno
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Annotated, Any, NamedTuple, cast

import typer
from typer.core import TyperGroup
from typer.main import get_group

from outerstep import __version__
from outerstep.common.exit_codes import IN_WORDS, Exit
from protocol.errors import OuterstepError
from protocol.text import PrintableFormatter


class CommandGroup(TyperGroup):
    """A group of commands that turns expected errors into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OuterstepError as error:
            from outerstep.cli.errors import exit_code
            from outerstep.cli.printing import say

            say(f"outerstep: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(exit_code(error)) from error
        except OSError as error:
            if error.errno in (None, errno.EPIPE):  # the reader of the output has enough, which typer handles
                raise
            from outerstep.cli.printing import say
            from outerstep.common.connections import error_text

            where = "" if error.filename else "the output or an open file: "
            say(f"outerstep: {where}{error_text(error)}", err=True)
            raise typer.Exit(Exit.RETRY) from error


class Entry(NamedTuple):
    """A command or a group: its line in the list of commands, and the places ("module:name" in outerstep/cli) of its
    function, None for a group that does nothing by itself, and of the commands in it."""

    help: str
    function: str | None
    commands: Mapping[str, str] = {}
    epilog: str | None = None


class Commands(CommandGroup):
    """The top-level group: the commands of `ENTRIES`."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = cast(Any, _Loaded())

    def list_commands(self, ctx: Any) -> list[str]:
        return list(ENTRIES)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in ENTRIES.items()])


class _Loaded(Mapping[str, Any]):
    """The commands of `ENTRIES`, each imported when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        return _load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(ENTRIES)

    def __len__(self) -> int:
        return len(ENTRIES)


@cache
def _load(name: str) -> Any:
    """Return the command `name`. Raises KeyError."""
    entry = ENTRIES[name]
    within = typer.Typer(rich_markup_mode=None)
    if not entry.commands and entry.function:
        within.command(name, epilog=entry.epilog)(_function(entry.function))
        return get_group(within).commands[name]
    group = typer.Typer() if entry.function else typer.Typer(help=entry.help, no_args_is_help=True)
    if entry.function:
        group.callback(invoke_without_command=True)(_function(entry.function))
    for each, place in entry.commands.items():
        group.command(each)(_function(place))
    within.add_typer(group, name=name)
    return get_group(within).commands[name]


def _function(place: str) -> Callable[..., None]:
    module, name = place.split(":")
    function: Callable[..., None] = getattr(import_module(f"outerstep.cli.{module}"), name)
    return function


# By name, in the order of the list. The help is the first sentence of the command's own --help.
ENTRIES: dict[str, Entry] = {
    "worker": Entry("Join a run as a worker and train until it ends.", "worker:worker", epilog=IN_WORDS),
    "doctor": Entry(
        "Check whether this machine can train a run as a worker, and say what to fix.",
        "doctor:doctor",
        epilog=IN_WORDS,
    ),
    "demo": Entry(
        "See it work: a coordinator and several workers on this machine train a small model on real text.", "demo:demo"
    ),
    "plan": Entry("Estimate what a run costs on given network connections, and recommend codecs and H.", "plan:plan"),
    "coordinator": Entry(
        "Run a coordinator until SIGTERM or Ctrl-C, or one of its commands.",
        "coordinator:coordinator",
        {
            "backup": "backup:backup",
            "restore": "backup:restore",
            "status": "coordinator:status",
            "notify-test": "coordinator:notify_test",
            "rotate-secret": "coordinator:rotate_secret",
        },
    ),
    "aggregator": Entry(
        "Average contributions for several coordinators, until SIGTERM or Ctrl-C.", "aggregator:aggregator"
    ),
    "run": Entry(
        "Create, follow, steer and export runs.",
        None,
        {
            "create": "run.runs:create",
            "ls": "run.runs:list_runs",
            "show": "run.show:show",
            "watch": "run.watch:watch",
            "events": "run.watch:events",
            "track": "run.watch:track",
            "pause": "run.steer:pause",
            "resume": "run.steer:resume",
            "drain": "run.steer:drain",
            "stop": "run.steer:stop",
            "rollback": "run.steer:rollback",
            "member": "run.steer:member",
            "rm": "run.steer:remove",
            "export": "run.models:export",
            "chat": "run.models:chat",
            "pin": "run.models:pin",
        },
    ),
    "compare": Entry(
        "Measure and compare the held-out loss of runs, checkpoints, exports and directories of transformers.",
        "compare:compare",
    ),
    "token": Entry(
        "Create, list, rotate and revoke tokens. Needs an admin token.",
        None,
        {
            "create": "token:create",
            "rotate": "token:rotate",
            "ls": "token:list_tokens",
            "revoke": "token:revoke",
        },
    ),
    "data": Entry(
        "Prepare and inspect token sets to train on.", None, {"prepare": "data:prepare", "show": "data:show"}
    ),
}


app = typer.Typer(
    name="outerstep",
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from outerstep.cli.printing import say

        say(__version__)
        raise typer.Exit


@app.callback(epilog=IN_WORDS)
def outerstep(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train one model with DiLoCo on GPU boxes that are far apart.

    A coordinator holds the run. Workers join it with outbound requests only, train, and average every few hundred
    steps.

    \b
    See it work on this machine:
      outerstep demo

    \b
    A run from start to end:
      outerstep coordinator --data-dir ./data
      export OUTERSTEP_TOKEN=$(cat ./data/admin.token)
      outerstep run create run.toml
      outerstep token create --scope join > join.token
      outerstep worker http://127.0.0.1:8470 --run my-run --token-file join.token
      outerstep run watch my-run
      outerstep run export my-run --out ./model
    """
    if logging.lastResort is not None:  # for commands that do not set up logging
        logging.lastResort.setFormatter(PrintableFormatter())


def main() -> None:
    """Run the command `outerstep`."""
    app(prog_name="outerstep")
