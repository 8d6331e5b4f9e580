"""Write docs/rounds.md from `coordinator/run/decide.py`: run `python docs/write_rounds.py` in the repository.

The tables show what `decide` returns. A test fails while the page is not what this writes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.run.decide import Close, decide, grace_s, has_quorum
from protocol.spec.sections import MembersSpec

PAGE = Path(__file__).parent / "rounds.md"

HEAD = """\
# Rounds

When a round closes, and why. `docs/write_rounds.py` generates this page from `coordinator/run/decide.py`: the diagram
is drawn from its table of transitions, and the tables below show what its function `decide` returns.

A round opens for all fragments at once, and each fragment then goes through these states separately. When the last one
is published, the round ends and the next one opens.

![the states of a fragment](diagrams/fragment-states.svg)

- **collecting**: contributions are accepted. After everything that may change the answer, the coordinator calls
  `decide`: a contribution, a worker that joins, leaves or loses its lease, a deadline that passes. "closed" is the
  transition when `decide` returns Close.
- **aggregating**: the contributors are fixed, in the database. A contribution that arrives now is late: it is answered
  `round-closed`, and its work goes into its worker's next contribution. After a crash the aggregation is repeated, over
  the same contributors, to the same bytes. "contribution lost" is the transition when a contribution's file is damaged
  or missing: its worker is asked to send it again.
- **published**: the delta is durable and never changes.

## What `decide` looks at

`decide(expected, contributed, policy, opened_at, quorum_at, now, grace_from, silent, stalled)` returns
`Wait(until, reason, silent)` or `Close(contributors, reason)`.

It is a pure function. `expected` are the live workers that hold an assignment for the round and are waited for.
`contributed` are the workers whose contribution was acknowledged, alive or not. All times are of the coordinator's
monotonic clock; no worker's clock is used. The reason is one sentence, which the log, the events,
`GET …/rounds/current` and a failing test all show.

- **Everybody.** If all expected workers have contributed, and at least `min_workers`, the round closes at once.
- **Quorum.** A quorum is more than half of the votes and at least `min_workers` workers. Each token has one vote, which
  its proven workers (below) in the round share equally. If each box has its own token, or all share one token, that is
  more than half of the workers; but many names of one token are no majority over the others. With exactly half of the
  votes, more than half of the workers must have contributed. Of two votes or two workers, half is enough: one of two
  boxes never waits for the other one longer than the grace. Give each box its own token if each shall have a vote.
- **Grace.** From the quorum on, stragglers still have the *grace*: `grace_factor` times what the quorum took, but at
  least `grace_min_s` and at most `grace_max_s`. So a run whose rounds take an hour waits for minutes, and one whose
  rounds take seconds waits for seconds. Where each worker has an H by its speed, it does not begin (`grace_from`)
  before the time has passed that the fastest one needs for the whole H: what a slow box began in an earlier round must
  not close this one on a fast box.
- **Cap.** `round_max_s` after it opened, the round closes with or without a quorum, as soon as at least `min_workers`
  have contributed.
- **Otherwise it waits.** Before a quorum, only contributions, new workers and the ends of leases change the answer.
- **Which workers are waited for** (`coordinator/run/members.py`). A worker that has contributed to the run before is
  *proven*. It is waited for until it misses three rounds in a row, and again once it contributes. A newcomer is waited
  for in its first round, and not beyond the grace. If no worker is proven, as in the first round, all count the same.
  So names that never contribute cost one grace each. Any contribution that arrives in time counts.
- **Refused workers.** A worker whose contribution to this round was refused (malformed, another state, units that it
  does not hold), or that is in quarantine, may never send one that is accepted. If `min_workers` cannot be reached
  without it, it counts towards `min_workers` in the quorum as if it had contributed: once the others have, it has the
  grace, and the round closes without it.
- **Silent workers.** A live worker whose last heartbeat is older than half of its lease is still waited for. The reason
  names it first, with when it was last heard of and when it will be dropped.
- **Stalled workers.** A live worker that should train and has taken no inner step for a whole lease, and for ten times
  as long as a step took it in its last round, is not waited for once there is a quorum. Its heartbeats may go on,
  because another thread sends them. It does not count as ready for the next round's `min_workers` either. As soon as it
  takes a step, it is like any other.
- **Quarantine** (`coordinator/trust/quarantine.py`). A quarantined worker is left out of the round only if at least
  `min_workers` others take part that have contributed before; a member that only sends heartbeats, or has not
  contributed yet, does not count. Once a round has lasted `round_max_s`, only workers that have contributed to it
  count. A worker that is in quarantine for measured harm and takes part all the same counts for the quorum, but not in
  the delta.
- **A round that is done again** (`coordinator/upkeep/redoing.py`). If a contribution to the last round has harmed the
  model, no fragment of the open round closes until that round is done again without it. Then the open round is dropped
  and opens anew.

After a restart of the coordinator, `opened_at` and `quorum_at` are the time of the restart, so every worker has the
full time again.
"""

GRACE = """
## The grace

With the defaults ({policy}):

| the quorum took | stragglers have | the round lasts at most |
| ---: | ---: | ---: |
"""

EXAMPLES = """
## Examples

With the defaults, unless the title says otherwise. Seconds count from the opening of the round. A row without an event
is a deadline that has passed.
"""


DEFAULTS = MembersSpec()


# --- examples -------------------------------------------------------------------------------------------------------


@dataclass
class Situation:
    """The inputs of `decide` for one fragment, as `coordinator/sync/publishing.py` keeps them."""

    policy: MembersSpec
    owners: Mapping[str, str]
    expected: set[str] = field(default_factory=set)
    newcomers: set[str] = field(default_factory=set)
    contributed: set[str] = field(default_factory=set)
    stalled_since: dict[str, float] = field(default_factory=dict)
    quorum_at: float | None = None

    def look(self, now: float) -> tuple[str, float | None, bool]:
        """Return what `decide` says at `now`, when to decide again, and whether the round closed."""
        if self.quorum_at is None and has_quorum(self.expected, self.contributed, self.policy, self.owners):
            self.quorum_at = now
        waited_for = self.expected | self.newcomers
        decision = decide(
            *(waited_for, self.contributed, self.policy),
            opened_at=0.0,
            quorum_at=self.quorum_at,
            now=now,
            stalled={worker: now - since for worker, since in self.stalled_since.items()},
        )
        if isinstance(decision, Close):
            return f"**close**: {decision.reason}", None, True
        return f"wait: {decision.reason}", decision.until, False


Event = tuple[float, str, Callable[[Situation], None]]


def opens(*workers: str) -> Event:
    return 0, f"opens with {_names(workers)}", lambda situation: situation.expected.update(workers)


def contributes(at: float, *workers: str) -> Event:
    return at, f"{_names(workers)} contribute{'' if len(workers) > 1 else 's'}", lambda s: s.contributed.update(workers)


def dies(at: float, worker: str) -> Event:
    return at, f"the lease of {worker} ends", lambda situation: situation.expected.discard(worker)


def stalls(at: float, worker: str, since: float) -> Event:
    return at, f"{worker} has stalled since {since:g}", lambda s: s.stalled_since.update({worker: since})


def enters(at: float, worker: str) -> Event:
    return at, f"{worker} joins and takes part", lambda situation: situation.newcomers.add(worker)


def _names(workers: tuple[str, ...]) -> str:
    return " and ".join(filter(None, (", ".join(workers[:-1]), workers[-1])))


@dataclass(frozen=True)
class Example:
    title: str
    text: str
    events: list[Event]
    policy: MembersSpec = DEFAULTS
    owners: Mapping[str, str] = field(default_factory=dict)


EXAMPLE_LIST = [
    Example(
        "Everybody contributes",
        "The usual round closes with the last contribution, without a deadline.",
        [opens("a", "b", "c", "d"), contributes(100, "a", "b"), contributes(101, "c"), contributes(104, "d")],
    ),
    Example(
        "A straggler",
        "The third contribution completes the quorum. That took 102 s, so d has half of that.",
        [opens("a", "b", "c", "d"), contributes(100, "a", "b"), contributes(102, "c")],
    ),
    Example(
        "A straggler that makes it",
        "Its contribution arrives within the grace and closes the round.",
        [opens("a", "b", "c", "d"), contributes(100, "a", "b", "c"), contributes(131, "d")],
    ),
    Example(
        "A worker dies",
        "The round no longer waits for it once its lease ends or it leaves, with or without a quorum.",
        [opens("a", "b", "c"), contributes(100, "a", "b"), dies(110, "c")],
    ),
    Example(
        "A worker dies after contributing",
        "Its acknowledged contribution counts.",
        [opens("a", "b", "c"), contributes(90, "a"), dies(95, "a"), contributes(100, "b"), contributes(101, "c")],
    ),
    Example(
        "Half of the workers lose their lines",
        "Two of four are no quorum, so no deadline runs except the cap. The round closes when the leases end.",
        [opens("a", "b", "c", "d"), contributes(100, "a", "b"), dies(160, "c"), dies(161, "d")],
    ),
    Example(
        "Two boxes, and one is slow",
        "One of two is enough for the grace.",
        [opens("a", "b"), contributes(100, "a")],
    ),
    Example(
        "Two boxes, and the GPU of one hangs",
        "Its heartbeats go on, so its lease does not end.",
        [opens("a", "b"), stalls(90, "b", 30), contributes(100, "a")],
    ),
    Example(
        "A worker joins in the middle",
        "The quorum does not count it. From the quorum on it has the grace.",
        [opens("a", "b"), contributes(60, "a"), enters(80, "c"), contributes(85, "b")],
    ),
    Example(
        "Too few workers, `min_workers = 3`",
        "The run waits, and the reason shows it.",
        [opens("a", "b", "c"), contributes(100, "a", "b"), dies(110, "c"), enters(500, "d"), contributes(600, "d")],
        MembersSpec(min_workers=3),
    ),
    Example(
        "A cap, `round_max_s = 300`",
        "Two of five are no quorum, but the cap closes the round.",
        [opens("a", "b", "c", "d", "e"), contributes(100, "a"), contributes(130, "b")],
        MembersSpec(round_max_s=300),
    ),
    Example(
        "Four names of one token",
        "They are two thirds of the workers with one vote of three. With b there are two votes, and c has the grace.",
        [opens("m1", "m2", "m3", "m4", "b", "c"), contributes(1, "m1", "m2", "m3", "m4"), contributes(100, "b")],
        owners=dict.fromkeys(("m1", "m2", "m3", "m4"), "m"),
    ),
    Example(
        "Four boxes of one token, and one that is slow",
        "Each of the two tokens has one vote. The four boxes have half of the votes, and are most of the workers.",
        [opens("m1", "m2", "m3", "m4", "slow"), contributes(100, "m1", "m2", "m3", "m4")],
        owners=dict.fromkeys(("m1", "m2", "m3", "m4"), "m"),
    ),
    Example(
        "Nobody is left behind, `grace_min_s = grace_max_s = 3600`",
        "With a long grace the round waits for every live worker, and no longer for those whose leases end.",
        [opens("a", "b", "c", "d"), contributes(100, "a", "b", "c"), contributes(900, "d")],
        MembersSpec(grace_min_s=3600, grace_max_s=3600),
    ),
]


def history(example: Example) -> Iterator[tuple[float, str, str]]:
    """Yield (seconds, what happens, what `decide` says) until the round closes."""
    situation, until = Situation(example.policy, example.owners), None
    events = list(example.events)
    while events or until is not None:
        if until is not None and (not events or until <= events[0][0]):
            now, happens = until, ""
        else:
            now, happens, change = events.pop(0)
            change(situation)
        said, until, closed = situation.look(now)
        yield now, happens, said
        if closed:
            if events:
                raise ValueError(f"{example.title}: the round closed before {events[0][1]}")
            return
    raise ValueError(f"{example.title}: the round never closes")


def example_section(example: Example) -> str:
    rows = "".join(f"| {now:g} | {happens} | {said} |\n" for now, happens, said in history(example))
    head = "| s | what happens | what `decide` says |\n| ---: | --- | --- |\n"
    return f"\n### {example.title}\n\n{example.text}\n\n{head}{rows}"


def grace_section() -> str:
    policy = ", ".join(
        f"`{name} = {value:g}`" for name, value in DEFAULTS.model_dump(exclude={"lease_s"}).items() if value is not None
    )
    rows = ""
    for took in (4.0, 60.0, 600.0, 3600.0):
        grace = grace_s(DEFAULTS, opened_at=0.0, quorum_at=took)
        rows += f"| {_duration(took)} | {_duration(grace)} | {_duration(took + grace)} |\n"
    return GRACE.format(policy=policy) + rows


def _duration(seconds: float) -> str:
    return f"{seconds:g} s" if seconds < 120 else f"{seconds / 60:g} min"


def page() -> str:
    """Return the page as Markdown."""
    return HEAD + grace_section() + EXAMPLES + "".join(map(example_section, EXAMPLE_LIST))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
