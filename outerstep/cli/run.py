"""The commands `outerstep run …`, but for those that have a module of their own."""

import os
import sys
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import typer

from outerstep.advice import advice
from outerstep.cli.allowing import AllowFactoryOption, MaxParametersOption, parse_max_parameters
from outerstep.cli.connection import (
    DEFAULT_URL,
    CaOption,
    TokenFileOption,
    TokenOption,
    UrlOption,
    find_token,
    operator_client,
)
from outerstep.cli.faults import UsageError, check_not_hidden, import_extra
from outerstep.cli.printing import Format, FormatOption, console, print_json, say, time_text
from outerstep.common.connections import error_text
from outerstep.common.exit_codes import Exit
from outerstep.common.quantities import UNKNOWN, bytes_text, count_text, counted, held_out_text, natural
from outerstep.display import round_table, table, worker_table
from outerstep.follow import FIRST_ROUNDS
from protocol.errors import SpecError
from protocol.messages import SUCCESSIVE, Account, RunChange, RunDetail, RunInfo, WorkerChange
from protocol.spec.run import RunSpec, parse_spec

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")]
WorkerArgument = Annotated[str, typer.Argument(metavar="WORKER", help="The worker's name.")]

app = typer.Typer(help="Create, follow, steer and export runs.", no_args_is_help=True)


@app.command()
def create(
    spec: Annotated[Path, typer.Argument(metavar="SPEC.toml", help="The run spec; - reads it from stdin.")],
    output: FormatOption = Format.TABLE,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """Create a run from a spec. It never changes afterwards; docs/settings.md lists its keys.

    The spec is checked here first. Creating the same run again does nothing. What is outside of what was found sound,
    such as few rounds, is noted on stderr.

    \b
    Example:
      outerstep run create run.toml --token-file ./data/admin.token
    with this run.toml:
      name = "my-run"
      model.preset = "tiny"
      sync.rounds = 50
    """
    text, parsed = read_spec(spec)
    with operator_client(url, token, token_file, ca) as client:
        run, new = client.create_run(text)
    if output is Format.JSON:
        print_json(run)
    else:
        say(f"run {run.name} {'is created' if new else 'was there already, with this same spec'}: {run.reason}")
    for each in advice(parsed):
        say(f"note: {each}", err=True)


@app.command("ls")
def list_runs(
    output: FormatOption = Format.TABLE,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """List the runs.

    \b
    Example:
      outerstep run ls --format json
    """
    with operator_client(url, token, token_file, ca) as client:
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


@app.command()
def show(
    run: RunArgument,
    output: FormatOption = Format.TABLE,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """Show a run, its workers and its last rounds.

    As JSON: an object with the keys run, workers and rounds (newest first, at most 20).

    \b
    Example:
      outerstep run show my-run
    """
    with operator_client(url, token, token_file, ca) as client:
        detail = client.run(run)
        workers = client.workers(run)
        rounds = list(islice(client.rounds(run), FIRST_ROUNDS))
    if output is Format.JSON:
        print_json({"run": detail, "workers": workers, "rounds": rounds})
        return
    out = console()
    out.print(_facts(detail))
    out.print()
    out.print(worker_table(workers, out.width))
    out.print()
    out.print(round_table(reversed(rounds), out.width))


@app.command()
def units(
    run: RunArgument,
    output: FormatOption = Format.TABLE,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """Show how far each epoch of the training set is: its work units that were trained on, are assigned, or are free.
    With private data, of each worker's own set.

    \b
    Example:
      outerstep run units my-run
    """
    with operator_client(url, token, token_file, ca) as client:
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


@app.command()
def checkpoints(
    run: RunArgument,
    output: FormatOption = Format.TABLE,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """List the checkpoints that are kept of a run, newest first: the states that can be exported and evaluated.

    One that the coordinator's disk has lost is marked with what is wrong.

    \b
    Example:
      outerstep run checkpoints my-run
    """
    with operator_client(url, token, token_file, ca) as client:
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


@app.command()
def pause(
    run: RunArgument,
    output: FormatOption = Format.TABLE,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """Pause a run: the open round is closed, and no other is opened. Workers stay and wait.

    \b
    Example:
      outerstep run pause my-run
    """
    _change(run, "paused", output, url, token, token_file, ca)


@app.command()
def resume(
    run: RunArgument,
    output: FormatOption = Format.TABLE,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """Let a paused run go on.

    \b
    Example:
      outerstep run resume my-run
    """
    _change(run, "running", output, url, token, token_file, ca)


@app.command()
def drain(
    run: RunArgument,
    output: FormatOption = Format.TABLE,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """Send a run's workers home: the open round is finished, the workers leave, and then the run is paused.

    Nothing is lost: a checkpoint of the last state is kept. `outerstep run resume` and new workers let it go on.

    \b
    Example:
      outerstep run drain my-run
    """
    _change(run, "draining", output, url, token, token_file, ca)


@app.command()
def stop(
    run: RunArgument,
    output: FormatOption = Format.TABLE,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """End a run for good: its workers leave. What it has reached can still be exported.

    \b
    Example:
      outerstep run stop my-run
    """
    _change(run, "stopped", output, url, token, token_file, ca)


@app.command("rm")
def remove(
    run: RunArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """Remove a run that has ended, for good: its checkpoints, its history, all that the coordinator has of it.

    \b
    Example:
      outerstep run rm my-run
    """
    with operator_client(url, token, token_file, ca) as client:
        if not yes:
            size = bytes_text(sum(client.run(run).disk_bytes.model_dump().values()))
            confirm(f"Remove the run {run} with its checkpoints and history, {size}, for good?")
        client.remove_run(run)
    say(f"the run {run} is removed")


def confirm(question: str) -> None:
    """Return if the answer on the terminal is yes; end the command if it is no. Raises UsageError where nobody can be
    asked."""
    try:
        if typer.confirm(question, err=True):
            return
    except typer.Abort as error:  # the end of the input
        raise UsageError("nobody is there to be asked: give --yes") from error
    say("nothing was changed", err=True)
    raise typer.Exit(Exit.REFUSED)


@app.command()
def evict(
    run: RunArgument,
    worker: WorkerArgument,
    ban: Annotated[bool, typer.Option("--ban", help="It may not join again until it is readmitted.")] = False,
    output: FormatOption = Format.TABLE,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """End a worker's membership: nobody waits for it, and its work units return to the pool.

    Its process joins again by itself, unless it is banned. A ban is of the worker's name: who has a token for several
    names may join under another one, so revoke the token (`token ls`) where you do not trust its holder.

    \b
    Example:
      outerstep run evict my-run box-7 --ban
    """
    _change_worker(run, worker, "banned" if ban else "evicted", output, url, token, token_file, ca)


@app.command()
def readmit(
    run: RunArgument,
    worker: WorkerArgument,
    output: FormatOption = Format.TABLE,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """Let a banned worker join again.

    \b
    Example:
      outerstep run readmit my-run box-7
    """
    _change_worker(run, worker, "readmitted", output, url, token, token_file, ca)


@app.command()
def release(
    run: RunArgument,
    worker: WorkerArgument,
    output: FormatOption = Format.TABLE,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """Give a worker's name away: it belongs to the next token that joins under it.

    A name belongs to the token that joined under it first, so that nobody else can be taken for that worker. Release it
    where a box has lost its token, or is to have another one.

    \b
    Example:
      outerstep run release my-run box-7
    """
    _change_worker(run, worker, "released", output, url, token, token_file, ca)


@app.command()
def export(
    run: RunArgument,
    out: Annotated[Path, typer.Option(help="A new or empty directory to write.", show_default=False)],
    state: Annotated[
        int | None,
        typer.Option(
            "--round", min=0, help="The checkpoint to export: the model before this round. Default: the latest."
        ),
    ] = None,
    allow_factory: AllowFactoryOption = None,
    max_parameters: MaxParametersOption = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a run with model.lora: write the whole model, not the adapters alone.")
    ] = False,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """Write a run's model as a Hugging Face directory, which `AutoModelForCausalLM.from_pretrained` loads.

    Needs the worker's libraries (torch, transformers), but no GPU. Adapters are written as peft has them, for the model
    that they were trained on. The run's tokenizer goes with the model; bytes have none: their token ids are the bytes
    of UTF-8 text. The model of a user's own function is written as model.safetensors beside the spec; so are the
    trained parameters of a run whose scripts bring the model.
    Where a spec names such a function, --allow-factory has to name it too: it is run here.

    \b
    Example:
      outerstep run export my-run --out ./model
    """
    most = parse_max_parameters(max_parameters)
    secret = find_token(token, token_file, os.environ)
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"--out: {out} exists and is not an empty directory; choose another")
    except OSError as error:
        raise UsageError(f"--out: {error_text(error)}") from error
    check_not_hidden("worker")
    with operator_client(url, secret, None, ca) as client:
        client.run(run)  # the export, below, would wait for ever for a coordinator that is not there
        exporting = import_extra("outerstep.exporting", extra="worker", command="outerstep run export")
        try:
            exporting.export_model(
                client.http,
                run,
                secret,
                out,
                state,
                merge=merge,
                factories=tuple(allow_factory or ()),
                max_parameters=most,
            )
        except OSError as error:
            raise UsageError(f"--out: {error}") from error
    say(f"the model of the run {run} is in {out}")


def _change(
    run: str,
    state: Literal["running", "paused", "draining", "stopped"],
    output: Format,
    url: str,
    token: str | None,
    token_file: Path | None,
    ca: Path | None,
) -> None:
    with operator_client(url, token, token_file, ca) as client:
        info: RunInfo = client.change_run(run, RunChange(state=state))
    if output is Format.JSON:
        print_json(info)
    else:
        say(f"run {info.name} is {info.state}: {info.reason}")


def _change_worker(
    run: str,
    worker: str,
    state: Literal["evicted", "banned", "readmitted", "released"],
    output: Format,
    url: str,
    token: str | None,
    token_file: Path | None,
    ca: Path | None,
) -> None:
    with operator_client(url, token, token_file, ca) as client:
        changed = client.change_worker(run, worker, WorkerChange(state=state))
    if output is Format.JSON:
        print_json(changed)
    else:
        say(f"worker {worker} of the run {run} is {state}")


def read_spec(path: Path) -> tuple[str, RunSpec]:
    """Return the spec's text, and what it says.

    Raises UsageError for an unreadable file, SpecError naming the file for a wrong spec.
    """
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text") from error
    try:
        return text, parse_spec(text)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from error


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
    name = model.preset or model.factory or model.pretrained or (model.config or {}).get("model_type") or "of a script"
    adapters = "" if model.lora is None else f" with adapters of rank {model.lora.rank}"
    start = "" if model.run is None else f" from the run {model.run}"
    cut = UNKNOWN if run.fragments is None else counted(run.fragments, "fragment")
    trained = f"{count_text(run.elements)} parameters in {cut}"
    frozen = "" if run.frozen is None else f", {count_text(run.frozen.elements)} frozen"
    return f"{name}{adapters}{start}, {trained}{frozen}"


def shares_text(account: Account) -> str:
    """Return the shares of the stages in the workers' time, the largest first."""
    shares = {stage: seconds / account.total_s for stage, seconds in account.seconds.items() if stage in SUCCESSIVE}
    largest = sorted(shares.items(), key=lambda share: -share[1])
    return ", ".join(f"{stage} {share:.0%}" for stage, share in largest if share >= 0.005) or UNKNOWN


def _overlap(spec: RunSpec) -> str:
    sync = spec.sync
    steps = "a whole round" if sync.overlap == "eager" else f"{sync.overlap} inner steps"
    alpha = "" if sync.alpha == "carry" else f", alpha {sync.alpha:g}"
    return f"{steps}, fragments {sync.offsets}{alpha}"


def _inner_steps(spec: RunSpec) -> str:
    sync = spec.sync
    return f"{sync.round_s:g} s of" if sync.inner_steps == "auto" else str(sync.inner_steps)
