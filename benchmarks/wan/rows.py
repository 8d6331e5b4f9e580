"""The measured lines, their limits and targets. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.lines import Shape, on_the_wire

# How many times faster than gloo's all-reduce a sync must be, by upload codec.
TIMES_AS_FAST = {"int8": 6, "ternary": 15}


@dataclass(frozen=True)
class Target:
    """The most that a sync may take: `times` the line's limit plus `round_trips`, or `seconds`."""

    times: float = 0.0
    round_trips: int = 0
    seconds: float = 0.0

    def max_s(self, limit_s: float, round_trip_s: float) -> float:
        return self.times * limit_s + self.round_trips * round_trip_s + self.seconds

    def __str__(self) -> str:
        if self.seconds:
            return f"{self.seconds:g} s"
        return f"{self.times:g} × limit" + (f" + {self.round_trips} rt" if self.round_trips else "")


@dataclass(frozen=True)
class Row:
    """A line, the congestion control of both ends, and what is sent over it."""

    name: str
    shape: Shape
    tcp: str
    parameters: int
    upload: str
    download: str
    target: Target
    tls: bool = False

    def limit_s(self, up_bytes: int, down_bytes: int) -> float:
        """Return the seconds that these payload bytes take at the line's rates, with the headers of full packets."""
        up, down = (on_the_wire(each) * 8 / 1e6 for each in (up_bytes, down_bytes))
        return max(up / self.shape.up_mbit, down / self.shape.down_mbit)


def _rows() -> list[Row]:
    home = Shape(up_mbit=10, down_mbit=100, round_trip_s=0.04)
    far_home = replace(home, round_trip_s=0.15)
    lossy = replace(far_home, loss=0.005)
    fibre = Shape(up_mbit=110, down_mbit=500, round_trip_s=0.06)
    overseas = Shape(up_mbit=500, down_mbit=500, round_trip_s=0.2)
    a = Row("A", home, "bbr", 8_000_000, "int8", "int8", Target(1.08, 4))
    c = Row("C", far_home, "cubic", 8_000_000, "int8", "int8", Target(1.08, 4))
    d = Row("D", lossy, "cubic", 8_000_000, "int8", "int8", Target(1.6))
    return [
        a,
        replace(a, name="A-tls", tls=True),
        Row("B", home, "bbr", 8_000_000, "ternary", "int4", Target(1.15, 5)),
        c,
        replace(c, name="C-tls", tls=True),
        d,
        replace(d, name="D-bbr", tcp="bbr", target=Target(1.3)),
        Row("E", fibre, "bbr", 25_000_000, "int8", "int8", Target(1.15, 5)),
        Row("F", overseas, "cubic", 25_000_000, "int8", "int8", Target(seconds=3)),
    ]


ROWS = {row.name: row for row in _rows()}
TRAINING_LINE = ROWS["E"].shape
TRAINING_TARGETS = {"classic": 0.96, "overlap": 0.995, "never": 0.995}


def missed(row: Row, sync_s: float, limit_s: float, gloo_s: float | None) -> list[str]:
    """Return the targets that a sync of `sync_s` seconds missed, in words. `gloo_s`: gloo's seconds, if measured."""
    found = []
    if sync_s > (most_s := row.target.max_s(limit_s, row.shape.round_trip_s)):
        found.append(f"{sync_s:.2f} s > {most_s:.2f}")
    times = TIMES_AS_FAST[row.upload]
    if gloo_s is not None and gloo_s < times * sync_s:
        found.append(f"gloo {gloo_s / sync_s:.1f} × < {times} ×")
    return found


def chosen(names: str, known: Sequence[str]) -> list[str]:
    """Return the names in a comma-separated list, in the order of `known`. ValueError for an unknown name."""
    wanted = [name for name in names.split(",") if name]
    for name in wanted:
        if name not in known:
            raise ValueError(f"unknown name {name}: choose from {', '.join(known)}")
    return [name for name in known if name in wanted]


def described(row: Row) -> dict[str, Any]:
    shape = row.shape
    return {
        "row": row.name,
        "down_mbit": shape.down_mbit,
        "up_mbit": shape.up_mbit,
        "round_trip_s": shape.round_trip_s,
        "loss": shape.loss,
        "queue_bytes": {
            "up": shape.queue_bytes(shape.up_mbit),
            "down": shape.queue_bytes(shape.down_mbit),
        },
        "tcp": row.tcp,
        "tls": row.tls,
        "parameters": row.parameters,
        "upload": row.upload,
        "download": row.download,
    }
