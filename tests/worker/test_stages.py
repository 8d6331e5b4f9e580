"""The stopwatch, and what a worker tells of a round."""

import threading
from collections.abc import Iterator

import pytest

from protocol.messages import Stage
from tests.support.waiting import PATIENCE_S
from worker.accounts.progress import Progress
from worker.accounts.stages import Stages, Traffic


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_an_inner_stage_interrupts_the_outer_one(clock: Clock) -> None:
    stages = Stages(clock)
    with stages(Stage.AWAIT_DELTA):
        clock.now += 3
        with stages(Stage.DOWNLOAD):
            clock.now += 2
        clock.now += 1
    assert stages.take() == {Stage.AWAIT_DELTA: 4, Stage.DOWNLOAD: 2}


def test_threads_in_one_stage_count_once_for_as_long_as_there_is_one(clock: Clock) -> None:
    stages = Stages(clock)
    inside, leave = threading.Event(), threading.Event()

    def upload() -> None:
        with stages(Stage.UPLOAD):
            inside.set()
            assert leave.wait(PATIENCE_S)

    other = threading.Thread(target=upload)
    with stages(Stage.UPLOAD):
        clock.now += 1
        other.start()
        assert inside.wait(PATIENCE_S)
        clock.now += 2
    clock.now += 4
    leave.set()
    other.join()
    clock.now += 8
    assert stages.take() == {Stage.UPLOAD: 7}


def test_what_goes_on_is_split_between_two_reports(clock: Clock) -> None:
    stages = Stages(clock)
    with stages(Stage.SNAPSHOT):
        clock.now += 1
        assert stages.take() == {Stage.SNAPSHOT: 1}
        clock.now += 2
    assert stages.take() == {Stage.SNAPSHOT: 2}
    assert stages.take() == {}


def test_a_stage_ends_with_a_fault_and_with_the_items(clock: Clock) -> None:
    stages = Stages(clock)

    def items() -> Iterator[int]:
        for item in range(3):
            clock.now += 1
            yield item

    def receive() -> None:
        for item in stages.during(Stage.DOWNLOAD, items()):
            if item == 1:
                raise ConnectionError("broke off")

    with pytest.raises(ConnectionError):
        receive()
    clock.now += 50
    assert list(stages.during(Stage.DOWNLOAD, items())) == [0, 1, 2]

    def encode(seconds: float) -> float:
        clock.now += seconds
        return seconds

    assert stages.timed(Stage.ENCODE, encode)(4) == 4
    assert stages.take() == {Stage.DOWNLOAD: 5, Stage.ENCODE: 4}


def test_the_first_step_of_a_process_is_no_measure_of_its_pace(clock: Clock) -> None:
    """It compiles and allocates: a worker whose first round had two steps was once said to be half as fast."""
    progress = Progress(Traffic(), Stages(clock), clock)
    for round_, seconds in enumerate([(30, 2, 2), (2, 2, 2)]):
        progress.begin_round(round_)
        for step, each in enumerate(seconds):
            clock.now += each
            progress.step(step + 1)
        progress.end_inner_steps(3, 300)
        shown = progress.metrics()
        assert (shown.inner_steps_per_second, shown.tokens_per_second) == (0.5, 50)


def test_a_single_step_is_all_that_is_known_of_a_pace(clock: Clock) -> None:
    progress = Progress(Traffic(), Stages(clock), clock)
    progress.begin_round(0)
    clock.now += 4
    progress.step(1)
    progress.end_inner_steps(1, 100)
    assert progress.metrics().inner_steps_per_second == 0.25


def test_what_was_not_sent_is_in_the_last_report_and_nothing_twice(clock: Clock) -> None:
    traffic = Traffic()
    progress = Progress(traffic, Stages(clock), clock)
    for round_number in range(3):
        progress.begin_round(round_number)
        traffic.upload_bytes += 10
        clock.now += 2
        progress.drop(round_number)
        progress.end_round(round_number, epoch=1)
    first = progress.unsent
    assert first is not None
    assert (first.round, first.upload_bytes, first.dropped_steps) == (0, 10, 0)
    assert progress.unsent is first, "until the coordinator has it"
    progress.note_sent(first)
    clock.now += 1
    last = progress.last_report(epoch=1)
    assert (last.round, last.upload_bytes, last.dropped_steps) == (3, 20, 3)
    assert (last.seconds[Stage.TRAIN], last.seconds[Stage.WAIT]) == (4, 1)
    assert progress.unsent is None
