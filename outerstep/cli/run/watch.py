"""The commands that follow a run: `outerstep run watch|events|track`."""

import errno
import importlib
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from outerstep.cli.errors import UsageError, import_extra
from outerstep.cli.options import Connection, with_connection
from outerstep.cli.printing import (
    Format,
    FormatOption,
    LinesFormatOption,
    console,
    print_json,
    print_json_line,
    say,
    time_text,
)
from outerstep.cli.run.runs import RunArgument
from outerstep.common.connections import error_text
from outerstep.display import event_line
from outerstep.follow import follow
from outerstep.live_view import display_for
from outerstep.tracking import TRACKERS, TrackerName
from outerstep.tracking.records import Record, follow_records, tracked_name
from protocol.errors import Transient
from protocol.messages import Event

WATCH_PATIENCE_S = 2.0  # the workers' metrics change without an event
EVENTS_PATIENCE_S = TRACK_PATIENCE_S = 30.0
KIND_WIDTH = 20  # of the longest kinds
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS}  # name no file


@with_connection
def watch(
    run: RunArgument,
    output: LinesFormatOption = Format.TABLE,
    *,
    connection: Connection,
) -> None:
    """Follow a run's rounds and events until it ends, even if the coordinator restarts.

    On a terminal it shows a live view: what the open round waits for and until when, the losses, and the workers, the
    slowest first, each with its stage, how many rounds it is behind, its speed, when it was last seen, and its bytes.
    Elsewhere it prints a line for each round and event. Ctrl-C ends only the command, not the run.

    As JSON: a line each time something happens, with the current run and workers, the rounds that were not closed
    before, the new events, and, while the coordinator cannot be reached, the error in `trouble`.

    \b
    Example:
      outerstep run watch my-run
    """
    with connection.open() as client:
        looks = follow(client, run, patience_s=WATCH_PATIENCE_S, sleep=time.sleep)
        if output is Format.JSON:
            for look in looks:
                shown = {"run": look.run, "rounds": look.rounds, "workers": look.workers, "events": look.events}
                print_json_line({**shown, "trouble": look.trouble})
            return
        with display_for(console()) as display:
            for look in looks:
                display.show(look)


@with_connection
def events(
    run: RunArgument,
    following: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue with new events until the run ends.")
    ] = False,
    kinds: Annotated[
        list[str] | None,
        typer.Option(
            "--kind", metavar="KIND", help="Only events of this kind; docs/rest.md lists the kinds. Repeatable."
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Maximum number of past events, the newest ones.")] = 100,
    output: FormatOption = Format.TABLE,
    *,
    connection: Connection,
) -> None:
    """Show a run's events, oldest first: time, kind, and a sentence.

    With --follow it continues if the coordinator restarts, and JSON is one line per event.

    \b
    Example:
      outerstep run events my-run --kind late --kind lost
      outerstep run events my-run --follow --limit 10
    """

    def warn_if_unknown(events: Iterable[Event]) -> None:
        """Warn about kinds without any event: a mistyped kind would look as if nothing had happened."""
        there = sorted({each.kind for each in events})
        for kind in kinds or []:
            if kind not in there:
                say(f"outerstep: no event of kind {kind} so far; kinds seen: {', '.join(there)}", err=True)

    with connection.open() as client:
        looks = follow(client, run, patience_s=EVENTS_PATIENCE_S, sleep=time.sleep)
        news: Iterable[tuple[Iterable[Event], str | None]] = (
            ((each.events, each.trouble) for each in looks) if following else [(tuple(client.events(run)), None)]
        )
        for number, (found, trouble) in enumerate(news):
            newest = limit if number == 0 else None  # only the first has past events
            wanted = list(deque((each for each in found if not kinds or each.kind in kinds), maxlen=newest))
            if output is Format.TABLE:
                _print_events(wanted)
            elif following:
                for event in wanted:
                    print_json_line(event)
            else:
                print_json(wanted)
            if number == 0:
                warn_if_unknown(found)
            if trouble:
                _print_trouble(trouble)


def _print_events(events: Iterable[Event]) -> None:
    for event in events:
        say(f"{time_text(event.at)}  {event.kind:<{KIND_WIDTH}}  {event.message}")


@with_connection
def track(
    run: RunArgument,
    to: Annotated[TrackerName, typer.Option("--to", help="The tracker.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file (jsonl) or directory to write. Default: RUN.jsonl, RUN-tensorboard and so on, here."
        ),
    ] = None,
    *,
    connection: Connection,
) -> None:
    """Send a run's rounds and events to an experiment tracker, from any machine, until the run is over.

    If it is started again it continues where it stopped, without gaps or repetitions; it also waits while the
    coordinator restarts. The step of a metric is its round. jsonl needs nothing else; each other tracker needs its
    extra, and has its own settings (WANDB_MODE=offline, TRACKIO_SPACE_ID …).

    \b
    Example:
      outerstep run track my-run --to wandb
      outerstep run track my-run --to jsonl --out my-run.jsonl
    """
    kind = TRACKERS[to]
    command = f"outerstep run track --to {to}"
    module = (
        import_extra(kind.module, extra=kind.extra, command=command)
        if kind.extra
        else importlib.import_module(kind.module)
    )
    with connection.open() as client:
        detail = client.run(run)
        place = out or Path(kind.out.format(run=run))
        with _tracker_errors(to):
            tracker = module.Tracker(place, tracked_name(detail), detail)
        try:
            for record in follow_records(
                client, run, tracker.first, patience_s=TRACK_PATIENCE_S, sleep=time.sleep, on_trouble=_print_trouble
            ):
                with _tracker_errors(to):
                    tracker.write(record)
                _print(record)
        finally:
            with _tracker_errors(to):
                tracker.close()
    say(f"run {run} is tracked to its end in {place}")


@contextmanager
def _tracker_errors(to: TrackerName) -> Iterator[None]:
    """Raise errors of files as UsageError of --out, and the library's other errors, such as an unreachable server, as
    Transient."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno in _DISK_ERRORS:
            raise UsageError(f"--out: {error_text(error)}") from error
        raise Transient(
            f"--to {to}: {error or type(error).__name__}; the same command continues where it stopped"
        ) from error


def _print(record: Record) -> None:
    for event in record.events:
        say(event_line(event))
    figures = ", ".join(f"{name} {value:.6g}" for name, value in record.figures.items())
    say(f"{'state' if record.final else 'round'} {record.round}: {figures}")


def _print_trouble(trouble: str) -> None:
    say(f"outerstep: {trouble}; retrying", err=True)
