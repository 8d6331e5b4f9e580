"""Syncs over a line that changes meanwhile: their duration, the line's limit, and the bytes that are sent again."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.wan.measuring import bench
from benchmarks.wan.rows import Row
from harness.lines import Line, Shape
from harness.remote import seconds, together

LOOK_S = 0.002  # between looks at the line
PATIENCE = 10  # times an undisturbed sync


@dataclass(frozen=True)
class Change:
    """A change of one worker's line, once the share `after` of an undisturbed sync's bytes has crossed it, for
    `lasts_s`: `rate` is the factor of its rates, `loss` the share of lost packets, each way."""

    name: str
    after: float
    lasts_s: float
    rate: float = 1.0
    loss: float = 0.0

    def on(self, shape: Shape) -> Shape:
        up, down = (each * self.rate for each in (shape.up_mbit, shape.down_mbit))
        return replace(shape, up_mbit=up, down_mbit=down, loss=self.loss or shape.loss)

    def floor_s(self, undisturbed_s: float) -> float:
        """Return the least duration of a sync with the change, from its duration without."""
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
    """Measure a sync without a change, and one with each change."""
    with bench(row.shape, row.tcp) as made:
        rounds = len(changes) + 2
        made.create_run("changing", rounds, codecs=(row.upload, row.download))
        made.order("sync", "changing", ca=None, elements=row.parameters, rounds=rounds)
        together(made.workers, 1, 0.0)  # opens the connections
        line = made.lines[0]
        before = sum(line.wire_bytes())
        (undisturbed,) = together(made.workers, 1, silence_s)
        took_s, crossed = seconds(undisturbed), sum(line.wire_bytes()) - before
        changed = []
        for change in changes:
            at = sum(line.wire_bytes()) + round(change.after * crossed)
            (answers,) = together(made.workers, 1, silence_s, partial(_change, line, row.shape, change, at, took_s))
            line.shape(row.shape)
            changed.append((change, answers))
    # The minimum, as a part may be sent twice even without a change.
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


def _change(line: Line, shape: Shape, change: Change, at: int, undisturbed_s: float) -> None:
    """Change the line during a sync, when `at` bytes have crossed it in all, and restore it after `lasts_s` if that is
    finite. Raises RuntimeError if they do not cross it, because the sync has failed or sends less."""
    give_up_at = time.monotonic() + PATIENCE * undisturbed_s
    while (crossed := sum(line.wire_bytes())) < at:
        if time.monotonic() > give_up_at:
            raise RuntimeError(
                f"{change.name}: {at - crossed} bytes are missing before the change; the sync has failed"
            )
        time.sleep(LOOK_S)
    line.shape(change.on(shape))
    if change.lasts_s < math.inf:
        time.sleep(change.lasts_s)
        line.shape(shape)
