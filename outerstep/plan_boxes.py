"""What each of several boxes adds to a run: the time to the loss of the fastest one alone. Pure.

docs/performance.md has the measurements behind it, and compares it with runs on a real coordinator.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from outerstep.plan import Workload, sync_cost
from protocol.spec.sections import MOST_ROUNDS, SyncSpec

# Boxes of speeds v, the fastest with 1, reach the loss that it reaches alone in OUTER · (Σv)^POWER of its time, fitted
# to `python -m benchmarks.boxes real` within 7 %. OUTER is what the outer optimizer gives to a single box. They need
# 1 + DELAY · d · Σ t·(1 − t) times as long if syncs take the share d of a round and t are the boxes' shares of the
# tokens: what is trained meanwhile lacks the others' part of the outer step. That is fitted to `floor` of the same
# benchmark, with `--delay 0.1` and `--delay 0.5`, within 5 %.
OUTER, POWER, DELAY = 0.875, -0.21, 0.4

_BOX = re.compile(r"(?P<speed>\d+(?:\.\d+)?),(?P<down>\d+(?:\.\d+)?)/(?P<up>\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class Box:
    """`speed`: inner steps per second, relative to the other boxes. `down` and `up`: bits per second."""

    speed: float
    down: float
    up: float


@dataclass(frozen=True)
class Added:
    """What a box adds.

    inner_steps  in a round
    sync_s       seconds to send its pseudo-gradient and get the deltas, while it trains on
    training     the share of its time in inner steps
    tokens       its share of the tokens
    without      the time to the loss, as `Together.time`, without this box; None if it is the only one
    """

    box: Box
    inner_steps: int
    sync_s: float
    training: float
    tokens: float
    without: float | None


@dataclass(frozen=True)
class Together:
    """`time`: until the loss that the fastest box reaches alone, as a share of its time."""

    boxes: list[Added]
    inner_steps: int
    round_s: float
    time: float


def parse_box(text: str) -> Box:
    """Parse `SPEED,DOWN/UP` with Mbit/s: '0.5,100/10'. Raises ValueError."""
    found = _BOX.fullmatch(text.strip())
    values = [float(each) for each in found.groups()] if found else []
    if not values or not all(0 < each < 1e9 for each in values):
        raise ValueError(
            f"{text!r} is not a box such as 0.5,100/10: its speed relative to the others, and what its line brings and "
            "takes, in Mbit/s"
        )
    return Box(values[0], values[1] * 1e6, values[2] * 1e6)


def together(parameters: int, step_s: float, boxes: Sequence[Box], latency_s: float, loss: float) -> Together:
    """Return what boxes add that train with the default settings. `step_s`: of the fastest box; `loss`: the share of
    packets lost."""
    defaults = SyncSpec.model_fields
    inner_steps = int(defaults["inner_steps"].default)
    codecs = [str(defaults[f"{way}load_codec"].default) for way in ("up", "down")]
    fastest, round_s = max(each.speed for each in boxes), inner_steps * step_s
    syncs, shares = [], []
    for box in boxes:
        line = Workload(parameters, box.up, box.down, step_s, len(boxes), latency_s, inner_steps, loss)
        syncs.append(sync_cost(line, codecs[0], codecs[1]).sync_s)
        # It trains on while it sends, up to MOST_ROUNDS · H steps, and then waits.
        shares.append(min(1.0, MOST_ROUNDS * round_s / syncs[-1]))
    speeds = [box.speed / fastest * share for box, share in zip(boxes, shares, strict=True)]
    delays = [min(sync_s / round_s, 1.0) for sync_s in syncs]
    return Together(
        [
            Added(
                box,
                max(round(inner_steps * box.speed / fastest), 1),
                syncs[i],
                shares[i],
                speeds[i] / sum(speeds),
                _time(speeds[:i] + speeds[i + 1 :], delays[:i] + delays[i + 1 :]) if len(boxes) > 1 else None,
            )
            for i, box in enumerate(boxes)
        ],
        inner_steps,
        round_s,
        _time(speeds, delays),
    )


def _time(speeds: Sequence[float], delays: Sequence[float]) -> float:
    """`speeds`: with the time in which a box waits for its line. If that leaves less than one box, less is trained.
    `delays`: the share of a round that each box's sync takes, at most 1, beyond which nothing was measured."""
    total = sum(speeds)
    lacking = [delay * t * (1 - t) for delay, t in zip(delays, (speed / total for speed in speeds), strict=True)]
    return OUTER * (1 + DELAY * sum(lacking)) * (total**POWER if total >= 1 else 1 / total)
