"""Counting inner steps: the units that were used, the schedule's place, the warmup of a joiner."""

import pytest

from protocol.messages import Action, Assignment
from protocol.spec.run import RunSpec, parse_spec
from worker.rounds.training import InnerSteps


def spec(warmup: int = 4, wait: str = "always") -> RunSpec:
    return parse_spec(f"""
name = "r"
[model]
preset = "tiny"
[inner]
joiner_warmup_steps = {warmup}
[sync]
rounds = 10
inner_steps = 6
wait = "{wait}"
""")


def begin(steps: InnerSteps, round_number: int = 0, inner_steps: int = 6, scheduled: int = 6) -> None:
    assignment = Assignment(
        action=Action.TRAIN,
        reason="",
        round=round_number,
        step=scheduled * round_number,
        schedule_steps=scheduled,
        inner_steps=inner_steps,
        units=[[10, 12], [20, 18 + inner_steps]],
    )
    steps.begin(assignment)


def test_units_used_are_those_of_the_steps_done() -> None:
    steps = InnerSteps(spec())
    begin(steps)
    seen = []
    for _ in range(6):
        steps.begin_unit()
        seen.append(steps.units_used)
        steps.step()
    assert seen == [[], [[10, 11]], [[10, 12]], [[10, 12], [20, 21]], [[10, 12], [20, 22]], [[10, 12], [20, 23]]]
    assert steps.units_used == [[10, 12], [20, 24]]
    begin(steps, 1)
    assert (steps.done, steps.units_used) == (0, [])


def test_a_loop_that_takes_no_units_uses_one_per_step() -> None:
    steps = InnerSteps(spec())
    begin(steps)
    for _ in range(3):
        steps.step()
    assert steps.units_used == [[10, 12], [20, 21]]


@pytest.mark.parametrize("skipped", [{0}, {2}, {5}, {0, 1}, {1, 4, 5}, set(range(6))])
def test_a_skipped_step_uses_its_unit_wherever_it_lies(skipped: set[int]) -> None:
    """One in the middle was used, one at the end went back to the pool, and where all were skipped all were used."""
    steps = InnerSteps(spec())
    begin(steps)
    for unit in range(6):
        steps.begin_unit()
        if unit not in skipped:
            steps.step()
        steps.end_unit()
        assert sum(stop - start for start, stop in steps.units_used) == unit + 1
    assert steps.units_used == [[10, 12], [20, 24]]
    assert steps.done == 6 - len(skipped)


def test_the_unit_in_hand_is_not_used_yet() -> None:
    steps = InnerSteps(spec())
    begin(steps)
    steps.begin_unit()
    assert steps.units_used == []
    steps.end_unit()
    steps.begin_unit()
    assert steps.units_used == [[10, 11]]


def test_a_unit_of_the_last_round_uses_none_of_the_next() -> None:
    """The round's last step begins the next round before the loop asks for another unit."""
    steps = InnerSteps(spec())
    begin(steps)
    steps.begin_unit()
    steps.step()
    begin(steps, 1)
    steps.end_unit()
    assert steps.units_used == []


@pytest.mark.parametrize(("own", "seen"), [(6, [0, 1, 2, 3, 4, 5]), (3, [0, 2, 4]), (4, [0, 1, 3, 4])])
def test_all_workers_walk_through_the_schedule_together(own: int, seen: list[int]) -> None:
    """Whatever H a worker has of its own: a round is as long in the schedule for all of them."""
    steps = InnerSteps(spec())
    for round_number in (0, 7):
        begin(steps, round_number, own)
        walked = []
        for _ in range(own):
            walked.append(steps.global_step)
            steps.step()
        assert walked == [6 * round_number + step for step in seen]
        assert steps.global_step == 6 * (round_number + 1)


def test_auto_counts_in_nominal_steps() -> None:
    steps = InnerSteps(spec())
    begin(steps, 3, 50, scheduled=100)
    for _ in range(25):
        steps.step()
    assert steps.global_step == 350


def test_a_joiner_warms_up_once() -> None:
    steps = InnerSteps(spec())
    begin(steps, round_number=5)
    scales = []
    for _ in range(6):
        scales.append(steps.warmup_scale)
        steps.step()
    assert scales == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])
    begin(steps, round_number=6)
    assert steps.warmup_scale == 1


def test_who_was_there_from_the_start_has_the_run_s_warmup_only() -> None:
    steps = InnerSteps(spec())
    begin(steps, round_number=0)
    assert steps.warmup_scale == 1
    begin(steps, round_number=1)
    assert steps.warmup_scale == 1


def test_no_warmup_where_none_is_wanted() -> None:
    steps = InnerSteps(spec(warmup=0))
    begin(steps, round_number=5)
    assert steps.warmup_scale == 1


def test_units_to_come_are_those_behind_the_one_in_hand() -> None:
    steps = InnerSteps(spec())
    assert steps.units_to_come == []
    begin(steps)
    seen = [steps.units_to_come]
    for unit in range(6):
        steps.begin_unit()
        seen.append(steps.units_to_come)
        if unit != 2:  # its step is skipped
            steps.step()
        steps.end_unit()
    assert seen == [
        [[10, 12], [20, 24]],
        [[11, 12], [20, 24]],
        [[20, 24]],
        [[21, 24]],
        [[22, 24]],
        [[23, 24]],
        [],
    ]


def test_units_to_come_are_as_many_as_there_are_steps() -> None:
    """An assignment may have more units than this worker takes inner steps."""
    steps = InnerSteps(spec())
    units = [[0, 10]]
    steps.begin(Assignment(action=Action.TRAIN, reason="", round=0, inner_steps=3, units=units))
    steps.begin_unit()
    assert steps.units_to_come == [[1, 3]]
    steps.step()  # a loop that takes no more units here
    steps.step()
    assert steps.units_to_come == [[2, 3]]


@pytest.mark.parametrize(("units", "steps_done"), [([[10, 11]], 1), ([[10, 34]], 24)])
def test_a_worker_that_never_waits_goes_on_as_long_as_it_has_units(units: list[list[int]], steps_done: int) -> None:
    """It has fewer than H if an earlier process of it contributed to the round as it left. Found by the simulation: a step
    more than there were units counted twice."""
    steps = InnerSteps(spec(wait="never"))
    steps.begin(Assignment(action=Action.TRAIN, reason="", round=1, schedule_steps=6, inner_steps=6, units=units))
    while steps.may_go_on:
        steps.begin_unit()
        steps.step()
    assert steps.done == steps_done


@pytest.mark.parametrize(
    ("wait", "ahead", "own", "ready"),
    [
        ("never", 0, 6, False),
        ("never", 2, 4, False),
        ("never", 6, 1, True),
        ("never", 9, 1, True),
        ("always", 2, 6, False),
    ],
)
def test_steps_while_the_last_deltas_travelled_are_the_first_of_h(wait: str, ahead: int, own: int, ready: bool) -> None:
    steps = InnerSteps(spec(wait=wait))
    units = [[10, 34]]
    steps.begin(
        Assignment(action=Action.TRAIN, reason="", round=1, step=6, schedule_steps=6, inner_steps=6, units=units), ahead
    )
    assert (steps.own, steps.ready) == (own, ready)
    assert steps.global_step == 6
    for _ in range(own):
        steps.step()
    assert steps.global_step == 12
    assert steps.may_go_on == (wait == "never")
