"""The command line. A command's module is imported only when that command is used, so `outerstep --help` is quick.
Commands import their heavy libraries only when they run, so their --help needs no extra."""

import errno
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cache
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
    """A command or group: how to import it, and its line in the list of commands."""

    load: Callable[[], typer.Typer]
    help: str


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
    return get_group(ENTRIES[name].load()).commands[name]


def _command(name: str, function: Callable[..., None], epilog: str | None = None) -> typer.Typer:
    within = typer.Typer(rich_markup_mode=None)
    within.command(name, epilog=epilog)(function)
    return within


def _group(name: str, group: typer.Typer, commands: Mapping[str, Callable[..., None]]) -> typer.Typer:
    for each, function in commands.items():
        group.command(each)(function)
    within = typer.Typer(rich_markup_mode=None)
    within.add_typer(group, name=name)
    return within


def _coordinator() -> typer.Typer:
    from outerstep.cli import backup, coordinator

    commands: dict[str, Callable[..., None]] = {
        "backup": backup.backup,
        "restore": backup.restore,
        "status": coordinator.status,
        "notify-test": coordinator.notify_test,
        "rotate-secret": coordinator.rotate_secret,
    }
    return _group("coordinator", coordinator.app, commands)


def _aggregator() -> typer.Typer:
    from outerstep.cli import aggregator

    return _command("aggregator", aggregator.aggregator)


def _migrate() -> typer.Typer:
    from outerstep.cli import coordinator

    return _command("migrate", coordinator.migrate)


def _worker() -> typer.Typer:
    from outerstep.cli import worker

    return _command("worker", worker.worker, IN_WORDS)


def _doctor() -> typer.Typer:
    from outerstep.cli import doctor

    return _command("doctor", doctor.doctor, IN_WORDS)


def _run() -> typer.Typer:
    from outerstep.cli.run import models, runs, steer, watch, workers

    commands: dict[str, Callable[..., None]] = {
        "create": runs.create,
        "ls": runs.list_runs,
        "show": runs.show,
        "units": runs.units,
        "checkpoints": runs.checkpoints,
        "pause": steer.pause,
        "resume": steer.resume,
        "drain": steer.drain,
        "stop": steer.stop,
        "rm": steer.remove,
        "evict": steer.evict,
        "readmit": steer.readmit,
        "release": steer.release,
        "export": models.export,
        "chat": models.chat,
        "workers": workers.workers,
        "worker": workers.worker,
        "watch": watch.watch,
        "events": watch.events,
        "evaluate": models.evaluate,
        "track": watch.track,
        "rollback": steer.rollback,
        "pin": models.pin,
    }
    return _group("run", typer.Typer(help="Create, follow, steer and export runs.", no_args_is_help=True), commands)


def _token() -> typer.Typer:
    from outerstep.cli import token

    commands: dict[str, Callable[..., None]] = {
        "create": token.create,
        "rotate": token.rotate,
        "ls": token.list_tokens,
        "audit": token.audit,
        "revoke": token.revoke,
    }
    group = typer.Typer(help="Create, list, rotate and revoke tokens. Needs an admin token.", no_args_is_help=True)
    return _group("token", group, commands)


def _data() -> typer.Typer:
    from outerstep.cli import data

    group = typer.Typer(help="Prepare and inspect token sets to train on.", no_args_is_help=True)
    return _group("data", group, {"prepare": data.prepare, "show": data.show})


def _demo() -> typer.Typer:
    from outerstep.cli import demo

    return _command("demo", demo.demo)


def _plan() -> typer.Typer:
    from outerstep.cli import plan

    return _command("plan", plan.plan)


def _compare() -> typer.Typer:
    from outerstep.cli import compare

    return _command("compare", compare.compare)


# By name, in the order of the list. The help is the first sentence of the command's own --help.
ENTRIES: dict[str, Entry] = {
    "migrate": Entry(_migrate, "Migrate a coordinator's database to the newest schema."),
    "worker": Entry(_worker, "Join a run as a worker and train until it ends."),
    "doctor": Entry(_doctor, "Check whether this machine can train a run as a worker, and say what to fix."),
    "demo": Entry(
        _demo, "See it work: a coordinator and several workers on this machine train a small model on real text."
    ),
    "plan": Entry(_plan, "Estimate what a run costs on given network connections, and recommend codecs and H."),
    "coordinator": Entry(_coordinator, "Run a coordinator until SIGTERM or Ctrl-C, or one of its commands."),
    "aggregator": Entry(
        _aggregator,
        "Average contributions for several coordinators, until SIGTERM or Ctrl-C.",
    ),
    "run": Entry(_run, "Create, follow, steer and export runs."),
    "compare": Entry(
        _compare,
        "Compare models on the same held-out tokens: runs, checkpoints, exports and directories of transformers.",
    ),
    "token": Entry(_token, "Create, list, rotate and revoke tokens. Needs an admin token."),
    "data": Entry(_data, "Prepare and inspect token sets to train on."),
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
      outerstep coordinator --data ./data
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
