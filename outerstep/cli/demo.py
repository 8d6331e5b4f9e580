"""The command `outerstep demo`."""

import importlib.util
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from outerstep.cli.faults import UsageError, check_not_hidden
from outerstep.cli.printing import Format, FormatOption, console, print_json, say_lines
from outerstep.demo import Plan, run_demo
from outerstep.demo.processes import ChildError
from outerstep.demo.spec import ROUNDS, demo_spec
from outerstep.picture import display_for
from protocol.codecs import DownloadCodecName

FAILED = 1
NEEDED = {"torch": "worker", "transformers": "worker", "fastapi": "coordinator", "sqlalchemy": "coordinator"}


def demo(
    workers: Annotated[int, typer.Option(min=1, max=64, help="Worker processes.")] = 4,
    rounds: Annotated[
        int, typer.Option(min=1, max=10_000, help="Rounds; 24 take about a minute on two cores.")
    ] = ROUNDS,
    codec: Annotated[DownloadCodecName, typer.Option(help="What pseudo-gradients and deltas travel as.")] = "int8",
    keep: Annotated[
        Path | None,
        typer.Option(help="An empty or new directory to keep data, logs and the trained model in.", show_default=False),
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """See it work: a coordinator and several workers on this machine train a small model on real text.

    They are separate processes that talk over HTTP, as they would from far apart. The text is Python's own standard
    library. The end is a summary: losses, whether all replicas are bit-identical, bytes, and what the model writes; as
    JSON it is all that goes to stdout. Ctrl-C ends everything.

    \b
    Exit codes: 0 the run finished and the replicas are identical, 1 not so, 2 usage.

    \b
    Example:
      outerstep demo --workers 2 --rounds 10 --keep ./demo-data
    """
    _check_installed()
    check_not_hidden("worker")  # which writes the sample in the end
    for_programs = output is Format.JSON  # who have stdout for themselves
    _turn_signals_into_exits()
    with _directory(keep) as directory:
        try:
            spec = demo_spec(workers=workers, rounds=rounds, codec=codec)
            summary, text = run_demo(Plan(workers, spec, directory), display_for(console(stderr=for_programs)))
        except ChildError as error:
            say_lines(f"outerstep: {error}", err=True)
            raise typer.Exit(FAILED) from error
    if for_programs:
        print_json(asdict(summary))
    else:
        say_lines(f"\n{text}")
    if keep is not None:
        say_lines(
            f"\nKept in {keep}: the model (model/), the logs (logs/) and the coordinator's data. Look at the run with\n"
            f"  outerstep coordinator --data {keep / 'coordinator'}\n"
            f"  outerstep run show demo --token-file {keep / 'coordinator' / 'admin.token'}",
            err=for_programs,
        )
    if not summary.replicas_identical:
        raise typer.Exit(FAILED)


def _check_installed() -> None:
    missing = sorted({extra for module, extra in NEEDED.items() if importlib.util.find_spec(module) is None})
    if missing:
        raise UsageError(
            f"`outerstep demo` needs what is not installed; run: pip install 'outerstep[{','.join(missing)}]'"
        )


def _turn_signals_into_exits() -> None:
    """Let SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that processes are ended and files removed; and tell
    that this begins, for it takes a few seconds."""

    def interrupt(number: int, _: FrameType | None) -> None:
        say_lines("\nending the workers and the coordinator", err=True)
        raise KeyboardInterrupt

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell lets it be ignored
        signal.signal(signal.SIGINT, interrupt)
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, leave)


@contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    """Yield the directory to work in: `keep`, or a temporary one. Raises UsageError if `keep` is not empty."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="outerstep-demo-") as temporary:
            yield Path(temporary)
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
        occupied = any(keep.iterdir())
    except OSError as error:
        raise UsageError(f"--keep {keep}: {error.strerror}") from error
    if occupied:
        raise UsageError(f"--keep {keep}: not empty; name a new directory, so that nothing there is lost")
    yield keep.absolute()
