"""The commands `outerstep run workers` and `outerstep run worker`."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from outerstep.cli.options import Connection, with_connection
from outerstep.cli.printing import Format, FormatOption, console, print_json, time_text
from outerstep.cli.run.runs import RunArgument, WorkerArgument, shares_text
from outerstep.common.quantities import UNKNOWN, bytes_text, count_text, duration_text, held_out_text, loss_text
from outerstep.display import table, tables, waits_text
from outerstep.follow import FIRST_ROUNDS
from outerstep.rest import Client
from protocol.messages import Account, Evaluation, RoundDetail, Verdict, Waits, WorkerInfo


@with_connection
def workers(
    run: RunArgument,
    output: FormatOption = Format.TABLE,
    *,
    connection: Connection,
) -> None:
    """List all workers that ever joined a run, and when the live ones were last seen.

    The score is the share of a worker's contributions that counted; 1 is all of them. Bytes are counted since it
    started, including retries.

    \b
    Example:
      outerstep run workers my-run
    """
    with connection.open() as client:
        found = client.workers(run)
    if output is Format.JSON:
        print_json(found)
        return
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
    out = console()
    out.print(tables(columns, rows, out.width))


@with_connection
def worker(
    run: RunArgument,
    worker: WorkerArgument,
    output: FormatOption = Format.TABLE,
    *,
    connection: Connection,
) -> None:
    """Show a worker: what it is doing, its machine, its bytes and time, and its part in the last 20 rounds.

    For each round: how many fragments it contributed to, the lowest factor among them and its reason, how late it was,
    the held-out loss that it measured, its time, and what it waited for. For rounds older than retention.rounds only
    sums are kept.

    As JSON: an object with the keys worker and rounds (newest first); rounds have verdicts and late by fragment.

    \b
    Example:
      outerstep run worker my-run box-7
    """
    with connection.open() as client:
        found = client.worker(run, worker)
        found_rounds = [_worker_round(each, worker) for each in _last_rounds(client, run)]
    taken = [each for each in found_rounds if each.has_any]
    if output is Format.JSON:
        print_json({"worker": found, "rounds": [each.document() for each in taken]})
        return
    out = console()
    facts = table(["", "~"], _facts(found))
    facts.show_header = False
    out.print(facts)
    if taken:
        columns = [">round", ">fragments", ">counts", ">late", ">held-out loss", ">time", "waited", "why"]
        out.print()
        out.print(tables(columns, [each.row() for each in reversed(taken)], out.width))


def _last_rounds(client: Client, run: str) -> Iterator[RoundDetail]:
    """Yield the last rounds, newest first."""
    for each in islice(client.rounds(run), FIRST_ROUNDS):
        yield client.round(run, each.round)


def _path(worker: WorkerInfo) -> str:
    """Return where the worker's contributions go, in brackets."""
    if worker.direct is None:
        return ""
    return " (directly to the store)" if worker.direct else " (through the coordinator)"


@dataclass(frozen=True)
class _WorkerRound:
    """A worker's part in a round: by fragment, the verdict on its contribution (None: not decided yet) and how late it
    was in seconds."""

    round: int
    fragments: int
    verdicts: dict[int, Verdict | None]
    late: dict[int, float]
    evaluation: Evaluation | None
    account: Account | None
    waits: Waits | None

    @property
    def has_any(self) -> bool:
        return bool(self.verdicts or self.late or self.evaluation or self.account)

    def document(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "verdicts": {str(fragment): verdict for fragment, verdict in self.verdicts.items()},
            "late": {str(fragment): late_s for fragment, late_s in self.late.items()},
            "evaluation": self.evaluation,
            "account": self.account,
            "waits": self.waits,
        }

    def row(self) -> list[str]:
        decided = [verdict for verdict in self.verdicts.values() if verdict is not None]
        least = min(decided, key=lambda verdict: verdict.factor, default=None)
        measured = self.evaluation
        return [
            str(self.round),
            f"{len(self.verdicts)} of {self.fragments}",
            UNKNOWN if least is None else f"{least.factor:.2f}",
            duration_text(max(self.late.values(), default=None)),
            UNKNOWN if measured is None else held_out_text(measured.loss, measured.bits_per_byte),
            duration_text(None if self.account is None else self.account.total_s),
            UNKNOWN if self.waits is None else waits_text(self.waits),
            "" if least is None else least.reason,
        ]


def _worker_round(detail: RoundDetail, worker: str) -> _WorkerRound:
    return _WorkerRound(
        detail.round,
        len(detail.fragments),
        {each.fragment: each.verdicts.get(worker) for each in detail.fragments if worker in each.contributors},
        {each.fragment: each.late_s for each in detail.late if each.worker == worker},
        detail.evaluations.get(worker),
        detail.accounts.get(worker),
        detail.waits.get(worker),
    )


def _facts(worker: WorkerInfo) -> Sequence[tuple[str, str]]:
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
        ("time", f"{duration_text(account.total_s)}: {shares_text(account)}"),
        ("score", f"{worker.score:.2f}"),
        ("divergences", str(worker.divergences)),
        *([("left at", f"state {worker.state_round}, {worker.state_digest or UNKNOWN}")] if left else []),
        ("token", worker.token or UNKNOWN),
        *_host_facts(worker.host.items()),
    ]


def _host_facts(host: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the facts that the worker reports about its machine."""
    for name, value in host:
        yield f"its {name}", str(value)


def _quarantine(worker: WorkerInfo) -> str:
    return UNKNOWN if worker.quarantined_until is None else f"out until {worker.quarantined_until}"


def _seen(worker: WorkerInfo) -> str:
    return UNKNOWN if worker.last_seen_s is None else f"{duration_text(worker.last_seen_s)} ago"
