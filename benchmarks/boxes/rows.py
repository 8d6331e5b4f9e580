"""The rows: boxes, lines, settings of `[sync]` and troubles. Results are stored as lines of JSON."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.frontier.rows import Row
from harness.lines import Shape
from protocol.spec.model import RATE_TIMES_WIDTH

BOXES = ("1", "1,1", "1,1/2", "1,1/5", "1,1/20", "1,1,1,1/4", "1,1,1,1")
TARGETS = {"1,1": 0.62, "1,1/2": 0.78, "1,1/5": 0.92, "1,1/20": 1.01}
OVER_A_LINE = 0.05  # more than these

# With a round of 10 s, a sync of the model `tiny` takes about a tenth of it over the first, and half over the second.
NEAR, FAR = "10/1", "2.5/0.25"
LINES: dict[str, Shape | None] = {
    "none": None,
    NEAR: Shape(up_mbit=1, down_mbit=10, round_trip_s=0.04),
    FAR: Shape(up_mbit=0.25, down_mbit=2.5, round_trip_s=0.08),
}

WIDTHS = {"tiny": 64, "1.5M": 192}
LARGER = Row(width=WIDTHS["1.5M"], layers=3)  # eleven times the parameters
MODELS = {
    "tiny": 'preset = "tiny"',
    "1.5M": "config = { " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in LARGER.config.items()) + " }",
}

# What is added to a spec that has only a name, a model, data, rounds and inner_steps.
SYNCS = {"default": "", "always": 'wait = "always"'}


@dataclass(frozen=True)
class Size:
    """`rounds` of `inner_steps` are what the fastest box does alone, each in `step_s` seconds."""

    rounds: int = 20
    inner_steps: int = 25
    warmup_steps: int = 50
    step_s: float = 0.4
    evaluation_tokens: int = 65_536
    model: str = "tiny"
    momentum: float | None = None  # of the outer optimizer; None: the default

    tokens_per_step = 8 * 64  # SPEC's batch

    @property
    def round_s(self) -> float:
        return self.inner_steps * self.step_s

    @property
    def alone_s(self) -> float:
        return self.rounds * self.round_s


# Of `trouble`: a lease is half of a round, and the shortest grace a tenth of it.
TROUBLE = Size(rounds=8)
TROUBLE_MEMBERS = "lease_s = 5\ngrace_min_s = 1"
QUICK = Size(rounds=4, inner_steps=5, warmup_steps=4, step_s=0.05, evaluation_tokens=2_048)

SPEC = """
name = "boxes"
seed = {seed}
[model]
{model}
[data]
source = "python-stdlib"
sequence_length = 64
[inner]
batch_size = 8
optimizer = "muon"
learning_rate = {rate}
warmup_steps = {warmup_steps}
[sync]
rounds = {rounds}
inner_steps = {inner_steps}
fragment_elements = 50_000
{sync}
[outer]
{outer}
[members]
{members}
[evaluation]
every_rounds = 1_000  # the first and last state: in rounds of some seconds, all of them would take a fifth of the time
max_tokens = {evaluation_tokens}
"""


def spec_of(
    size: Size, rounds: int, seed: int, sync: str = "default", model: str | None = None, members: str = ""
) -> str:
    """Return the run's spec. Its warm-up is the same share of a shorter run."""
    return SPEC.format(
        seed=seed,
        model=model or MODELS[size.model],
        rate=RATE_TIMES_WIDTH / WIDTHS[size.model],  # the default one, were the width of a factory's model known
        warmup_steps=max(size.warmup_steps * rounds // size.rounds, 1),
        rounds=rounds,
        inner_steps=size.inner_steps,
        sync=SYNCS[sync],
        outer="" if size.momentum is None else f"momentum = {size.momentum}",
        members=members,
        evaluation_tokens=size.evaluation_tokens,
    )


def speeds_of(boxes: str) -> list[float]:
    """Return the speeds in `1,1/2`. Raises ValueError unless the first one is 1 and the fastest."""
    speeds = [float(Fraction(each)) for each in boxes.split(",")]
    if speeds[0] != 1 or not all(0 < each <= 1 for each in speeds):
        raise ValueError(f"{boxes}: the first box is the fastest, with the speed 1")
    return speeds


def equal_length(wanted: float, measured: Sequence[tuple[float, float]]) -> float | None:
    """Return the length at which the loss is `wanted`. `measured`: (length, loss). It is interpolated between the
    lengths next to it; None if all losses are above it, or all below."""
    in_order = sorted(measured)
    for (short, higher), (long, lower) in pairwise(in_order):
        if lower <= wanted <= higher and lower < higher:
            return short + (long - short) * (higher - wanted) / (higher - lower)
    return None


def search(wanted: float, first: float, measure: Callable[[float], float], least: float = 0.05) -> float | None:
    """Return the length at which `measure`, the loss of a run of that length, is `wanted`: from the length `first`,
    longer or shorter by a tenth of it, until the losses of two neighbours have it between them. None if a run has no
    loss, which is infinite then, or if none of the lengths fits."""
    found = [(first, measure(first))]
    for _ in range(8):
        if not math.isfinite(found[-1][1]):
            return None
        if (length := equal_length(wanted, found)) is not None:
            return length
        shortest, longest = min(found), max(found)
        following = longest[0] * 1.1 if longest[1] > wanted else shortest[0] / 1.1
        if following < least:
            return None
        found.append((following, measure(following)))
    return equal_length(wanted, found)


class Results:
    """Results by their key, also in a file of JSON lines, so that an interrupted measurement goes on."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        lines = file.read_text().splitlines() if file is not None and file.exists() else []
        self._known = {_name(line["key"]): line["result"] for line in map(json.loads, lines)}

    def of(self, key: dict[str, Any], measure: Callable[[], Any]) -> Any:
        """Return the result with this key; measure and store it if there is none."""
        if _name(key) not in self._known:
            self._known[_name(key)] = result = measure()
            if self._file is not None:
                with self._file.open("a") as file:
                    file.write(json.dumps({"key": key, "result": result}) + "\n")
        return self._known[_name(key)]


def _name(key: dict[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)
