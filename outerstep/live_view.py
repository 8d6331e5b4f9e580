"""The live view of a run on a terminal: redrawn in place, and never larger than the terminal."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import SegmentLines
from rich.table import Table
from rich.text import Text

from outerstep.common.quantities import (
    UNKNOWN,
    bytes_text,
    count_text,
    duration_text,
    held_out_text,
    loss_text,
    natural,
    sparkline,
)
from outerstep.display import (
    GAP,
    Display,
    LineDisplay,
    RoundHistory,
    added_cells,
    added_columns,
    costs_texts,
    event_line,
    events_besides_rounds,
    round_columns,
    table,
    waiting_text,
    waits_text,
    with_reported_columns,
)
from outerstep.follow import ENDED, Look
from protocol.messages import Event, RoundInfo, RunInfo, Stage, WorkerInfo, WorkerState
from protocol.text import printable

SHOWN_ROUNDS = 8
SHOWN_EVENTS = 4
NAME_WIDTH = 24  # maximum columns for a worker's name
BAR_WIDTH = 30


def display_for(console: Console) -> Display:
    """Return the display for `console`: the live view on a terminal, otherwise lines."""
    return LiveDisplay(console) if console.is_terminal else LineDisplay(console)


@dataclass(frozen=True)
class Scene:
    """What the live view shows. One thread draws it while another prepares the next one. `deadline`: when the open
    round closes, by this machine's clock."""

    look: Look
    rounds: tuple[RoundInfo, ...]
    events: tuple[Event, ...]
    losses: tuple[float | None, ...]
    held_out_losses: tuple[float | None, ...]
    elapsed_s: float | None
    deadline: float | None


class LiveDisplay:
    """A display that redraws the view after each look, and when the terminal is resized."""

    def __init__(self, console: Console, now: Callable[[], float] = time.time) -> None:
        self.console, self._now = console, now
        self._size = console.size
        self._history = RoundHistory()
        self._scene: Scene | None = None
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=4, vertical_overflow="crop")

    def __enter__(self) -> "LiveDisplay":
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, look: Look) -> None:
        self._scene = self._next(look)
        self._live.refresh()

    def _next(self, look: Look) -> Scene:
        before = self._scene
        rounds = {item.round: item for item in before.rounds} if before else {}
        if look.rolled_back_to is not None:
            rounds = {number: item for number, item in rounds.items() if number < look.rolled_back_to}
            self._history.go_back(look.rolled_back_to)
        rounds |= {item.round: item for item in look.rounds}
        events = (*(before.events if before else ()), *events_besides_rounds(look.events))
        for item in look.rounds:
            self._history.add(item)
        deadline = before.deadline if before else None
        if look.trouble is None:  # otherwise this look has no new information
            closes_in_s = next((item.closes_in_s for item in look.rounds if item.closes_in_s is not None), None)
            deadline = None if closes_in_s is None else self._now() + closes_in_s
        return Scene(
            look=look,
            rounds=tuple(rounds[number] for number in sorted(rounds)[-SHOWN_ROUNDS:]),
            events=events[-SHOWN_EVENTS:],
            losses=tuple(self._history.losses),
            held_out_losses=tuple(self._history.held_out_losses),
            elapsed_s=self._history.elapsed_s(look.run),
            deadline=deadline,
        )

    def _draw(self) -> RenderableType:
        if self.console.size != self._size:  # the terminal has wrapped the lines of the last view
            self._size = self.console.size
            self.console.clear()
        return Text("") if self._scene is None else live_view(self._scene, self.console)


def live_view(scene: Scene, console: Console) -> RenderableType:
    """Return the view, at most as wide and as high as `console`: its head, then as many workers, rounds and events as
    fit."""
    width, height = console.size
    head = _head(scene, width)
    workers = sorted(scene.look.workers, key=lambda each: _sort_key(each, scene.look.run))
    # One line is left for the cursor.
    room = height - 1 - len(console.render_lines(head, console.options.update(height=None)))
    shown, rounds, events = rows_that_fit(room, len(workers), len(scene.rounds), len(scene.events))
    parts: list[RenderableType] = [head]
    if shown:
        parts += [Text(""), _worker_table(workers[:shown], scene.look, width)]
        if shown < len(workers):
            parts.append(Text(f"… and {len(workers) - shown} more", style="dim"))
    if rounds:
        parts += [Text(""), _fitting(*round_columns(scene.rounds[-rounds:]), width)]
    if events:
        parts += [Text(""), *(_cut(event_line(event), "dim") for event in scene.events[-events:])]
    lines = console.render_lines(Group(*parts), console.options.update(height=None), pad=False)
    return SegmentLines(lines[: height - 1], new_lines=True)


def _cut(text: str, style: str = "") -> Text:
    """Return one line, cut with … at the terminal's width."""
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


# --- the head -----------------------------------------------------------------------------------------------------


def _head(scene: Scene, width: int) -> RenderableType:
    run, trouble = scene.look.run, scene.look.trouble
    done = f"{run.round} of {run.rounds} rounds"
    taken = cell_len(printable(run.name)) + len(done) + len("run ") + 2 * GAP
    title = Table.grid(padding=(0, GAP))
    title.add_row(
        _cut(f"run {run.name}", "bold"),
        ProgressBar(total=run.rounds, completed=run.round, width=max(min(BAR_WIDTH, width - taken), 1)),
        Text(done, no_wrap=True),
    )
    held_out = held_out_text(run.held_out_loss, run.held_out_bits_per_byte)
    reported = scene.look.reported
    waited = [] if reported is None else [*filter(None, [waiting_text(reported)]), *costs_texts(reported)]
    lines = [
        f"elapsed {duration_text(scene.elapsed_s)}  to go {duration_text(run.eta_s)}",
        f"loss {sparkline(scene.losses)} {loss_text(next(reversed(scene.losses), None))}",
        f"held-out loss {sparkline(scene.held_out_losses)} {held_out}",
    ]
    reason = Text(
        printable(trouble or f"{run.state}: {run.reason}"), style="red" if trouble or run.held_up_by else "bold"
    )
    if scene.deadline is not None and run.state not in ENDED:
        reason.append(f"  (at {datetime.fromtimestamp(scene.deadline).astimezone():%H:%M:%S})", style="dim")
    return Group(title, *map(_cut, lines + waited), reason)


# --- what fits ------------------------------------------------------------------------------------------------


# The order in which rows are dropped if there is no room, and how many of each kind stay.
_DROPPED = (("rounds", 2), ("events", 1), ("workers", 4), ("events", 0), ("rounds", 0), ("workers", 0))


def rows_that_fit(room: int, workers: int, rounds: int, events: int) -> tuple[int, int, int]:
    """Return how many workers, rounds and events fit into `room` lines."""
    counts = {"workers": min(workers, max(room, 0)), "rounds": rounds, "events": events}
    for name, least in _DROPPED:
        while counts[name] > least and _lines(counts, workers) > room:
            counts[name] -= 1
    return counts["workers"], counts["rounds"], counts["events"]


def _lines(counts: dict[str, int], workers: int) -> int:
    """Return the lines needed: each part has an empty line and a header before it, and the workers may have a line
    after them with the number of `workers` left out."""
    taken = {"workers": 2 + (counts["workers"] < workers), "rounds": 2, "events": 1}
    return sum(count + taken[name] for name, count in counts.items() if count)


# --- workers ------------------------------------------------------------------------------------------------------


def rounds_behind(worker: WorkerInfo, run: RunInfo) -> int | None:
    """Return how many rounds a live worker was behind the run at its last heartbeat; None if unknown."""
    at = worker.metrics.round
    if worker.state is not WorkerState.LIVE or at is None:
        return None
    over = worker.metrics.phase == Stage.WAIT  # it is done with its round
    return max(run.round - at - over, 0)


def _sort_key(worker: WorkerInfo, run: RunInfo) -> tuple[bool, int, tuple[object, ...]]:
    """Return the sort key: live workers first, those furthest behind first."""
    return worker.state is not WorkerState.LIVE, -(rounds_behind(worker, run) or 0), natural(worker.name)


def _worker_table(workers: Sequence[WorkerInfo], look: Look, width: int) -> RenderableType:
    run, reported = look.run, look.reported
    waits = {} if reported is None else reported.waits
    columns = [
        "worker",
        "doing",
        ">behind",
        ">tokens/s",
        ">seen",
        ">up",
        ">down",
        ">loss",
        ">tokens",
        *added_columns(reported),
        *["waited"] * bool(waits),
    ]
    rows = [
        [
            item.name,
            _doing(item),
            UNKNOWN if (behind := rounds_behind(item, run)) is None else str(behind),
            count_text(item.metrics.tokens_per_second),
            UNKNOWN if item.last_seen_s is None else f"{item.last_seen_s:.0f} s",
            bytes_text(item.metrics.upload_bytes),
            bytes_text(item.metrics.download_bytes),
            loss_text(item.metrics.loss),
            count_text(item.tokens),
            *added_cells(item.name, reported),
            *[waits_text(waits[item.name]) if item.name in waits else UNKNOWN] * bool(waits),
        ]
        for item in workers
    ]
    return _fitting(*with_reported_columns(columns, rows, workers), width)


def _doing(worker: WorkerInfo) -> str:
    """Return the stage of a live worker, and the state of another."""
    if worker.state is not WorkerState.LIVE:
        return worker.state.value
    if worker.quarantined_until is not None:
        return f"out until {worker.quarantined_until}"
    return worker.metrics.phase or UNKNOWN


def _fitting(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Table:
    """Return a table of as many columns, starting with the first, as fit into one line."""
    taken, shown = 0, 0
    for index, (column, *cells) in enumerate(zip(columns, *rows, strict=True)):
        widest = max(cell_len(printable(cell)) for cell in (column.removeprefix(">"), *cells))
        taken += (min(widest, NAME_WIDTH) if index == 0 else widest) + (GAP if index else 0)
        if index and taken > width:
            break
        shown = index + 1
    result = table(columns[:shown], (row[:shown] for row in rows))
    result.columns[0].overflow, result.columns[0].max_width = "ellipsis", NAME_WIDTH
    return result
