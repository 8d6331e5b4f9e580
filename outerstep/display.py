"""A run as text: rounds and events as lines, workers and rounds as tables. `live_view.py` has the live view."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from types import TracebackType
from typing import Literal, Protocol

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from outerstep.common.quantities import (
    SHOWN_LOSSES,
    UNKNOWN,
    bytes_text,
    count_text,
    duration_text,
    held_out_text,
    learning_rate_text,
    loss_text,
    share_text,
    sparkline,
)
from outerstep.follow import Look
from protocol.messages import (
    Cause,
    Event,
    FragmentState,
    Metrics,
    RoundDetail,
    RoundInfo,
    RunInfo,
    Stage,
    Waits,
    WorkerInfo,
)
from protocol.text import printable

GAP = 2  # terminal columns between table columns
SHOWN_BY_ROUNDS = frozenset({"round-opened", "round-published", "evaluated"})


class Display(Protocol):
    """Shows looks, within a `with` block."""

    def __enter__(self) -> "Display": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, look: Look) -> None: ...


class LineDisplay:
    """Prints one line for each published round and each event."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.next_round = 0
        self.history = RoundHistory()
        self.rates: dict[int, float] = {}  # learning rates reported by workers, by round
        self.in_trouble = False
        self.held_up_by: Cause | None = None

    def __enter__(self) -> "LineDisplay":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, look: Look) -> None:
        for event in events_besides_rounds(look.events):
            self._line(event_line(event))
        if look.rolled_back_to is not None:
            self.next_round = min(self.next_round, look.rolled_back_to)
            self.history.go_back(look.rolled_back_to)
        for worker in look.workers:
            self.rates |= rate_by_round(worker.metrics)
        published = [each for each in look.rounds if each.state is FragmentState.PUBLISHED]
        for item in published:
            if item.round >= self.next_round:
                self.history.add(item)
                to_go = duration_text(look.run.eta_s if item is published[-1] else None)
                rate = learning_rate_text(self.rates.get(item.round))
                self._line(f"{round_line(item)}  rate {rate}  {self.history.text(look.run, to_go)}")
                self.next_round = item.round + 1
        if look.trouble and not self.in_trouble:
            self._line(f"{look.trouble}; retrying")
        elif self.in_trouble and not look.trouble:
            self._line("the coordinator is back")
        self.in_trouble = look.trouble is not None
        if look.run.held_up_by != self.held_up_by and not look.ended:
            self.held_up_by = look.run.held_up_by
            self._line(look.run.reason if self.held_up_by else f"the run continues: {look.run.reason}")
        if look.ended:
            self._line(end_line(look.run))

    def _line(self, text: str) -> None:
        self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


class RoundHistory:
    """The last published rounds of a run. Times are the coordinator's."""

    def __init__(self) -> None:
        self._rounds: dict[int, RoundInfo] = {}

    def add(self, item: RoundInfo) -> None:
        """Add a round if it is published."""
        if item.state is FragmentState.PUBLISHED:
            self._rounds[item.round] = item
            self._rounds.pop(item.round - SHOWN_LOSSES, None)

    def go_back(self, state: int) -> None:
        """Forget the rounds that were discarded when the run was rolled back."""
        self._rounds = {number: item for number, item in self._rounds.items() if number < state}

    def text(self, run: RunInfo, to_go: str) -> str:
        """Return a line with the elapsed time, the remaining time `to_go`, and the losses."""
        return f"elapsed {duration_text(self.elapsed_s(run))}  to go {to_go}  losses {sparkline(self.losses)}"

    def elapsed_s(self, run: RunInfo) -> float | None:
        """Return the seconds from the run's creation to the end of its last round; None before the first ends."""
        last = self._rounds.get(max(self._rounds, default=-1))
        return None if last is None or last.closed_at is None else last.closed_at - run.created_at

    @property
    def losses(self) -> list[float | None]:
        """The training losses of the last rounds."""
        return [self._rounds[number].loss for number in sorted(self._rounds)]

    @property
    def held_out_losses(self) -> list[float | None]:
        """The held-out losses of the states that these rounds started from."""
        return [self._rounds[number].held_out_loss for number in sorted(self._rounds)]


_WAITS = {
    "workers": "other workers",
    "coordinator": "the coordinator",
    "upload": "upload",
    "download": "download",
    "opening": "a round to open",
}


def waits_text(waits: Waits) -> str:
    """Return what a worker waited for most in a round, with seconds: at most two parts, the longest first."""
    parts = sorted(((getattr(waits, name), what) for name, what in _WAITS.items()), reverse=True)
    shown = [f"{duration_text(seconds)} {what}" for seconds, what in parts[:2] if seconds >= 0.05]
    return ", ".join(shown) or duration_text(0.0)


def waiting_text(detail: RoundDetail) -> str:
    """Return how much of a round's time was spent waiting, and what would save some of it. Empty if unknown."""
    waiting = detail.waiting
    if waiting is None:
        return ""
    doubled = share_text(waiting.doubled_h)
    if waiting.never is None:
        saved = f"twice as many inner steps would save {doubled}"
    else:
        never = share_text(waiting.never)
        saved = f'without sync.wait = "always" up to {never} would be saved, with twice as many inner steps {doubled}'
    return f"waited {share_text(waiting.share)} of round {detail.round}; {saved}"


ADDED = [">gave", ">weight", ">held up"]


def added_columns(reported: RoundDetail | None) -> list[str]:
    """Return the columns for what workers added to a round; none if that is unknown."""
    return ADDED if reported is not None and reported.adds else []


def added_cells(worker: str, reported: RoundDetail | None) -> list[str]:
    """Return what a worker added to a round, by `added_columns`: its shares of the tokens and of the weight, and what
    it was waited for."""
    each = None if reported is None else reported.adds.get(worker)
    if each is None:
        return [UNKNOWN] * len(added_columns(reported))
    return [share_text(each.tokens), share_text(each.weight), duration_text(each.held_s)]


def costs_texts(detail: RoundDetail) -> list[str]:
    """Return a line for each worker without which the round's other tokens would have come faster than all of them
    did: all waited for it for a larger share of the time than its share of the tokens. And one for each that dropped
    what it had trained, because it got the deltas of the round before too late."""
    seconds = round_seconds(detail)
    waits_always = detail.waiting is not None and detail.waiting.never is not None
    remedy = 'with sync.wait = "never" nobody waits for it' if waits_always else "more sync.inner_steps give it time"
    dropped = [
        f"{worker} dropped {account.dropped_steps} inner steps before round {detail.round}: the others were a round "
        "further before it had their deltas; more sync.inner_steps give its line time"
        for worker, account in detail.accounts.items()
        if account.dropped_steps
    ]
    return dropped + [
        f"{worker} costs more than it gives: {share_text(each.held_s / seconds)} of round {detail.round} was spent "
        f"waiting for it, and it gave {share_text(each.tokens)} of the tokens; {remedy}"
        for worker, each in detail.adds.items()
        if seconds and each.held_s and each.held_s > each.tokens * seconds > 0
    ]


def rate_by_round(metrics: Metrics) -> dict[int, float]:
    """Return the learning rate of a worker's last inner step, by the round that this was in; empty if unknown."""
    if metrics.learning_rate is None or metrics.round is None:
        return {}
    # A worker reports the rate at the end of its inner steps. While it trains, the rate is the previous round's.
    return {metrics.round - (metrics.phase == Stage.TRAIN): metrics.learning_rate}


def round_line(item: RoundInfo) -> str:
    held_out = held_out_text(item.held_out_loss, item.held_out_bits_per_byte)
    return (
        f"round {item.round:<4d} loss {loss_text(item.loss)}  held-out at start {held_out}  "
        f"{count_text(tokens_per_second(item))} tokens/s  up {bytes_text(item.upload_bytes)}  "
        f"delta {bytes_text(item.delta_bytes)}  {duration_text(round_seconds(item))}"
    )


def events_besides_rounds(events: Iterable[Event]) -> list[Event]:
    """Return the events that are not already visible from the rounds."""
    return [event for event in events if event.kind not in SHOWN_BY_ROUNDS]


def event_line(event: Event) -> str:
    return f"{datetime.fromtimestamp(event.at).astimezone():%H:%M:%S}  {event.message}"


def end_line(run: RunInfo) -> str:
    last = held_out_text(run.held_out_loss, run.held_out_bits_per_byte)
    return f"run {run.name}: {run.reason}; last held-out loss {last}"


def round_seconds(item: RoundInfo) -> float | None:
    return None if item.closed_at is None else item.closed_at - item.opened_at


def tokens_per_second(item: RoundInfo) -> float | None:
    """Return the speed of all workers together over a whole round, including sync and waiting; None while it is
    open."""
    seconds = round_seconds(item)
    return item.tokens / seconds if seconds else None


def worker_table(workers: Sequence[WorkerInfo], width: int, reported: RoundDetail | None = None) -> RenderableType:
    """Return a table of workers. `reported`: the last round that workers have reported on."""
    columns = ["worker", "state", "doing", ">round", ">step", ">loss", ">tokens/s", ">tokens", ">up", ">down"]
    columns += added_columns(reported)
    rows = [
        [
            item.name,
            item.state.value,
            f"out until {item.quarantined_until}" if item.quarantined_until else item.metrics.phase or UNKNOWN,
            _number(item.metrics.round),
            _number(item.metrics.inner_step),
            loss_text(item.metrics.loss),
            count_text(item.metrics.tokens_per_second),
            count_text(item.tokens),
            bytes_text(item.metrics.upload_bytes),
            bytes_text(item.metrics.download_bytes),
            *added_cells(item.name, reported),
        ]
        for item in workers
    ]
    return tables(*with_reported_columns(columns, rows, workers), width)


def with_reported_columns(
    columns: list[str], rows: list[list[str]], workers: Sequence[WorkerInfo]
) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows, extended by the metrics that at least one worker reports."""
    if any(item.metrics.learning_rate is not None for item in workers):
        columns = [*columns, ">rate"]
        rows = [[*row, learning_rate_text(item.metrics.learning_rate)] for row, item in zip(rows, workers, strict=True)]
    if any(item.metrics.mfu is not None for item in workers):
        columns = [*columns, ">MFU"]
        rows = [[*row, share_text(item.metrics.mfu)] for row, item in zip(rows, workers, strict=True)]
    if any(item.metrics.peak_memory_bytes is not None for item in workers):
        columns = [*columns, ">memory"]
        rows = [[*row, bytes_text(item.metrics.peak_memory_bytes)] for row, item in zip(rows, workers, strict=True)]
    return columns, rows


def round_table(rounds: Iterable[RoundInfo], width: int) -> RenderableType:
    return tables(*round_columns(rounds), width)


def round_columns(rounds: Iterable[RoundInfo]) -> tuple[list[str], list[list[str]]]:
    columns = [">round", "state", ">loss", ">held-out at start", ">tokens/s", ">time", ">up", ">delta"]
    rows = [
        [
            str(item.round),
            item.state.value,
            loss_text(item.loss),
            held_out_text(item.held_out_loss, item.held_out_bits_per_byte),
            count_text(tokens_per_second(item)),
            duration_text(round_seconds(item)),
            bytes_text(item.upload_bytes),
            bytes_text(item.delta_bytes),
        ]
        for item in rounds
    ]
    return columns, rows


def tables(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> RenderableType:
    """Return a table of at most `width` columns. Columns that do not fit are put into further tables below it, each
    starting with the first column."""
    taken = [
        GAP + max(cell_len(cell) for cell in (column.removeprefix(">"), *cells))
        for column, *cells in zip(columns, *rows, strict=True)
    ]
    parts, room = [[0]], width - taken[0]
    for index in range(1, len(columns)):
        if taken[index] > room and len(parts[-1]) > 1:
            parts.append([0])
            room = width - taken[0]
        parts[-1].append(index)
        room -= taken[index]
    made = [table([columns[i] for i in part], ([row[i] for i in part] for row in rows)) for part in parts]
    return Group(*[line for each in made for line in (Text(""), each)][1:])


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table. A column whose name begins with '>' is right-aligned; one whose name begins with '~' wraps its
    text."""
    result = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        wrapped = column.startswith("~")
        result.add_column(column.lstrip(">~"), justify=justify, no_wrap=not wrapped, overflow="fold")
    for row in rows:
        # Text from others must neither be read as markup nor obeyed by the terminal.
        result.add_row(*(Text(printable(cell)) for cell in row))
    return result


def facts(rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of names and values, without a header."""
    result = table(["", "~"], rows)
    result.show_header = False
    return result


def lines(texts: Iterable[str]) -> Text:
    """Return lines of text, which only the terminal's width breaks."""
    return Text("\n").join(Text(printable(each)) for each in texts)


def _number(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)
