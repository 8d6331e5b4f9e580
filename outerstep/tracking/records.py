"""The records of a run: one per published round and one for its end, read over REST, across outages.

A record contains only what the coordinator keeps for good, so it is the same whenever it is read; only events older
than `retention.events` are missing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from outerstep.display import round_seconds, tokens_per_second
from outerstep.follow import ENDED, RETRY_MAX_S
from outerstep.rest import Client
from protocol.digest import digest
from protocol.errors import OuterstepError, Problem, Remedy, Transient
from protocol.messages import Event, RoundDetail, RunDetail


@dataclass(frozen=True)
class Record:
    """A published round: its metrics by name, its publication time (seconds since 1970), and the events since the
    previous record. The last record of a run, `final`, is about the state after its last round."""

    round: int
    at: float
    figures: dict[str, float]
    events: tuple[Event, ...]
    final: bool = False


def tracked_name(run: RunDetail) -> str:
    """Return the name under which a run is tracked. Another run with the same name has a different one."""
    identity = "\n".join((run.spec_digest, repr(run.created_at)))
    return f"{run.name}-{digest(identity.encode()).hex()[:8]}"


def follow_records(
    client: Client,
    run: str,
    first: int,
    *,
    patience_s: float,
    sleep: Callable[[float], None],
    on_trouble: Callable[[str], None],
) -> Iterator[Record]:
    """Yield the records of `run` from round `first` on, each once, until the run has ended and its workers have left.

    While the coordinator is unreachable or failing, `on_trouble` is called with the reason and the request is retried.
    Raises Problem if the coordinator refuses, OuterstepError if the run is behind `first`.
    """
    records, retry_s = Records(client, run, first), 1.0
    while not records.ended:
        try:
            yield from records.look()
            if not records.ended:
                client.wait_for_event(run, records.seen, patience_s=patience_s)
        except (Transient, Problem) as error:
            if isinstance(error, Problem) and error.remedy is not Remedy.RETRY:
                raise
            on_trouble(str(error))
            sleep(retry_s)
            retry_s = min(2 * retry_s, RETRY_MAX_S)
        else:
            retry_s = 1.0


class Records:
    """Reads the records of a run in order. If a look raises, no record is lost: the next look continues there.

    next    the round of the next record
    seen    the number of the last event that was read
    ended   True if there are no further records
    """

    def __init__(self, client: Client, run: str, first: int) -> None:
        self._client, self._run = client, run
        self.next, self.seen, self.ended = first, 0, False
        self._events: list[Event] = []  # not in a record yet
        self._tokens: int | None = None  # in the rounds before `next`

    def look(self) -> Iterator[Record]:
        """Yield the records that are available now."""
        # The state is read first, so that if it is the end, everything read after it is complete.
        run = self._client.run(self._run)
        over = run.state in ENDED and run.live_workers == 0
        if run.round < self.next - (run.state in ENDED):
            raise OuterstepError(
                f"round {self.next - 1} of run {self._run} is already tracked, but the run is at round {run.round}: "
                "its database was restored from a backup; track it again with another --out"
            )
        for event in list(self._client.events(self._run, after=self.seen)):
            self._events.append(event)
            self.seen = event.id
            if _is_published(event) and event.data["round"] < self.next:
                self._events.clear()  # they belong to that round's record
        while (published := next(filter(_is_published, self._events), None)) is not None:
            # If tracking is late, the event of a round may be deleted; the round itself never is.
            yield self._record(with_events=published.data["round"] == self.next)
        if over:
            while self.next < run.round:
                yield self._record(with_events=False)
            if self._events and self.next == run.round:
                yield self._final(run)
            self.ended = True

    def _record(self, *, with_events: bool) -> Record:
        """Return the record of the next round, with the events up to its publication, or without events."""
        if self._tokens is None:
            self._tokens = sum(item.tokens for item in self._client.rounds(self._run) if item.round < self.next)
        item = self._client.round(self._run, self.next)
        count = next(n for n, event in enumerate(self._events, 1) if _is_published(event)) if with_events else 0
        own, self._events = self._events[:count], self._events[count:]
        self._tokens += item.tokens
        self.next += 1
        at = item.opened_at if item.closed_at is None else item.closed_at
        return Record(item.round, at, _figures(item, self._tokens), tuple(own))

    def _final(self, run: RunDetail) -> Record:
        """Return the record of the state after the last round, with the remaining events."""
        evaluated = any(event.kind == "evaluated" and event.data["round"] == run.round for event in self._events)
        held_out = _held_out(run) if evaluated else {}
        own, self._events = tuple(self._events), []
        self.next += 1
        return Record(run.round, own[-1].at, held_out, own, final=True)


def _is_published(event: Event) -> bool:
    """True if the event reports that a round was published."""
    return event.kind == "round-published"


def _figures(item: RoundDetail, tokens: int) -> dict[str, float]:
    """Return the known metrics of a round by name. `tokens`: total of all rounds up to this one."""
    known = {
        "loss": item.loss,
        "tokens": tokens,
        "tokens_per_second": tokens_per_second(item),
        "seconds": round_seconds(item),
        "upload_bytes": item.upload_bytes,
        "delta_bytes": item.delta_bytes,
    }
    figures = {name: value for name, value in known.items() if value is not None} | _held_out(item)
    if item.fragments:  # until only its sums are kept, see `retention`
        figures["workers"] = len({worker for fragment in item.fragments for worker in fragment.contributors})
        figures["late_workers"] = len({late.worker for late in item.late})
    if len(item.evaluations) > 1:
        figures |= {f"held_out_loss/{worker}": each.loss for worker, each in item.evaluations.items()}
    return figures


def _held_out(item: RoundDetail | RunDetail) -> dict[str, float]:
    known = {"held_out_loss": item.held_out_loss, "held_out_bits_per_byte": item.held_out_bits_per_byte}
    return {name: value for name, value in known.items() if value is not None}
