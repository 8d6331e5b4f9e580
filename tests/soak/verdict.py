"""What must hold after a soak, whatever happened in it, and where the workers' time went."""

import itertools
import json
import sqlite3
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from outerstep.common.exit_codes import Exit
from tests.soak.soak import STEP_S, WORKERS, Outcome

TARGET = 0.88  # Decoupled DiLoCo (arXiv 2604.21428) under aggressive failures, at this rate of kills


def faults(outcome: Outcome) -> list[str]:
    """What does not hold, in words; empty if all is well."""
    found: list[str] = []

    def check(holds: bool, otherwise: str) -> None:
        if not holds:
            found.append(otherwise)

    run, final = outcome.info[""], outcome.info["/checkpoints/latest"]
    check(run["state"] == "finished", f"the run is {run['state']}")
    expected = outcome.plan.rounds + 1  # the first one is short
    check(final["round"] == expected, f"the last checkpoint is {final['round']}")
    for worker in outcome.info["/workers"]["items"]:
        if worker["name"] in outcome.too_late:
            continue  # it had no state to leave with
        same = worker["state_digest"] == final["state_digest"]
        check(same, f"{worker['name']} left with {worker['state_digest']}, the run ended with {final['state_digest']}")
    for name, code in outcome.exits:
        check(code in (Exit.DONE, Exit.RETRY), f"{name} ended with exit code {code}")
    for event in outcome.info["/events?limit=1000"]["items"]:
        check(event["kind"] not in ("diverged", "epoch-broken", "fault"), event["message"])
    with sqlite3.connect(outcome.data_dir / "outerstep.db") as database:
        found += lost_contributions(database) + wrong_units(database)
        losses = [loss for (loss,) in database.execute("SELECT loss FROM evaluations ORDER BY round")]
    check(losses[-1] < 0.7 * losses[0], f"the held-out loss went from {losses[0]:.3f} to {losses[-1]:.3f} only")
    return found


def lost_contributions(database: sqlite3.Connection) -> list[str]:
    """Every acknowledged contribution is in exactly one delta: that of its round and fragment."""
    acknowledged: dict[tuple[int, int], set[str]] = {}
    for round_, fragment, worker in database.execute("SELECT round, fragment, worker FROM contributions"):
        acknowledged.setdefault((round_, fragment), set()).add(worker)
    found = []
    for round_, fragment, state, contributors in database.execute(
        "SELECT round, fragment, state, json_group_array(key) FROM fragments, json_each(contributors)"
        " GROUP BY round, fragment"
    ):
        expected = acknowledged.pop((round_, fragment), set())
        if state != "published" or set(json.loads(contributors)) != expected:
            found.append(f"round {round_}, fragment {fragment}: {state}, of {contributors}, acknowledged {expected}")
    return found + [f"acknowledged, but in no delta: {key} of {workers}" for key, workers in acknowledged.items()]


def wrong_units(database: sqlite3.Connection) -> list[str]:
    """No unit is in two ranges, none is missing, and none is with a worker that has left."""
    found = []
    rows = database.execute("SELECT start, stop, state FROM unit_ranges ORDER BY start").fetchall()
    for (_, stop, _), (start, _, _) in itertools.pairwise([(0, 0, ""), *rows]):
        if stop != start:
            found.append(f"units [{min(stop, start)}, {max(stop, start)}) are {'lost' if stop < start else 'doubled'}")
    return found + [f"units [{a}, {b}) are still {state}" for a, b, state in rows if state == "assigned"]


@dataclass(frozen=True)
class Goodput:
    """Where the workers' time went, as fractions of it: `useful` inner steps are in the model."""

    useful: float
    repeated: float  # inner steps that were lost with a killed worker and done again
    down: float  # from a kill to the next inner step, restart and recovery included
    syncing: float  # the rest: transfers, waiting for others, evaluation


def goodput(outcome: Outcome) -> Goodput:
    """From the opening of round 0 to the end of the run."""
    total_s = (outcome.ended - outcome.started) * len(WORKERS)
    with sqlite3.connect(outcome.data_dir / "outerstep.db") as database:
        (used,) = database.execute("SELECT sum(stop - start) FROM unit_ranges WHERE state = 'consumed'").fetchone()
    done = sum(len(steps) for steps in outcome.steps.values())
    # The time between two inner steps is the second one's, unless something else happened in it.
    gaps = [after - before for steps in outcome.steps.values() for before, after in itertools.pairwise(steps)]
    training_s = sum(gap if gap < 4 * STEP_S else STEP_S for gap in gaps) + STEP_S * len(WORKERS)
    down_s = 0.0
    for killed_at, whom in outcome.kills:
        if whom != "coordinator":
            after = [at for at in outcome.steps[whom] if at > killed_at]
            down_s += max((after[0] - STEP_S if after else outcome.ended) - killed_at, 0.0)
    training, useful, down = training_s / total_s, training_s / total_s * used / done, down_s / total_s
    return Goodput(useful, training - useful, down, 1 - training - down)


def report(outcome: Outcome) -> dict[str, Any]:
    """The soak in figures and words."""
    run, spent = outcome.info[""], goodput(outcome)
    kinds = Counter(event["kind"] for event in outcome.info["/events?limit=1000"]["items"])
    lost = {name: value for name, value in asdict(spent).items() if name != "useful"}
    return {
        "seed": outcome.plan.seed,
        "rounds": outcome.plan.rounds,
        "round_s": outcome.plan.round_s,
        "seconds": round(outcome.ended - outcome.started, 1),
        "lines": outcome.lines,
        "worker_kills": sum(whom != "coordinator" for _, whom in outcome.kills),
        "coordinator_kills": sum(whom == "coordinator" for _, whom in outcome.kills),
        "proxy": outcome.harm,
        "events": dict(kinds),
        "final_loss": run["held_out_loss"],
        "goodput": round(spent.useful, 4),
        "lost": {name: round(value, 4) for name, value in lost.items()},
        "dominates": max(lost, key=lambda name: lost[name]),
        "faults": faults(outcome),
    }
