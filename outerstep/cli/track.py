"""The command `outerstep run track`."""

import errno
import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from outerstep.cli.connection import DEFAULT_URL, CaOption, TokenFileOption, TokenOption, UrlOption, operator_client
from outerstep.cli.faults import UsageError, import_extra
from outerstep.cli.printing import say
from outerstep.cli.run import RunArgument
from outerstep.display import event_line
from outerstep.tracking import TRACKERS, TrackerName
from outerstep.tracking.records import Record, follow_records, tracked_name
from protocol.errors import Transient

PATIENCE_S = 30.0
_OF_A_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS}  # which name no file in a write


def track(
    run: RunArgument,
    to: Annotated[TrackerName, typer.Option("--to", help="Where to.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file (jsonl) or directory to write. Default: RUN.jsonl, or RUN-tensorboard and so on, here."
        ),
    ] = None,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """Track a run's rounds and events in a tracker, from any machine, until the run is over and its workers have left.

    Started again it goes on where it was, with neither gap nor repetition; a restart of the coordinator is waited for.
    The step of a figure is its round. jsonl needs nothing; the others have an extra each, and their own settings
    (WANDB_MODE=offline, TRACKIO_SPACE_ID …).

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
    with operator_client(url, token, token_file, ca) as client:
        detail = client.run(run)
        place = out or Path(kind.out.format(run=run))
        with _telling(to):
            tracker = module.Tracker(place, tracked_name(detail), detail)
        try:
            for record in follow_records(
                client, run, tracker.first, patience_s=PATIENCE_S, sleep=time.sleep, tell=_tell
            ):
                with _telling(to):
                    tracker.write(record)
                _print(record)
        finally:
            with _telling(to):
                tracker.close()
    say(f"the run {run} is tracked to its end, in {place}")


@contextmanager
def _telling(to: TrackerName) -> Iterator[None]:
    """Tell what fails of a file as a fault of --out, and whatever else the tracker's library cannot do, such as reach
    its server, as one that may pass."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno in _OF_A_DISK:
            raise UsageError(f"--out: {error}") from error
        raise Transient(f"--to {to}: {error or type(error).__name__}; the same command goes on where it was") from error


def _print(record: Record) -> None:
    for event in record.events:
        say(event_line(event))
    figures = ", ".join(f"{name} {value:.6g}" for name, value in record.figures.items())
    say(f"{'state' if record.final else 'round'} {record.round}: {figures}")


def _tell(trouble: str) -> None:
    say(f"outerstep: {trouble}; asking again", err=True)
