"""Syncs over a line that changes in their middle: how long they take, what the line then allows, what is sent again."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.wan.measuring import bench
from benchmarks.wan.rows import Row
from harness.far import seconds, together
from harness.lines import Line, Shape


@dataclass(frozen=True)
class Change:
    """From `after` of an undisturbed sync's time on, for `lasts_s`, one worker's line carries `rate` of what it did,
    and loses that share of its packets, each way."""

    name: str
    after: float
    lasts_s: float
    rate: float = 1.0
    loss: float = 0.0

    def on(self, shape: Shape) -> Shape:
        up, down = (each * self.rate for each in (shape.up_mbit, shape.down_mbit))
        return replace(shape, up_mbit=up, down_mbit=down, loss=self.loss or shape.loss)

    def floor_s(self, undisturbed_s: float) -> float:
        """Return what a sync takes at least that took so long without the change."""
        before_s = self.after * undisturbed_s
        rate = self.rate * (1 - self.loss)
        left_s = undisturbed_s - before_s - rate * self.lasts_s
        return before_s + (self.lasts_s + left_s if left_s > 0 else (undisturbed_s - before_s) / rate)


CHANGES = (
    Change("half the rate", 0.3, math.inf, rate=0.5),
    Change("5 % loss for a minute", 0.3, 60.0, loss=0.05),
    Change("gone for 30 s", 0.3, 30.0, loss=1.0),
)


def measure(row: Row, changes: Sequence[Change], silence_s: float) -> list[dict[str, Any]]:
    """Measure a sync without a change, and one with each of them."""
    with bench(row.shape, row.tcp) as made:
        rounds = len(changes) + 2
        made.create_run("changing", rounds, codecs=(row.upload, row.download))
        made.order("sync", "changing", ca=None, elements=row.parameters, rounds=rounds)
        together(made.workers, 1, 0.0)  # by which connections are made
        (undisturbed,) = together(made.workers, 1, silence_s)
        took_s, line = seconds(undisturbed), made.lines[0]
        changed = []
        for change in changes:
            (answers,) = together(made.workers, 1, silence_s, partial(_change, line, row.shape, change, took_s))
            line.shape(row.shape)
            changed.append((change, answers))
    # The least: undisturbed, too, a part may be sent twice.
    all_syncs = (undisturbed, *(answers for _, answers in changed))
    payload = {way: min(answers[0][way] for answers in all_syncs) for way in ("up", "down")}
    return [
        {
            "row": row.name,
            "change": change.name,
            "undisturbed_s": took_s,
            "floor_s": change.floor_s(took_s),
            "sync_s": seconds(answers),
            "payload_bytes": payload,
            "repeated_bytes": {way: answers[0][way] - payload[way] for way in ("up", "down")},
        }
        for change, answers in changed
    ]


def _change(line: Line, shape: Shape, change: Change, undisturbed_s: float) -> None:
    """Change the line in the middle of a sync, for as long as the change lasts if that ends."""
    time.sleep(change.after * undisturbed_s)
    line.shape(change.on(shape))
    if change.lasts_s < math.inf:
        time.sleep(change.lasts_s)
        line.shape(shape)
