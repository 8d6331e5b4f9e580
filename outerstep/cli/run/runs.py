"""The commands that create and show runs: `outerstep run create|ls|show|units|checkpoints`."""

import sys
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from outerstep.cli.errors import UsageError
from outerstep.cli.options import (
    Connection,
    with_connection,
)
from outerstep.cli.printing import Format, FormatOption, console, print_json, say, time_text
from outerstep.cli.run.advice import advice, known_config
from outerstep.cli.run.baseline import baseline_of
from outerstep.common.quantities import UNKNOWN, bytes_text, count_text, counted, held_out_text, natural
from outerstep.display import costs_texts, round_table, table, worker_table
from outerstep.epochs import completed
from outerstep.follow import FIRST_ROUNDS, last_reported
from protocol.errors import SpecError
from protocol.messages import SUCCESSIVE, Account, RunDetail
from protocol.spec.run import RunSpec, parse_spec
from protocol.text import decoded

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")]
WorkerArgument = Annotated[str, typer.Argument(metavar="WORKER", help="The worker's name.")]


@with_connection
def create(
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
    output: FormatOption = Format.TABLE,
    *,
    connection: Connection,
) -> None:
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
    with connection.open() as client:
        run, new = client.create_run(text)
    if output is Format.JSON:
        print_json(run)
    else:
        say(f"run {run.name} {'is created' if new else 'already exists with this spec'}: {run.reason}")
    for each in [] if baseline else advice(parsed):
        say(f"note: {each}", err=True)


@with_connection
def list_runs(
    output: FormatOption = Format.TABLE,
    *,
    connection: Connection,
) -> None:
    """List the runs.

    \b
    Example:
      outerstep run ls --format json
    """
    with connection.open() as client:
        runs = list(client.runs())
    if output is Format.JSON:
        print_json(runs)
        return
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
    console().print(table(columns, rows))


@with_connection
def show(
    run: RunArgument,
    output: FormatOption = Format.TABLE,
    *,
    connection: Connection,
) -> None:
    """Show a run, its workers and its last rounds.

    As JSON: an object with the keys run, workers and rounds (newest first, at most 20).

    \b
    Example:
      outerstep run show my-run
    """
    with connection.open() as client:
        detail = client.run(run)
        workers = client.workers(run)
        rounds = list(islice(client.rounds(run), FIRST_ROUNDS))
        reported = None if output is Format.JSON else last_reported(client, detail)
    if output is Format.JSON:
        print_json({"run": detail, "workers": workers, "rounds": rounds})
        return
    out = console()
    out.print(_facts(detail))
    out.print()
    out.print(worker_table(workers, out.width, reported))
    for line in costs_texts(reported) if reported else []:
        out.print(line, markup=False, highlight=False)
    out.print()
    out.print(round_table(reversed(rounds), out.width))


@with_connection
def units(
    run: RunArgument,
    output: FormatOption = Format.TABLE,
    *,
    connection: Connection,
) -> None:
    """Show the progress of each epoch of the training set: work units that were trained on, are assigned, or are free.
    With private data, each worker's own set is listed.

    \b
    Example:
      outerstep run units my-run
    """
    with connection.open() as client:
        epochs = list(client.epochs(run))
    if output is Format.JSON:
        print_json(epochs)
        return
    private = ["worker"] if any(each.worker for each in epochs) else []
    columns = [*private, ">epoch", ">units", ">trained on", ">assigned", ">free", "~assigned to"]
    rows = [
        (
            *([each.worker or UNKNOWN] if private else []),
            str(each.epoch),
            count_text(each.units),
            count_text(each.consumed),
            count_text(sum(each.assigned.values())),
            count_text(each.free),
            ", ".join(sorted(each.assigned, key=natural)),
        )
        for each in epochs
    ]
    console().print(table(columns, rows))


@with_connection
def checkpoints(
    run: RunArgument,
    output: FormatOption = Format.TABLE,
    *,
    connection: Connection,
) -> None:
    """List a run's checkpoints, newest first: the states that can be exported and evaluated.

    A checkpoint with a missing or corrupt file is marked with the damage.

    \b
    Example:
      outerstep run checkpoints my-run
    """
    with connection.open() as client:
        kept = list(client.checkpoints(run))
    if output is Format.JSON:
        print_json(kept)
        return
    columns = [">round", "at", ">size", "~digest"]
    rows = [[str(each.round), time_text(each.created_at), bytes_text(each.bytes), each.state_digest] for each in kept]
    if any(each.damage for each in kept):
        columns.append("~damage")
        rows = [[*row, each.damage or ""] for row, each in zip(rows, kept, strict=True)]
    console().print(table(columns, rows))


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


def _facts(run: RunDetail) -> object:
    spec = run.spec
    rows = [
        ("run", run.name),
        ("state", f"{run.state}: {run.reason}"),
        ("round", f"{run.round} of {run.rounds}, {_inner_steps(spec)} inner steps each"),
        ("model", _model(run)),
        *([("data", "private: each worker's own")] if spec.data.private else []),
        ("codec", f"{spec.sync.upload_codec} up, {spec.sync.download_codec} down"),
        *([("overlap", _overlap(spec))] if spec.sync.streams else []),
        ("workers", f"{run.live_workers} live, at least {spec.members.min_workers} needed"),
        ("tokens", count_text(run.tokens)),
        ("uploaded", bytes_text(run.upload_bytes)),
        ("moved", f"{bytes_text(run.account.upload_bytes)} up, {bytes_text(run.account.download_bytes)} down"),
        ("workers' time", shares_text(run.account)),
        ("on disk", bytes_text(sum(run.disk_bytes.model_dump().values()))),
        ("divergences", str(run.divergences)),
        ("held-out loss", held_out_text(run.held_out_loss, run.held_out_bits_per_byte)),
        ("created", time_text(run.created_at)),
        ("spec digest", run.spec_digest),
        ("state digest", run.state_digest or UNKNOWN),
    ]
    facts = table(["", "~"], rows)
    facts.show_header = False
    return facts


def _model(run: RunDetail) -> str:
    model = run.spec.model
    name = (
        model.preset or model.factory or model.pretrained or (model.config or {}).get("model_type") or "from a script"
    )
    adapters = "" if model.lora is None else f" with adapters of rank {model.lora.rank}"
    start = "" if model.run is None else f" from the run {model.run}"
    cut = UNKNOWN if run.fragments is None else counted(run.fragments, "fragment")
    trained = f"{count_text(run.elements)} parameters in {cut}"
    frozen = "" if run.frozen is None else f", {count_text(run.frozen.elements)} frozen"
    return f"{name}{adapters}{start}, {trained}{frozen}"


def shares_text(account: Account) -> str:
    """Return the share of each stage in the workers' time, largest first."""
    shares = {stage: seconds / account.total_s for stage, seconds in account.seconds.items() if stage in SUCCESSIVE}
    largest = sorted(shares.items(), key=lambda share: -share[1])
    return ", ".join(f"{stage} {share:.0%}" for stage, share in largest if share >= 0.005) or UNKNOWN


def _overlap(spec: RunSpec) -> str:
    sync = spec.sync
    if sync.wait == "never":
        return f"workers never wait: up to {sync.most_steps_of(sync.inner_steps)} inner steps per round"
    steps = "a whole round" if sync.overlap == "eager" else f"{sync.overlap} inner steps"
    alpha = "" if sync.alpha == "carry" else f", alpha {sync.alpha:g}"
    return f"{steps}, fragments {sync.offsets}{alpha}"


def _inner_steps(spec: RunSpec) -> str:
    sync = spec.sync
    return f"up to {sync.inner_steps}" if sync.wait == "never" else str(sync.inner_steps)
