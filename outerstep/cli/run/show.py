"""The command `outerstep run show`: a run, or its workers, checkpoints or work units."""

from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table

from outerstep.cli.asking import Answer, asks
from outerstep.cli.errors import UsageError
from outerstep.cli.printing import console, time_text
from outerstep.cli.run.runs import RunArgument
from outerstep.common.quantities import (
    UNKNOWN,
    bytes_text,
    count_text,
    counted,
    duration_text,
    held_out_text,
    loss_text,
    natural,
)
from outerstep.display import costs_texts, facts, lines, round_table, table, tables, waits_text, worker_table
from outerstep.follow import FIRST_ROUNDS, last_reported
from outerstep.rest import Client
from protocol.messages import (
    SUCCESSIVE,
    Account,
    CheckpointInfo,
    EpochInfo,
    RoundDetail,
    RunDetail,
    WorkerInfo,
)
from protocol.spec.run import RunSpec


@asks
def show(
    client: Client,
    run: RunArgument,
    workers: Annotated[
        bool, typer.Option("--workers", help="Show instead all workers that ever joined, and when they were last seen.")
    ] = False,
    worker: Annotated[
        str | None,
        typer.Option(
            "--worker",
            metavar="NAME",
            help="Show instead one worker: its machine, its bytes and time, and its part in the last 20 rounds.",
        ),
    ] = None,
    checkpoints: Annotated[
        bool,
        typer.Option("--checkpoints", help="Show instead the states that can be exported and compared, newest first."),
    ] = False,
    units: Annotated[
        bool, typer.Option("--units", help="Show instead how many work units of each epoch were trained on.")
    ] = False,
) -> Answer:
    """Show a run, its workers and its last rounds.

    As JSON: an object with the keys run, workers and rounds (newest first, at most 20).

    --workers: the score is the share of a worker's contributions that counted; 1 is all of them. Bytes are counted
    since it started, including retries.

    --worker: for each round, how many fragments it contributed to, the lowest factor among them and its reason, how
    late it was, the held-out loss that it measured, its time, and what it waited for. For rounds older than
    retention.rounds only sums are kept. As JSON: an object with the keys worker and rounds (newest first); rounds have
    verdicts and late by fragment.

    --checkpoints: one with a missing or corrupt file is marked with the damage. --units: with private data, each
    worker's own set is listed.

    \b
    Example:
      outerstep run show my-run
      outerstep run show my-run --worker box-7
    """
    if sum((workers, worker is not None, checkpoints, units)) > 1:
        raise UsageError("give only one of --workers, --worker, --checkpoints and --units")
    if workers:
        found = client.workers(run)
        return Answer(found, lambda: _worker_list(found))
    if worker is not None:
        return _one_worker(client, run, worker)
    if checkpoints:
        kept = list(client.checkpoints(run))
        return Answer(kept, lambda: _checkpoint_table(kept))
    if units:
        epochs = list(client.epochs(run))
        return Answer(epochs, lambda: _epoch_table(epochs))
    detail = client.run(run)
    live, rounds = client.workers(run), list(islice(client.rounds(run), FIRST_ROUNDS))

    def text() -> RenderableType:
        reported, width = last_reported(client, detail), console().width
        costs = costs_texts(reported) if reported else []
        parts = [facts(_facts(detail)), "", worker_table(live, width, reported), *([lines(costs)] if costs else [])]
        return Group(*parts, "", round_table(reversed(rounds), width))

    return Answer({"run": detail, "workers": live, "rounds": rounds}, text)


def _epoch_table(epochs: Sequence[EpochInfo]) -> Table:
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
    return table(columns, rows)


def _checkpoint_table(kept: Sequence[CheckpointInfo]) -> Table:
    columns = [">round", "at", ">size", "~digest"]
    rows = [[str(each.round), time_text(each.created_at), bytes_text(each.bytes), each.state_digest] for each in kept]
    if any(each.damage for each in kept):
        columns.append("~damage")
        rows = [[*row, each.damage or ""] for row, each in zip(rows, kept, strict=True)]
    return table(columns, rows)


def _facts(run: RunDetail) -> list[tuple[str, str]]:
    spec = run.spec
    return [
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
        ("workers' time", _shares_text(run.account)),
        ("on disk", bytes_text(sum(run.disk_bytes.model_dump().values()))),
        ("divergences", str(run.divergences)),
        ("held-out loss", held_out_text(run.held_out_loss, run.held_out_bits_per_byte)),
        ("created", time_text(run.created_at)),
        ("spec digest", run.spec_digest),
        ("state digest", run.state_digest or UNKNOWN),
    ]


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


def _shares_text(account: Account) -> str:
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


# --- workers ------------------------------------------------------------------------------------------------------


def _worker_list(found: Sequence[WorkerInfo]) -> RenderableType:
    columns = ["worker", "state", "device", ">tokens", ">tokens/s", ">up", ">down", ">score", "quarantine", ">seen"]
    rows = [
        [
            each.name,
            each.state.value,
            str(each.host.get("device") or UNKNOWN),
            count_text(each.tokens),
            count_text(each.metrics.tokens_per_second),
            bytes_text(each.metrics.upload_bytes),
            bytes_text(each.metrics.download_bytes),
            f"{each.score:.2f}",
            _quarantine(each),
            _seen(each),
        ]
        for each in found
    ]
    return tables(columns, rows, console().width)


def _one_worker(client: Client, run: str, name: str) -> Answer:
    found = client.worker(run, name)
    details = [client.round(run, each.round) for each in islice(client.rounds(run), FIRST_ROUNDS)]
    parts = [(_part(each, name), len(each.fragments)) for each in details]
    taken = [each for each in parts if any(each[0][key] for key in ("verdicts", "late", "evaluation", "account"))]

    def text() -> RenderableType:
        columns = [">round", ">fragments", ">counts", ">late", ">held-out loss", ">time", "waited", "why"]
        rows = [_part_row(*each) for each in reversed(taken)]
        below = ["", tables(columns, rows, console().width)] if taken else []
        return Group(facts(_worker_facts(found)), *below)

    return Answer({"worker": found, "rounds": [part for part, _ in taken]}, text)


def _part(detail: RoundDetail, worker: str) -> dict[str, Any]:
    """Return a worker's part in a round, for JSON: by fragment, the verdict on its contribution (None: not decided yet)
    and how late it was in seconds; its evaluation, account and waits."""
    taken = [each for each in detail.fragments if worker in each.contributors]
    return {
        "round": detail.round,
        "verdicts": {str(each.fragment): each.verdicts.get(worker) for each in taken},
        "late": {str(each.fragment): each.late_s for each in detail.late if each.worker == worker},
        "evaluation": detail.evaluations.get(worker),
        "account": detail.accounts.get(worker),
        "waits": detail.waits.get(worker),
    }


def _part_row(part: dict[str, Any], fragments: int) -> list[str]:
    decided = [verdict for verdict in part["verdicts"].values() if verdict is not None]
    least = min(decided, key=lambda verdict: verdict.factor, default=None)
    measured, account, waits = part["evaluation"], part["account"], part["waits"]
    return [
        str(part["round"]),
        f"{len(part['verdicts'])} of {fragments}",
        UNKNOWN if least is None else f"{least.factor:.2f}",
        duration_text(max(part["late"].values(), default=None)),
        UNKNOWN if measured is None else held_out_text(measured.loss, measured.bits_per_byte),
        duration_text(None if account is None else account.total_s),
        UNKNOWN if waits is None else waits_text(waits),
        "" if least is None else least.reason,
    ]


def _path(worker: WorkerInfo) -> str:
    """Return where the worker's contributions go, in brackets."""
    if worker.direct is None:
        return ""
    return " (directly to the store)" if worker.direct else " (through the coordinator)"


def _worker_facts(worker: WorkerInfo) -> Sequence[tuple[str, str]]:
    metrics, account = worker.metrics, worker.account
    left = worker.state_round is not None
    return [
        ("worker", worker.name),
        ("state", worker.state.value),
        *([("quarantine", _quarantine(worker))] if worker.quarantined_until is not None else []),
        ("doing", metrics.phase or UNKNOWN),
        ("round", UNKNOWN if metrics.round is None else f"{metrics.round}, inner step {metrics.inner_step or 0}"),
        ("seen", _seen(worker)),
        ("joined", f"{time_text(worker.joined_at)}, join number {worker.epoch}"),
        ("loss", loss_text(metrics.loss)),
        ("tokens/s", count_text(metrics.tokens_per_second)),
        ("tokens", f"{count_text(worker.tokens)}, in {count_text(worker.contributions)} contributions"),
        ("uploaded", f"{bytes_text(worker.upload_bytes)}{_path(worker)}"),
        ("moved", f"{bytes_text(account.upload_bytes)} up, {bytes_text(account.download_bytes)} down"),
        ("time", f"{duration_text(account.total_s)}: {_shares_text(account)}"),
        ("score", f"{worker.score:.2f}"),
        ("divergences", str(worker.divergences)),
        *([("left at", f"state {worker.state_round}, {worker.state_digest or UNKNOWN}")] if left else []),
        ("token", worker.token or UNKNOWN),
        *((f"its {name}", str(value)) for name, value in worker.host.items()),
    ]


def _quarantine(worker: WorkerInfo) -> str:
    return UNKNOWN if worker.quarantined_until is None else f"out until {worker.quarantined_until}"


def _seen(worker: WorkerInfo) -> str:
    return UNKNOWN if worker.last_seen_s is None else f"{duration_text(worker.last_seen_s)} ago"
