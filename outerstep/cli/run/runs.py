"""The commands `outerstep run create|ls`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from outerstep.cli.asking import Answer, asks
from outerstep.cli.errors import UsageError
from outerstep.cli.printing import say
from outerstep.cli.run.advice import advice, known_config
from outerstep.cli.run.baseline import baseline_of
from outerstep.common.quantities import count_text, held_out_text
from outerstep.display import table
from outerstep.epochs import completed
from outerstep.rest import Client
from protocol.errors import SpecError
from protocol.spec.run import RunSpec, parse_spec
from protocol.text import decoded

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")]


@asks
def create(
    client: Client,
    spec: Annotated[Path, typer.Argument(metavar="SPEC.toml", help="The run spec; - reads it from stdin.")],
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            min=1,
            max=10_000,
            help="Without sync.rounds, and for --baseline: the number of workers. Default: min_workers.",
        ),
    ] = None,
    epochs: Annotated[
        float | None, typer.Option("--epochs", min=0.01, max=10_000.0, help="Without sync.rounds: epochs. Default: 3.")
    ] = None,
    baseline: Annotated[
        bool,
        typer.Option(
            "--baseline",
            help="Create the synchronous run to compare the spec's run with, NAME-baseline, instead: one worker with "
            "the batches of all in each inner step, with the same seed and schedule and as many tokens.",
        ),
    ] = False,
) -> Answer:
    """Create a run from a spec, which never changes afterwards. docs/settings.md lists its keys.

    The spec is checked here first. Creating the same run again does nothing. Settings outside the tested range, such as
    too few rounds, get a note on stderr.

    If a spec for conversations has no sync.rounds, they are chosen for a few epochs of its training set, which must be
    on this machine, and so are batch_size, inner_steps and warmup_steps if they are left out. With --epochs this works
    for text too. The choice is explained on stderr.

    \b
    Example:
      outerstep run create run.toml --token-file ./data/admin.token
    with this run.toml:
      name = "my-run"
      model.preset = "tiny"
      sync.rounds = 50
    What the run costs beside synchronous training with as much work:
      outerstep run create run.toml --baseline --workers 8
      outerstep compare my-run-baseline my-run
    """
    text, parsed = _complete_spec(spec, workers, epochs, for_baseline=baseline)
    if baseline:
        people = workers or parsed.members.min_workers
        if people == 1:
            raise UsageError("--baseline: give --workers, how many workers the run will have")
        text = baseline_of(text, parsed, people)
        parsed = parse_spec(text)
        say(f"one worker with {parsed.inner.batch_size} sequences per inner step, the work of {people}", err=True)
    if (fault := parsed.length_fault(known_config(parsed.model))) is not None:
        raise SpecError(f"{spec}: {fault}")
    run, new = client.create_run(text)
    for each in [] if baseline else advice(parsed):
        say(f"note: {each}", err=True)
    return Answer(
        run, lambda: f"run {run.name} {'is created' if new else 'already exists with this spec'}: {run.reason}"
    )


@asks
def list_runs(client: Client) -> Answer:
    """List the runs.

    \b
    Example:
      outerstep run ls --format json
    """
    runs = list(client.runs())
    columns = ["run", "state", ">round", ">workers", ">tokens", ">held-out loss", "~reason"]
    rows = [
        (
            run.name,
            run.state.value,
            f"{run.round}/{run.rounds}",
            str(run.live_workers),
            count_text(run.tokens),
            held_out_text(run.held_out_loss, run.held_out_bits_per_byte),
            run.reason,
        )
        for run in runs
    ]
    return Answer(runs, lambda: table(columns, rows))


def read_spec(path: Path) -> tuple[str, RunSpec]:
    """Return the spec's text, and the parsed spec.

    Raises UsageError for an unreadable file, and SpecError that names the file for an invalid spec.
    """
    text = read_text(path)
    try:
        return text, parse_spec(text)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from error


def read_text(path: Path) -> str:
    """Return the text of a spec; - reads stdin. Raises UsageError."""
    try:
        return decoded(sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def _complete_spec(path: Path, workers: int | None, epochs: float | None, *, for_baseline: bool) -> tuple[str, RunSpec]:
    """Return the spec's text, with the number of rounds that its training set suggests if it gives none, and the parsed
    spec. Raises what `read_spec` raises, and UsageError for options without effect."""
    text = read_text(path)
    try:
        found = completed(text, workers, epochs)
        if found is None:
            if (workers is not None and not for_baseline) or epochs is not None:
                raise UsageError("--workers and --epochs choose sync.rounds: leave them out, or sync.rounds")
            return text, parse_spec(text)
        text, schedule = found
        parsed = parse_spec(text)
    except (SpecError, ValueError) as error:
        raise SpecError(f"{path}: {error}") from error
    except ModuleNotFoundError as error:
        raise SpecError(
            f"{path}: sync.rounds: give it, or install {error.name} here, with which it is chosen: "
            "pip install 'outerstep[worker]'"
        ) from error
    for sentence in schedule.explained():
        say(sentence, err=True)
    return text, parsed
