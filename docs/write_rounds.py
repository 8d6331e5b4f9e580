"""Writes docs/rounds.md from `coordinator/run/decide.py`: `python docs/write_rounds.py`, in the repository.

The examples are what its `decide` says. A test fails while the page is not what this writes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.run.decide import Close, decide, grace_s, has_quorum
from protocol.spec.sections import MembersSpec

PAGE = Path(__file__).parent / "rounds.md"

HEAD = """\
# Rounds

When a round closes, and why. Made by `docs/write_rounds.py` from `coordinator/run/decide.py`: the diagram is drawn
from its table of transitions (`docs/write_diagrams.py`), and every sentence in the tables below was said by its
`decide`.

A round is open for all fragments at once, and each fragment goes through these states by itself. The last one that is
published ends the round, and the next one opens.

![the states of a fragment](diagrams/fragment-states.svg)

- **collecting**: contributions are accepted. `decide` is asked after everything that may change its answer: a
  contribution, a worker that joins, leaves or whose lease ends, and the passing of a deadline. "closed" is its answer
  Close.
- **aggregating**: the contributors are fixed, in the database. A contribution that comes now is late: it is refused
  with `round-closed`, and its work goes into its worker's next one. After a crash the aggregation is done again, over
  the same contributors, to the same bytes. "contribution lost" is a file that no longer is what was acknowledged: its
  worker is asked to send it again.
- **published**: the delta is durable and never changes.

## What `decide` looks at

`decide(expected, contributed, policy, opened_at, quorum_at, now, silent)` returns
`Wait(until, reason, silent)` or `Close(contributors, reason)`.

It is a pure function. `expected` are the live workers that hold an assignment for the round and are waited for;
`contributed` are those whose contribution was acknowledged, whether they are still alive or not. Times are of one
monotonic clock, the coordinator's: no worker's clock is ever looked at. The reason is one sentence, and the log, the
events, `GET …/rounds/current` and the failure of a test show that same one.

- **Who is silent.** A live worker whose last heartbeat is older than half of its lease is still waited for, but the
  reason names it first, with when it was last heard of and when it is dropped.
- **Who is waited for** (`coordinator/run/members.py`). Workers that have contributed to the run before are *proven*;
  one that has missed three rounds in a row is not waited for until it contributes again. A newcomer is waited for in
  its first round, and no longer than the grace. Where nobody is proven, as in the first round, all are alike. So names
  that never contribute cost one grace each, and hold up nobody; what comes in time counts, whoever has sent it.
- **Quarantine** (`coordinator/trust/quarantine.py`). A quarantined worker is left out of the round only if at least
  `min_workers` others take part that have contributed before. A member that only sends heartbeats, or has not
  contributed yet, is none of them. In a round that has lasted for `round_max_s` only those count that have contributed
  to it.
- **Everybody.** All expected workers have contributed, at least `min_workers` of them: the round closes at once.
- **Quorum and grace.** A quorum is more than half of the voices and at least `min_workers` workers. Every token has one
  voice, which the proven workers of the round that joined with it share equally: with a token for each box that is more
  than half of the workers, and so it is where all are of one token; but many names of one token are no majority over
  others. Where just half of the voices are there, more than half of the workers must be. Whose boxes are to count one
  by one gives each a token of its own. From the quorum on stragglers have the *grace*: `grace_factor` times what the
  quorum took, within `grace_min_s` and `grace_max_s`. So a run whose rounds take an hour waits for minutes, and one
  whose rounds take seconds waits for seconds.
- **Cap.** `round_max_s` after its opening the round closes, quorum or not, as soon as at least `min_workers` have
  contributed.
- **Otherwise** it waits: before a quorum only contributions, new workers and the ends of leases change anything.

After a restart of the coordinator, `opened_at` and `quorum_at` are those of the restart: everybody has as much time
again.
"""

GRACE = """
## The grace

With the defaults ({policy}):

| the quorum took | stragglers have | the round lasts at most |
| ---: | ---: | ---: |
"""

EXAMPLES = """
## Examples

With the defaults, unless the title says otherwise. Seconds count from the opening of the round. Where nothing happens,
a deadline has passed.
"""


DEFAULTS = MembersSpec()


# --- examples -------------------------------------------------------------------------------------------------------


@dataclass
class Situation:
    """One fragment's inputs of `decide`, as the coordinator keeps them (`coordinator/sync/publishing.py`)."""

    policy: MembersSpec
    owners: Mapping[str, str]
    expected: set[str] = field(default_factory=set)
    newcomers: set[str] = field(default_factory=set)
    contributed: set[str] = field(default_factory=set)
    quorum_at: float | None = None

    def look(self, now: float) -> tuple[str, float | None, bool]:
        """What `decide` says at `now`: in words, when to look again, and whether the round closed."""
        if self.quorum_at is None and has_quorum(self.expected, self.contributed, self.policy, self.owners):
            self.quorum_at = now
        waited_for = self.expected | self.newcomers
        decision = decide(waited_for, self.contributed, self.policy, opened_at=0.0, quorum_at=self.quorum_at, now=now)
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
        "The usual round: it closes with the last contribution, no deadline has any part in it.",
        [opens("a", "b", "c", "d"), contributes(100, "a", "b"), contributes(101, "c"), contributes(104, "d")],
    ),
    Example(
        "A straggler",
        "The third contribution makes the quorum. It took 102 s, so d has half of that.",
        [opens("a", "b", "c", "d"), contributes(100, "a", "b"), contributes(102, "c")],
    ),
    Example(
        "A straggler that makes it",
        "Within the grace its contribution closes the round.",
        [opens("a", "b", "c", "d"), contributes(100, "a", "b", "c"), contributes(131, "d")],
    ),
    Example(
        "A worker dies",
        "Nobody waits for the dead: the end of its lease, or its leaving, closes the round, quorum or not.",
        [opens("a", "b", "c"), contributes(100, "a", "b"), dies(110, "c")],
    ),
    Example(
        "A worker dies after contributing",
        "What was acknowledged counts.",
        [opens("a", "b", "c"), contributes(90, "a"), dies(95, "a"), contributes(100, "b"), contributes(101, "c")],
    ),
    Example(
        "Half of the workers lose their lines",
        "Two of four are no quorum, and no deadline runs but the cap. The leases end it.",
        [opens("a", "b", "c", "d"), contributes(100, "a", "b"), dies(160, "c"), dies(161, "d")],
    ),
    Example(
        "A worker joins in the middle",
        "It has the grace from the quorum on, which is made without it.",
        [opens("a", "b"), contributes(60, "a"), enters(80, "c"), contributes(100, "b")],
    ),
    Example(
        "Too few workers, `min_workers = 3`",
        "The run waits, and says so.",
        [opens("a", "b", "c"), contributes(100, "a", "b"), dies(110, "c"), enters(500, "d"), contributes(600, "d")],
        MembersSpec(min_workers=3),
    ),
    Example(
        "A cap, `round_max_s = 300`",
        "Two of five are no quorum, but the round has lasted long enough.",
        [opens("a", "b", "c", "d", "e"), contributes(100, "a"), contributes(130, "b")],
        MembersSpec(round_max_s=300),
    ),
    Example(
        "Four names of one token",
        "They are two thirds of the workers, but one voice of three. With b there are two voices, and c has the grace.",
        [opens("m1", "m2", "m3", "m4", "b", "c"), contributes(1, "m1", "m2", "m3", "m4"), contributes(100, "b")],
        owners=dict.fromkeys(("m1", "m2", "m3", "m4"), "m"),
    ),
    Example(
        "Four boxes of one token, and one that is slow",
        "Each of the two tokens has one voice. Half of them are there with the four, and so are most of the workers.",
        [opens("m1", "m2", "m3", "m4", "slow"), contributes(100, "m1", "m2", "m3", "m4")],
        owners=dict.fromkeys(("m1", "m2", "m3", "m4"), "m"),
    ),
    Example(
        "Nobody is left behind, `grace_min_s = grace_max_s = 3600`",
        "A long grace waits for everybody that is alive; the leases still end it for those who are not.",
        [opens("a", "b", "c", "d"), contributes(100, "a", "b", "c"), contributes(900, "d")],
        MembersSpec(grace_min_s=3600, grace_max_s=3600),
    ),
]


def history(example: Example) -> Iterator[tuple[float, str, str]]:
    """Seconds, what happens and what `decide` says to it, until the round closes."""
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
    """The page, Markdown."""
    return HEAD + grace_section() + EXAMPLES + "".join(map(example_section, EXAMPLE_LIST))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
