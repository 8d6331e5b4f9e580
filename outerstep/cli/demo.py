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

from outerstep.cli.errors import UsageError, check_not_hidden
from outerstep.cli.printing import Format, FormatOption, console, print_json, say_lines
from outerstep.demo import DemoPlan, run_demo
from outerstep.demo.processes import ChildError
from outerstep.demo.spec import ROUNDS, demo_spec
from outerstep.live_view import display_for
from protocol.codecs import DownloadCodecName

FAILED = 1
NEEDED = {"torch": "worker", "transformers": "worker", "fastapi": "coordinator", "sqlalchemy": "coordinator"}


def demo(
    workers: Annotated[int, typer.Option(min=1, max=64, help="Worker processes.")] = 4,
    rounds: Annotated[
        int, typer.Option(min=1, max=10_000, help="Rounds; 24 take about a minute on two cores.")
    ] = ROUNDS,
    codec: Annotated[DownloadCodecName, typer.Option(help="Codec of pseudo-gradients and deltas.")] = "int8",
    keep: Annotated[
        Path | None,
        typer.Option(help="An empty or new directory for data, logs and the trained model.", show_default=False),
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """See it work: a coordinator and several workers on this machine train a small model on real text.

    They are separate processes that talk over HTTP, as they would across the internet. The text is Python's standard
    library. It ends with a summary: losses, whether all replicas are bit-identical, bytes, and text that the model
    writes. With JSON only the summary goes to stdout. Ctrl-C ends everything.

    \b
    Exit codes: 0 the run finished and the replicas are identical, 1 otherwise, 2 usage.

    \b
    Example:
      outerstep demo --workers 2 --rounds 10 --keep ./demo-data
    """
    _check_installed()
    check_not_hidden("worker")  # it writes the sample at the end
    for_programs = output is Format.JSON  # then only JSON goes to stdout
    _turn_signals_into_exits()
    with _directory(keep) as directory:
        try:
            spec = demo_spec(workers=workers, rounds=rounds, codec=codec)
            summary, text = run_demo(DemoPlan(workers, spec, directory), display_for(console(stderr=for_programs)))
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
            f"  outerstep coordinator --data-dir {keep / 'coordinator'}\n"
            f"  outerstep run show demo --token-file {keep / 'coordinator' / 'admin.token'}",
            err=for_programs,
        )
    if not summary.replicas_identical:
        raise typer.Exit(FAILED)


def _check_installed() -> None:
    missing = sorted({extra for module, extra in NEEDED.items() if importlib.util.find_spec(module) is None})
    if missing:
        raise UsageError(
            f"`outerstep demo` needs packages that are not installed; run: pip install 'outerstep[{','.join(missing)}]'"
        )


def _turn_signals_into_exits() -> None:
    """Let SIGTERM and SIGHUP unwind the stack like Ctrl-C, so that processes are ended and files removed. On Ctrl-C,
    print a line first, because this takes a few seconds."""

    def interrupt(number: int, _: FrameType | None) -> None:
        say_lines("\nending the workers and the coordinator", err=True)
        raise KeyboardInterrupt

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if a shell set it to be ignored
        signal.signal(signal.SIGINT, interrupt)
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, leave)


@contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    """Yield the working directory: `keep`, or a temporary one. Raises UsageError if `keep` is not empty."""
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
        raise UsageError(f"--keep {keep}: not empty; name a new directory, so that nothing in it is lost")
    yield keep.absolute()
