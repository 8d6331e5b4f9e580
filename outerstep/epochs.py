"""Rounds from epochs: the batch size, H and number of rounds with which a training set is gone through a few times.

For large sets the number of rounds is a question of time, and every run chooses it. A set of a few hundred
conversations has so few units that the defaults would repeat it a hundred times in the first round. The rules:

- Every worker should take LEAST_STEPS inner steps: the batch is the largest of BATCHES that allows it.
- The run should have about ROUNDS rounds: docs/convergence.md shows what fewer cost. H is at least LEAST_INNER_STEPS,
  because a sync costs as much as a few steps.
- A tenth of the steps is warmup.
"""

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from protocol.errors import SpecError
from protocol.spec.run import parse_spec

EPOCHS = 3.0
BATCHES = (8, 4, 2, 1)
LEAST_STEPS = 100
ROUNDS = 20
LEAST_INNER_STEPS, MOST_INNER_STEPS = 5, 500
WARMUP_SHARE, MOST_WARMUP = 0.1, 100


@dataclass(frozen=True)
class Schedule:
    """How a set of `sequences` is gone through `epochs` times by `workers`. `inner_steps` is H."""

    sequences: int
    workers: int
    epochs: float
    batch_size: int
    inner_steps: int
    rounds: int
    warmup_steps: int

    @property
    def units_per_epoch(self) -> int:
        return self.sequences // self.batch_size

    @property
    def planned_epochs(self) -> float:
        """Epochs in whole rounds."""
        return self.rounds * self.inner_steps * self.workers / max(self.units_per_epoch, 1)

    def explained(self) -> Iterator[str]:
        """Yield the reasons, a line each."""
        steps = self.rounds * self.inner_steps
        yield (
            f"{self.sequences:,} sequences in batches of {self.batch_size} are {self.units_per_epoch:,} units per epoch"
        )
        yield (
            f"{self.rounds:,} rounds of {self.inner_steps} inner steps on {self.workers} workers use "
            f"{steps * self.workers:,} units, {self.planned_epochs:.1f} epochs; each worker takes {steps:,} inner steps"
        )

    def keys(self) -> dict[str, dict[str, float]]:
        """Return the keys of a run spec, by section."""
        return {
            "inner": {"batch_size": self.batch_size, "warmup_steps": self.warmup_steps},
            "sync": {"rounds": self.rounds, "inner_steps": self.inner_steps},
        }


def choose(
    sequences: int,
    workers: int,
    epochs: float = EPOCHS,
    *,
    batch_size: int | None = None,
    inner_steps: int | None = None,
) -> Schedule:
    """Return the schedule for a training set. `batch_size` and `inner_steps` are kept if they are given.
    Raises ValueError if the set has fewer sequences than one batch."""
    if sequences < (batch_size or 1):
        raise ValueError(f"the training set has {sequences} sequences, fewer than a batch of {batch_size or 1}")
    each = epochs * sequences / workers
    batch = batch_size or next((b for b in BATCHES if each / b >= LEAST_STEPS and b <= sequences), BATCHES[-1])
    steps = max(round(epochs * (sequences // batch) / workers), 1)
    h = inner_steps or min(max(round(steps / ROUNDS), min(LEAST_INNER_STEPS, steps)), MOST_INNER_STEPS)
    rounds = max(math.ceil(steps / h - 0.5), 1)
    warmup = min(int(rounds * h * WARMUP_SHARE), MOST_WARMUP)
    return Schedule(sequences, workers, epochs, batch, h, rounds, warmup)


def schedule_of(text: str, workers: int | None = None, epochs: float = EPOCHS) -> Schedule:
    """Return the schedule for the run spec in `text` (TOML), whatever its sync.rounds. Its training set is opened on
    this machine, and prepared if necessary. `workers`: None: the spec's members.min_workers.

    Raises SpecError for a spec that is wrong otherwise, or whose data this machine cannot count; DataError; and
    ValueError as `choose` does.
    """
    from worker.data.open_training_set import open_training_set

    document = tomllib.loads(text)
    inner, sync = _section(document, "inner"), _section(document, "sync")
    batch_size, inner_steps = inner.get("batch_size"), sync.get("inner_steps")
    probe = text if "rounds" in sync else _with_keys(text, "sync", {"rounds": 1})
    spec = parse_spec(probe if batch_size is not None else _with_keys(probe, "inner", {"batch_size": 1}))
    if spec.data.source == "custom" or spec.data.private:
        raise SpecError("sync.rounds can only be chosen for data that all workers share")
    data = open_training_set(spec)
    data.close()
    sequences = data.units_per_epoch * spec.inner.batch_size
    people = workers or spec.members.min_workers
    return choose(sequences, people, epochs, batch_size=batch_size, inner_steps=inner_steps)


def completed(text: str, workers: int | None = None, epochs: float | None = None) -> tuple[str, Schedule] | None:
    """Return the spec with the keys that its training set suggests, and the schedule. None if nothing is to be chosen:
    if the spec gives sync.rounds, is not valid TOML, or trains on text and `epochs` is None: what text is worth is a
    question of time. Raises what `schedule_of` raises."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None
    is_text = _section(document, "data").get("format", "text") == "text"
    if "rounds" in _section(document, "sync") or (is_text and epochs is None):
        return None
    schedule = schedule_of(text, workers, EPOCHS if epochs is None else epochs)
    for name, keys in schedule.keys().items():
        missing = {key: value for key, value in keys.items() if key not in _section(document, name)}
        text = _with_keys(text, name, missing)
    return text, schedule


def _section(document: dict[str, Any], name: str) -> dict[str, Any]:
    found = document.get(name, {})
    return found if isinstance(found, dict) else {}


def _with_keys(text: str, section: str, keys: Mapping[str, float]) -> str:
    """Return TOML with more keys in a section: below its header if it has one, otherwise at the beginning. Raises
    SpecError if the section is an inline table."""
    if isinstance(tomllib.loads(text).get(section), dict) and re.search(rf"(?m)^[ \t]*{section}[ \t]*=", text):
        raise SpecError(f"{section} is an inline table, to which sync.rounds cannot be fitted: write it as [{section}]")
    header = re.search(rf"(?m)^[ \t]*\[[ \t]*{section}[ \t]*\][^\n]*$", text)
    if header is None:
        return "".join(f"{section}.{key} = {value}\n" for key, value in keys.items()) + text
    lines = "".join(f"\n{key} = {value}" for key, value in keys.items())
    return text[: header.end()] + lines + text[header.end() :]
