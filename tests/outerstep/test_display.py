"""What people see of a run that is followed."""

import io
from dataclasses import replace

from rich.console import Console

from outerstep.display import LineDisplay, costs_texts, round_table, table, worker_table
from outerstep.follow import Look
from protocol.messages import Event, RoundDetail, RoundInfo, RunInfo, WorkerInfo
from tests.outerstep.examples import event_document, round_document, run_document, worker_document

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
