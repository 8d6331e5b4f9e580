"""Follow a run until it ends: look at it each time that something has happened, through coordinator restarts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from outerstep.rest import Client
from protocol.errors import Problem, Remedy, Transient
from protocol.messages import Event, RoundInfo, RunInfo, RunState, WorkerInfo

ENDED = frozenset({RunState.FINISHED, RunState.STOPPED})
FIRST_ROUNDS = 20
RETRY_MAX_S = 10.0


@dataclass(frozen=True)
class Look:
    """A run at one moment.

    `rounds`, oldest first, are those that were open or still to come at the previous look, and `events`, oldest first,
    those since then; `last_event` is the number of the last one. `trouble` says why the coordinator could not be asked:
    then the rest is that of the previous look.
    """

    run: RunInfo
    rounds: tuple[RoundInfo, ...]
    workers: tuple[WorkerInfo, ...]
    events: tuple[Event, ...]
    last_event: int
    trouble: str | None = None

    @property
    def ended(self) -> bool:
        return self.run.state in ENDED


def follow(client: Client, run: str, *, patience_s: float, sleep: Callable[[float], None]) -> Iterator[Look]:
    """Yield a look at `run` now, whenever something happens, and at least every `patience_s`; the last is at its end.

    While the coordinator cannot be reached or has a fault, each attempt yields a look with `trouble`. Raises Problem
    if the coordinator refuses; the very first look raises every error.
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
    # The state comes first: the end that it may tell of is then among the rounds and events that are read after it.
    info = client.run(run)
    if before is None:
        newest = list(islice(client.rounds(run), FIRST_ROUNDS))
        last_event = 0
    else:
        first = before.run.round
        newest = list(takewhile(lambda item: item.round >= first, client.rounds(run)))
        last_event = before.last_event
    events = tuple(client.events(run, after=last_event))
    return Look(
        run=info,
        rounds=tuple(reversed(newest)),
        workers=tuple(client.workers(run)),
        events=events,
        last_event=events[-1].id if events else last_event,
    )
