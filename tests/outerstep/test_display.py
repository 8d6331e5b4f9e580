"""What people see of a run that is followed: lines, or on a terminal a picture, which fits."""

import io
from dataclasses import replace
from datetime import datetime

import pytest
from rich.console import Console

from outerstep.display import LineDisplay, costs_texts, round_table, table, worker_table
from outerstep.follow import Look
from outerstep.live_view import LiveDisplay, display_for
from protocol.messages import Event, RoundDetail, RoundInfo, RunInfo, WorkerInfo
from tests.outerstep.examples import event_document, rollback_document, round_document, run_document, worker_document
from tests.support.terminal import Screen

ONE = (worker_document("worker-0"),)


def look(
    *rounds: dict,
    events: tuple[dict, ...] = (),
    workers: tuple[dict, ...] = ONE,
    trouble: str | None = None,
    reported: RoundDetail | None = None,
    **run: object,
) -> Look:
    return Look(
        run=RunInfo.model_validate(run_document(**run)),
        rounds=tuple(RoundInfo.model_validate(item) for item in rounds),
        workers=tuple(WorkerInfo.model_validate(each) for each in workers),
        events=tuple(Event.model_validate(item) for item in events),
        last_event=0,
        trouble=trouble,
        reported=reported,
    )


def lines_of(*looks: Look) -> list[str]:
    out = io.StringIO()
    with LineDisplay(Console(file=out, width=40)) as display:
        for item in looks:
            display.show(item)
    return out.getvalue().splitlines()


def test_each_round_is_one_line_once_when_it_is_published():
    still_open = round_document(1, state="collecting", closed_at=None)
    began = round_document(0)["opened_at"]
    zeroth, first, second = (
        round_document(number, opened_at=began + 2 * number, closed_at=began + 2 * number + 2) for number in range(3)
    )
    printed = lines_of(look(zeroth, still_open, eta_s=6.0), look(first, eta_s=4.0), look(first, second, eta_s=2.0))
    assert printed == [
        f"round {number}    loss 3.2500  held-out at start 3.5000  5 k tokens/s  up 2 MB  delta 1 MB  2.0 s  "
        f"rate –  elapsed {2 * (number + 1)}.0 s  to go {2 * (3 - number)}.0 s  losses {'▁' * (number + 1)}"
        for number in range(3)
    ]


def test_events_are_printed_as_they_were_written():
    [line] = lines_of(look(events=(event_document(1, "[red]worker[/red] joined"),)))
    assert line.endswith("  [red]worker[/red] joined")


def test_an_outage_is_told_once_and_so_is_its_end():
    gone = look(trouble="cannot reach the coordinator at http://c")
    back = replace(gone, trouble=None)
    assert lines_of(back, gone, gone, back, back) == [
        "cannot reach the coordinator at http://c; retrying",
        "the coordinator is back",
    ]


def test_what_holds_a_run_up_is_told_once_and_so_is_its_end():
    full = look(held_up_by="storage-full", reason="the disk is full")
    goes_on = look(reason="round 3: waiting")
    assert lines_of(goes_on, full, full, goes_on) == ["the disk is full", "the run continues: round 3: waiting"]


def test_the_end_is_told():
    [line] = lines_of(look(state="finished", reason="all 4 rounds are done", held_out_loss=1.5))
    assert line == "run demo: all 4 rounds are done; last held-out loss 1.5000"


def test_what_each_worker_added_to_the_last_round_and_who_costs_more_than_it_gives():
    adds = {
        "fast": {"tokens": 0.75, "weight": 0.8, "held_s": 0.0},
        "slow": {"tokens": 0.25, "weight": 0.2, "held_s": 0.6},
        "gone": {"tokens": 0.0, "weight": 0.0, "held_s": 1.5},
    }
    waiting = {"share": 0.3, "never": 0.2, "doubled_h": 0.1}
    document = round_document(7, fragments=[], adds=adds, waiting=waiting)
    reported = RoundDetail.model_validate(document)
    plain = [WorkerInfo.model_validate(worker_document(name)) for name in ("fast", "slow", "new")]
    header, fast, slow, new = printed_table(plain, reported).splitlines()
    assert header.split()[-4:] == ["gave", "weight", "held", "up"]
    assert fast.split()[-4:] == ["75.0%", "80.0%", "0.0", "s"]
    assert slow.split()[-4:] == ["25.0%", "20.0%", "0.6", "s"]
    assert new.split()[-3:] == ["–", "–", "–"]
    assert costs_texts(reported) == [
        "slow costs more than it gives: 30.0% of round 7 was spent waiting for it, and it gave 25.0% of the tokens; "
        'with sync.wait = "never" nobody waits for it'
    ]
    never = RoundDetail.model_validate(document | {"waiting": waiting | {"never": None}})
    assert costs_texts(never)[0].endswith("; more sync.inner_steps give it time")
    assert costs_texts(RoundDetail.model_validate(round_document(7, fragments=[]))) == []
    dropped = RoundDetail.model_validate(document | {"accounts": {"slow": {"dropped_steps": 12}, "fast": {}}})
    assert costs_texts(dropped)[0] == (
        "slow dropped 12 inner steps before round 7: the others were a round further before it had their deltas; "
        "more sync.inner_steps give its line time"
    )


def printed_table(workers: list[WorkerInfo], reported: RoundDetail | None = None) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(worker_table(workers, 160, reported))
    return out.getvalue()


def test_a_narrow_terminal_gets_all_columns_and_whole_words():
    """At 80 columns `run show` had keys such as `worke…`, `held-…` and `spec …`."""
    worker = worker_document("box-of-a-long-name")
    worker["metrics"] |= {"mfu": 0.4567, "peak_memory_bytes": 17_000_000_000}
    out = io.StringIO()
    console = Console(file=out, width=80)
    console.print(worker_table([WorkerInfo.model_validate(worker)], 80))
    console.print(round_table([RoundInfo.model_validate(round_document(0, held_out_bits_per_byte=1.25))], 80))
    facts = table(["", "~"], [("held-out loss", "3.5000"), ("spec digest", "0123456789abcdef" * 8)])
    facts.show_header = False
    console.print(facts)
    printed = out.getvalue()
    assert "…" not in printed
    assert max(len(line) for line in printed.splitlines()) <= 80
    for word in (
        "worker",
        "tokens/s",
        "MFU",
        "45.7%",
        "memory",
        "17 GB",
        "held-out at start",
        "delta",
        "held-out loss",
    ):
        assert word in printed
    assert printed.count("box-of-a-long-name") == 2, "each part of a table says whose it is"
    assert printed.replace("\n", "").replace(" ", "").endswith("0123456789abcdef" * 8)


# --- the picture ----------------------------------------------------------------------------------------------------

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
