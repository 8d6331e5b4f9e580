"""The picture of a run on a terminal: what is in it, and that it fits."""

import io
from datetime import datetime

import pytest
from rich.console import Console

from outerstep.display import LineDisplay
from outerstep.live_view import LiveDisplay, display_for
from tests.outerstep.examples import event_document, rollback_document, round_document, worker_document
from tests.outerstep.test_display import look
from tests.support.terminal import Screen

NOON = datetime(2026, 1, 1, 12).astimezone().timestamp()


class Drawn:
    """A display on a terminal of this size; `screen` is what is on it."""

    def __init__(self, width: int = 100, height: int = 40) -> None:
        self._out = io.StringIO()
        self._console = Console(
            file=self._out, width=width, height=height, force_terminal=True, color_system=None, legacy_windows=False
        )
        self._display = LiveDisplay(self._console, now=lambda: NOON)
        self._screen = Screen(width, height)

    def show(self, *looks) -> list[str]:
        """The lines on the terminal once all of them were shown."""
        with self._display:
            for each in looks:
                self._display.show(each)
        for character in self._out.getvalue().replace("\n", "\r\n"):  # a read may end within an escape sequence
            self._screen.write(character)
        return self._screen.lines


def live(name: str, round_: int | None, phase: str = "train", **fields: object) -> dict:
    metrics = {"round": round_, "phase": phase, "tokens_per_second": 1234.0, "upload_bytes": 5e6, "loss": 2.5}
    return worker_document(name, state="live", last_seen_s=7.4, metrics=metrics, **fields)


def test_a_terminal_gets_a_picture_and_anything_else_lines():
    assert isinstance(display_for(Console(file=io.StringIO())), LineDisplay)
    assert isinstance(display_for(Console(file=io.StringIO(), force_terminal=True)), LiveDisplay)


def test_the_picture_holds_progress_losses_the_last_rounds_and_events():
    first = look(*(round_document(number, loss=number / 10) for number in range(9)), round=9, rounds=12)
    event = event_document(1)
    second = look(round_document(9, loss=9.9, held_out_loss=None), events=(event,), round=10, rounds=12, eta_s=75.0)
    picture = "\n".join(Drawn().show(first, second))
    for expected in (
        "10 of 12 rounds",
        "elapsed 2.0 s  to go 1 min 15 s",
        "loss ▁▁▁▁▁▁▁▁▂█ 9.9000",
        "held-out loss ▁▁▁▁▁▁▁▁▁– 5.5000",
        "running: waiting for 2 of 2 workers",
        "worker-0",
        "4 kB",
        "0.2000",
        "worker-0 joined",
    ):
        assert expected in picture, picture
    assert "0.1000" not in picture, "only the last 8 rounds are shown"


def test_workers_say_what_they_do_and_how_far_they_are_behind():
    """The hindmost comes first, and who has left last. One that waits is done with the round that it tells of."""
    workers = (
        live("even", 6),
        live("gone", 6) | {"last_seen_s": None, "state": "lost"},
        live("out", 6, quarantined_until=9),
        live("ready", 5, "wait"),
        live("slow", 4, "upload"),
        live("young", None, "join"),
    )
    lines = Drawn().show(look(workers=workers, round=6, rounds=9))
    start = next(number for number, line in enumerate(lines) if line.startswith("worker "))
    assert lines[start].split() == ["worker", "doing", "behind", "tokens/s", "seen", "up", "down", "loss", "tokens"]
    rows = [line.split()[:3] for line in lines[start + 1 : start + 7]]
    assert rows[0] == ["slow", "upload", "2"]
    assert rows[1:5] == [
        ["even", "train", "0"],
        ["out", "out", "until"],
        ["ready", "wait", "0"],
        ["young", "join", "–"],
    ]
    assert rows[5] == ["gone", "lost", "–"]
    assert "1.23 k   7 s  5 MB" in lines[start + 1]


def test_what_was_given_up_as_the_run_went_back_is_no_longer_shown():
    ahead = look(*(round_document(number, loss=number) for number in range(5)), round=5, rounds=9)
    back = look(round_document(1, loss=7.25), events=(rollback_document(9, 1),), round=2, rounds=9)
    picture = "\n".join(Drawn().show(ahead, back))
    assert "loss ▁█ 7.2500" in picture, picture
    assert "4.0000" not in picture


@pytest.mark.parametrize(("width", "height"), [(80, 24), (20, 5)])
def test_the_picture_is_no_larger_than_the_terminal(width: int, height: int):
    """Nothing of an earlier picture stays above it, as where it does not fit."""
    workers = tuple(live(f"box-with-a-name-that-is-too-long-{number}", 0) for number in range(200))
    shown = look(
        *(round_document(number) for number in range(9)),
        events=tuple(event_document(number, "much to tell " * 20) for number in range(9)),
        workers=workers,
        reason=f"waiting for 1 of 200 workers ({workers[7]['name']})",
    )
    lines = Drawn(width, height).show(shown, shown, shown)
    assert sum(line.startswith("run ") for line in lines) == 1
    if (width, height) == (80, 24):
        assert [line.split()[0] for line in lines if line.startswith("box")] == ["box-with-a-name-that-is…"] * 9
        assert "… and 191 more" in lines
        assert any(line.startswith("worker") and "seen" in line and "down" in line for line in lines), lines
