"""The worker's own log of inner steps."""

import errno
import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from worker.accounts import step_log
from worker.accounts.step_log import StepLog


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def opened(path: Path, clock: Callable[[], float] | None = None) -> StepLog:
    return StepLog(path, clock or Clock(), now=lambda: 1_700_000_000.0)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def step(log: StepLog, number: int, loss: float = 1.5) -> None:
    log.step(torch.tensor(loss), 64, step=number, round=0)


def test_a_line_for_every_step(tmp_path: Path) -> None:
    path, clock = tmp_path / "steps.jsonl", Clock()
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
    path, clock = tmp_path / "steps.jsonl", Clock()
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
    path, clock = tmp_path / "steps.jsonl", Clock()
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
