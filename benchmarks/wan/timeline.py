"""A sync as a picture: what each fragment was in at every moment, and how far TCP's windows were open meanwhile.

Each worker has a lane per fragment: encode, upload, wait, download, outer step. Below them are the coordinator's lanes:
collecting ends, screening and averaging, publishing. The curves are of the first worker's line, from TCP_INFO: solid,
the bytes acknowledged per second as a share of the line's rate; dashed, the congestion windows of the connections that
have something in flight, as a share of what the line holds in a round trip.
"""

import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from harness.lines import Line, Shape
from outerstep.common.drawing import Drawing
from protocol.messages import RoundDetail, Stage
from worker.accounts.stages import Stages

EVERY_S = 0.05  # between looks at the windows; a look takes some milliseconds of a core
WIDTH, LEFT, LANE, GAP, PLOT = 1100, 150, 9, 12, 120  # of the picture, in its units
INKS = {
    "encode": "#b8a1d9",
    "upload": "#4c78a8",
    "await-delta": "#e5e5e5",
    "download": "#54a24b",
    "outer-step": "#f2a35e",
    "average": "#d1495b",
    "publish": "#edc949",
}


@dataclass(frozen=True)
class Span:
    """One fragment's time in one stage, in seconds of this machine's monotonic clock."""

    lane: str
    fragment: int
    stage: str
    started: float
    ended: float


@dataclass(frozen=True)
class Window:
    """One direction at one moment: the congestion windows of its busy connections, in bytes; how many these are; and
    the bytes acknowledged so far, by connection."""

    at: float
    way: str
    size: int
    busy: int
    acknowledged: dict[str, int]

    def since(self, earlier: "Window") -> int:
        """Return the bytes acknowledged since then, of the connections that are still open."""
        return sum(total - earlier.acknowledged.get(name, 0) for name, total in self.acknowledged.items())


class StageRecorder(Stages):
    """A stopwatch that also records when each stage of one worker's threads began and ended. A thread says which
    fragment it is about with `of`."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.spans: list[tuple[int, str, float, float]] = []
        self._local = threading.local()

    def of(self, fragment: int) -> None:
        self._local.fragment = fragment

    @contextmanager
    def __call__(self, stage: Stage) -> Iterator[None]:
        started = time.monotonic()
        try:
            with super().__call__(stage):
                yield
        finally:
            fragment = getattr(self._local, "fragment", None)
            if fragment is not None:
                self.spans.append((fragment, str(stage), started, time.monotonic()))


@dataclass
class Windows:
    """Looks at the windows of a line again and again, on a thread, within a `with` block."""

    line: Line
    samples: list[Window] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Windows":
        self._thread = threading.Thread(target=self._look_again_and_again)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look_again_and_again(self) -> None:
        looks: dict[str, list[str]] = {
            "up": [*self.line.prefix, "ss", "-tinOH", "dst", self.line.address],
            "down": ["ss", "-tinOH", "dst", self.line.far_address],
        }
        while not self._ended.wait(EVERY_S):
            for way, command in looks.items():
                shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                self.samples.append(Window(time.monotonic(), way, *windows_in(shown)))


def windows_in(shown: str) -> tuple[int, int, dict[str, int]]:
    """Return (size, busy, acknowledged) of a `Window`, from the output of `ss -tinOH`."""
    connections = {
        " ".join(words[3:5]): dict(each.split(":", 1) for each in words[5:] if ":" in each)
        for words in map(str.split, shown.splitlines())
    }
    busy = [int(each["cwnd"]) * int(each["mss"]) for each in connections.values() if "unacked" in each]
    return sum(busy), len(busy), {name: int(each.get("bytes_acked", 0)) for name, each in connections.items()}


def spans_of(answers: Sequence[dict[str, Any]], detail: RoundDetail, clock_offset_s: float) -> list[Span]:
    """Return the spans of all workers and of the coordinator. `clock_offset_s`: Unix time less the monotonic clock."""
    spans = [
        Span(f"worker-{rank}", fragment, stage, started, ended)
        for rank, answer in enumerate(answers)
        for fragment, stage, started, ended in answer["spans"]
    ]
    for each in detail.fragments:
        assert each.closed_at is not None
        assert each.aggregated_at is not None
        assert each.published_at is not None
        closed, averaged, published = (
            at - clock_offset_s for at in (each.closed_at, each.aggregated_at, each.published_at)
        )
        spans.append(Span("coordinator", each.fragment, "average", closed, averaged))
        spans.append(Span("coordinator", each.fragment, "publish", averaged, published))
    return spans


def drawn(title: str, spans: Sequence[Span], windows: Sequence[Window], shape: Shape) -> str:
    """Return the picture, SVG."""
    began, ended = min(each.started for each in spans), max(each.ended for each in spans)
    lanes = sorted({(each.lane, each.fragment) for each in spans}, key=lambda lane: (lane[0] == "coordinator", lane))
    names = list(dict.fromkeys(name for name, _ in lanes))
    top = {lane: 40 + LANE * place + GAP * names.index(lane[0]) for place, lane in enumerate(lanes)}
    plot_top = max(top.values()) + LANE + 2 * GAP
    across: Callable[[float], float] = lambda at: LEFT + (WIDTH - LEFT - 20) * (at - began) / (ended - began)  # noqa: E731
    picture = Drawing(WIDTH, plot_top + PLOT + 40, title)
    picture.words(10, 18, title)
    for place, (stage, ink) in enumerate(INKS.items()):
        picture.box(LEFT + 130 * place, 24, 10, 8, fill=ink, line=ink)
        picture.words(LEFT + 130 * place + 14, 32, stage, size=11)
    for name in names:
        picture.words(10, top[min(lane for lane in lanes if lane[0] == name)] + LANE, name, size=11)
    for each in sorted(spans, key=lambda each: each.stage != "await-delta"):  # downloads are within it
        left, y = across(each.started), top[each.lane, each.fragment]
        ink = INKS.get(each.stage, "#999")
        picture.box(left, y, max(across(each.ended) - left, 0.5), LANE - 2, fill=ink, line=ink)
    _plot(picture, windows, shape, across, plot_top, began, ended)
    for second in range(int(ended - began) + 1):
        picture.words(across(began + second), plot_top + PLOT + 16, f"{second} s", size=11, at="middle")
    return picture.svg()


def _plot(
    picture: Drawing,
    windows: Sequence[Window],
    shape: Shape,
    across: Callable[[float], float],
    top: float,
    began: float,
    ended: float,
) -> None:
    """Draw the windows as shares of what the line holds: its rate times its round trip; at most 2."""
    holds = {"up": shape.up_mbit, "down": shape.down_mbit}
    for share in (0.0, 1.0, 2.0):
        y = top + PLOT * (1 - share / 2)
        picture.line((LEFT, y), (WIDTH - 20, y), dashed=True)
        picture.words(LEFT - 6, y + 4, f"{share:.0f} ×", size=11, at="end")
    for way, ink in (("up", INKS["upload"]), ("down", INKS["download"])):
        rate = holds[way] * 1e6 / 8
        own = [each for each in windows if each.way == way and began <= each.at <= ended]
        high: Callable[[float], float] = lambda share: top + PLOT * (1 - min(share, 2.0) / 2)  # noqa: E731
        sizes = [(across(each.at), high(each.size / (rate * shape.round_trip_s))) for each in own]
        steps = [(b.at, b.since(a) / (b.at - a.at)) for a, b in pairwise(own)]
        if steps:
            picture.line(*sizes, ink=ink, dashed=True)
            picture.line(*((across(at), high(speed / rate)) for at, speed in steps), ink=ink)
        most = max((each.busy for each in own), default=0)
        picture.words(10, top + (14 if way == "up" else 28), f"{way}, ≤ {most} busy", size=11, ink=ink)
