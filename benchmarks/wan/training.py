"""The share of the workers' wall time that is spent in inner steps: what syncs over a line leave for training."""

from typing import Any

from benchmarks.wan.measuring import WORKERS, Bench, bench
from benchmarks.wan.rows import TRAINING_LINE, TRAINING_TARGETS

INNER_STEPS = 6  # per round


def measure(elements: int, rounds: int, round_s: float) -> list[dict[str, Any]]:
    """Train over the line classically, and with an overlap of one inner step."""
    with bench(TRAINING_LINE, "bbr") as made:
        return [_train(made, elements, rounds, round_s / INNER_STEPS, overlap) for overlap in (0, 1)]


def _train(made: Bench, elements: int, rounds: int, step_s: float, overlap: int) -> dict[str, Any]:
    """Train `rounds` rounds; with an overlap one more, for the run's last has none and is not measured."""
    name, kind = f"train-{overlap}", "overlap" if overlap else "classic"
    made.create_run(name, rounds + overlap, INNER_STEPS, overlap)
    made.order("train", name, elements=elements, step_s=step_s, measured=rounds)
    answers = [worker.answer() for worker in made.workers]
    wall = sum(each["ended"] - each["started"] for each in answers)
    in_steps = sum(each["in_steps"] for each in answers)
    with made.running.client() as http:
        account = http.get(f"/v1/runs/{name}").raise_for_status().json()["account"]
    return {
        "kind": kind,
        "down_mbit": TRAINING_LINE.down_mbit,
        "up_mbit": TRAINING_LINE.up_mbit,
        "round_trip_s": TRAINING_LINE.round_trip_s,
        "parameters": elements,
        "round_s": step_s * INNER_STEPS,
        "overlap_s": step_s * overlap,
        "sync_s": (wall - in_steps) / rounds / WORKERS,
        "share_in_steps": in_steps / wall,
        "target": TRAINING_TARGETS[kind],
        "stages_s": {stage: s / rounds / WORKERS for stage, s in account["seconds"].items()},
    }
