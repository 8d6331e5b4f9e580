"""Follow a run until it ends: look at it whenever something happens, across restarts of the coordinator."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from outerstep.rest import Client
from protocol.errors import Problem, Remedy, Transient
from protocol.messages import Event, RoundDetail, RoundInfo, RunInfo, RunState, WorkerInfo

ENDED = frozenset({RunState.FINISHED, RunState.STOPPED})
FIRST_ROUNDS = 20
RETRY_MAX_S = 10.0


@dataclass(frozen=True)
class Look:
    """A run at one moment.

    `rounds`, oldest first: rounds that were not closed at the previous look, and those trained again after a rollback.
    `events`, oldest first: events since the previous look; `last_event` is the number of the last one. `trouble`: why
    the coordinator could not be reached; the rest is then from the previous look. `reported`: the last round for which
    a worker has reported its times; None if there is none.
    """

    run: RunInfo
    rounds: tuple[RoundInfo, ...]
    workers: tuple[WorkerInfo, ...]
    events: tuple[Event, ...]
    last_event: int
    trouble: str | None = None
    reported: RoundDetail | None = None

    @property
    def ended(self) -> bool:
        return self.run.state in ENDED

    @property
    def rolled_back_to(self) -> int | None:
        """The state that the run was rolled back to since the previous look; rounds from this number on were
        discarded."""
        return rolled_back_to(self.events)


def follow(client: Client, run: str, *, patience_s: float, sleep: Callable[[float], None]) -> Iterator[Look]:
    """Yield a look at `run` now, whenever something happens, and at least every `patience_s`; the last when it ends.

    While the coordinator is unreachable or failing, each attempt yields a look with `trouble`. Raises Problem if the
    coordinator refuses; the first look raises every error.
    """
    look = take_look(client, run)
    yield look
    retry_s = 1.0
    while not look.ended:
        try:
            client.wait_for_event(run, look.last_event, patience_s=patience_s)
            look = take_look(client, run, look)
        except (Transient, Problem) as error:
            if isinstance(error, Problem) and error.remedy is not Remedy.RETRY:
                raise
            look = replace(look, rounds=(), events=(), trouble=str(error))
            yield look
            sleep(retry_s)
            retry_s = min(2 * retry_s, RETRY_MAX_S)
        else:
            yield look
            retry_s = 1.0


def take_look(client: Client, run: str, before: Look | None = None) -> Look:
    """Return a look at the run. The first one has all events and the last 20 rounds."""
    # The state is read first, so that if it is the end, the rounds and events read after it are complete.
    info = client.run(run)
    last_event = before.last_event if before else 0
    events = tuple(client.events(run, after=last_event))
    if before is None:
        newest = list(islice(client.rounds(run), FIRST_ROUNDS))
    else:
        back = rolled_back_to(events)
        first = before.run.round if back is None else min(before.run.round, back)
        newest = list(takewhile(lambda item: item.round >= first, client.rounds(run)))
    return Look(
        run=info,
        rounds=tuple(reversed(newest)),
        workers=tuple(client.workers(run)),
        events=events,
        last_event=events[-1].id if events else last_event,
        reported=last_reported(client, info, None if before is None else before.reported),
    )


def last_reported(client: Client, run: RunInfo, before: RoundDetail | None = None) -> RoundDetail | None:
    """Return the last round if a worker has reported its times for it, otherwise `before`. Workers report a round when
    they ask for the next one."""
    if before is not None and before.round >= run.round:  # the run was rolled back past it
        before = None
    if run.round == 0:
        return None
    if before is not None and before.round == run.round - 1:
        contributors = {worker for fragment in before.fragments for worker in fragment.contributors}
        if contributors <= before.waits.keys():
            return before
    try:
        detail = client.round(run.name, run.round - 1)
    except Problem as problem:
        if problem.slug != "not-found":  # the run was rolled back meanwhile
            raise
        return before
    return before if detail.waiting is None else detail


def rolled_back_to(events: Iterable[Event]) -> int | None:
    """Return the earliest state that the run was rolled back to in these events; None if it was not."""
    return min((event.data["round"] for event in events if event.kind == "rolled-back"), default=None)
