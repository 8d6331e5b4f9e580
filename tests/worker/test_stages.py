"""The stopwatch, what a worker tells of a round, and its own log of inner steps."""

import errno
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.coordinator import SettableClock
from protocol.messages import Stage
from tests.support.waiting import PATIENCE_S
from tests.worker import toy
from tests.worker.toy import MakeToy
from worker.accounts import step_log
from worker.accounts.progress import Progress
from worker.accounts.stages import Stages, Traffic
from worker.accounts.step_log import StepLog


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


def test_an_inner_stage_interrupts_the_outer_one(clock: SettableClock) -> None:
    stages = Stages(clock)
    with stages(Stage.AWAIT_DELTA):
        clock.advance(3)
        with stages(Stage.DOWNLOAD):
            clock.advance(2)
        clock.advance(1)
    assert stages.take() == {Stage.AWAIT_DELTA: 4, Stage.DOWNLOAD: 2}


def test_threads_in_one_stage_count_once_for_as_long_as_there_is_one(clock: SettableClock) -> None:
    stages = Stages(clock)
    inside, leave = threading.Event(), threading.Event()

    def upload() -> None:
        with stages(Stage.UPLOAD):
            inside.set()
            assert leave.wait(PATIENCE_S)

    other = threading.Thread(target=upload)
    with stages(Stage.UPLOAD):
        clock.advance(1)
        other.start()
        assert inside.wait(PATIENCE_S)
        clock.advance(2)
    clock.advance(4)
    leave.set()
    other.join()
    clock.advance(8)
    assert stages.take() == {Stage.UPLOAD: 7}


def test_what_goes_on_is_split_between_two_reports(clock: SettableClock) -> None:
    stages = Stages(clock)
    with stages(Stage.SNAPSHOT):
        clock.advance(1)
        assert stages.take() == {Stage.SNAPSHOT: 1}
        clock.advance(2)
    assert stages.take() == {Stage.SNAPSHOT: 2}
    assert stages.take() == {}


def test_a_stage_ends_with_a_fault_and_with_the_items(clock: SettableClock) -> None:
    stages = Stages(clock)

    def items() -> Iterator[int]:
        for item in range(3):
            clock.advance(1)
            yield item

    def receive() -> None:
        for item in stages.during(Stage.DOWNLOAD, items()):
            if item == 1:
                raise ConnectionError("broke off")

    with pytest.raises(ConnectionError):
        receive()
    clock.advance(50)
    assert list(stages.during(Stage.DOWNLOAD, items())) == [0, 1, 2]

    def encode(seconds: float) -> float:
        clock.advance(seconds)
        return seconds

    assert stages.timed(Stage.ENCODE, encode)(4) == 4
    assert stages.take() == {Stage.DOWNLOAD: 5, Stage.ENCODE: 4}


def test_the_first_step_of_a_process_is_no_measure_of_its_pace(clock: SettableClock) -> None:
    """It compiles and allocates: a worker whose first round had two steps was once said to be half as fast."""
    progress = Progress(Traffic(), Stages(clock), clock)
    for round_, seconds in enumerate([(30, 2, 2), (2, 2, 2)]):
        progress.begin_round(round_)
        for step, each in enumerate(seconds):
            clock.advance(each)
            progress.step(step + 1)
        progress.end_inner_steps(3, 300)
        shown = progress.metrics()
        assert (shown.inner_steps_per_second, shown.tokens_per_second) == (0.5, 50)


def test_a_single_step_is_all_that_is_known_of_a_pace(clock: SettableClock) -> None:
    progress = Progress(Traffic(), Stages(clock), clock)
    progress.begin_round(0)
    clock.advance(4)
    progress.step(1)
    progress.end_inner_steps(1, 100)
    assert progress.metrics().inner_steps_per_second == 0.25


def test_what_was_not_sent_is_in_the_last_report_and_nothing_twice(clock: SettableClock) -> None:
    traffic = Traffic()
    progress = Progress(traffic, Stages(clock), clock)
    for round_number in range(3):
        progress.begin_round(round_number)
        traffic.upload_bytes += 10
        clock.advance(2)
        progress.drop(round_number)
        progress.end_round(round_number, epoch=1)
    first = progress.unsent
    assert first is not None
    assert (first.round, first.upload_bytes, first.dropped_steps) == (0, 10, 0)
    assert progress.unsent is first, "until the coordinator has it"
    progress.note_sent(first)
    clock.advance(1)
    last = progress.last_report(epoch=1)
    assert (last.round, last.upload_bytes, last.dropped_steps) == (3, 20, 3)
    assert (last.seconds[Stage.TRAIN], last.seconds[Stage.WAIT]) == (4, 1)
    assert progress.unsent is None


# --- whole runs ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_byte_and_every_second_of_a_run_is_in_some_account(toy_run: MakeToy) -> None:
    run = toy_run(toy.spec(min_workers=2))
    started = time.monotonic()
    run.workers(["a", "b"])
    took_s = time.monotonic() - started
    info, workers = run.final(), [run.told("a"), run.told("b")]
    rounds = [run.round(number) for number in range(3)]
    for each in workers:
        moved = (each.metrics.upload_bytes, each.metrics.download_bytes)
        assert (each.account.upload_bytes, each.account.download_bytes) == moved
        assert 0 < each.account.total_s < took_s
        assert each.account.seconds[Stage.SYNC] > each.account.seconds[Stage.OUTER_STEP] > 0
    assert info.account.upload_bytes == sum(each.account.upload_bytes for each in workers)
    assert info.account.total_s == pytest.approx(sum(each.account.total_s for each in workers))
    for detail in rounds:
        assert set(detail.accounts) == {"a", "b"}
        assert detail.account.upload_bytes == sum(account.upload_bytes for account in detail.accounts.values())
        for account in detail.accounts.values():
            stages = {
                Stage.TRAIN,
                Stage.GATHER,
                Stage.SYNC,
                Stage.ENCODE,
                Stage.UPLOAD,
                Stage.DOWNLOAD,
                Stage.OUTER_STEP,
            }
            assert stages <= set(account.seconds)
            # Threads that work side by side do not make a stage longer than what it is a part of.
            within = (Stage.ENCODE, Stage.UPLOAD, Stage.AWAIT_DELTA, Stage.DOWNLOAD, Stage.OUTER_STEP)
            assert all(account.seconds.get(stage, 0.0) <= account.seconds[Stage.SYNC] for stage in within)
    assert rounds[1].upload_bytes == rounds[1].account.upload_bytes  # nothing but its contributions went up, and once
    assert 2 * rounds[1].delta_bytes == rounds[1].account.download_bytes


# --- a worker's own log of inner steps -----------------------------------------------------------------------------


def opened(path: Path, clock: Callable[[], float] | None = None) -> StepLog:
    return StepLog(path, clock or SettableClock(), now=lambda: 1_700_000_000.0)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def step(log: StepLog, number: int, loss: float = 1.5) -> None:
    log.step(torch.tensor(loss), 64, step=number, round=0)


def test_a_line_for_every_step(tmp_path: Path) -> None:
    path, clock = tmp_path / "steps.jsonl", SettableClock()
    with opened(path, clock) as log:
        log.begin_round()
        for number in range(2):
            clock.seconds += 0.5
            step(log, number)
    common = {"at": 1_700_000_000.0, "round": 0, "tokens": 64, "loss": 1.5, "tokens_per_second": 128.0}
    assert lines(path) == [common | {"step": 0}, common | {"step": 1}]


def test_losses_stay_on_their_device_until_a_group_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at a value would let the host wait for the device, at every step."""
    looks: list[int] = []
    stack = torch.stack

    def look(losses: list[torch.Tensor]) -> torch.Tensor:
        looks.append(len(losses))
        return stack(losses)

    monkeypatch.setattr(torch, "stack", look)
    path, clock = tmp_path / "steps.jsonl", SettableClock()
    with opened(path, clock) as log:
        for number in range(step_log.GROUP_STEPS + 1):
            step(log, number)
        assert looks == [step_log.GROUP_STEPS]
        assert len(lines(path)) == step_log.GROUP_STEPS
        clock.seconds += step_log.GROUP_S
        step(log, 0)
        assert looks == [step_log.GROUP_STEPS, 2]
        step(log, 1)
        log.begin_round()
        assert looks == [step_log.GROUP_STEPS, 2, 1]


def test_the_time_between_two_rounds_is_no_step_s(tmp_path: Path) -> None:
    path, clock = tmp_path / "steps.jsonl", SettableClock()
    with opened(path, clock) as log:
        for _ in range(2):
            clock.seconds += 1000.0  # a sync
            log.begin_round()
            clock.seconds += 1.0
            step(log, 0)
    assert [line["tokens_per_second"] for line in lines(path)] == [64.0, 64.0]


def test_it_goes_on_after_a_kill(tmp_path: Path) -> None:
    """What was there stays; a line that the kill has cut does not spoil the next one."""
    path = tmp_path / "steps.jsonl"
    with opened(path) as log:
        step(log, 0)
    path.write_text(path.read_text() + '{"at": 17')
    with opened(path) as log:
        step(log, 1)
    first, cut, second = path.read_text().splitlines()
    assert (json.loads(first)["step"], cut, json.loads(second)["step"]) == (0, '{"at": 17', 1)


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with opened(path) as log:
        step(log, 0, math.nan)
        step(log, 1, math.inf)
    assert [line["loss"] for line in lines(path)] == [None, None]


@pytest.mark.parametrize("room", [0, 30])
def test_a_full_disk_costs_lines_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    """Also where a part of the lines still finds room: it would be in front of the next ones for ever."""
    caplog.set_level(logging.INFO)
    path, write = tmp_path / "steps.jsonl", os.write

    def full(file: int, data: bytes) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:room])

    with opened(path) as log:
        step(log, 0)
        log.begin_round()
        monkeypatch.setattr(os, "write", full)
        for number in (1, 2, 3):
            step(log, number)
            log.begin_round()
        assert len(caplog.records) == 1
        assert "cannot write the step log" in caplog.text
        monkeypatch.setattr(os, "write", write)
        step(log, 4)
    assert [line["step"] for line in lines(path)] == [0, 4]
    assert "written again; 3 lines are missing" in caplog.text
