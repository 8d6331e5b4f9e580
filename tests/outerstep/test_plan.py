"""The planner's arithmetic, against values that were worked out by other means."""

import re
import statistics
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.frontier import measuring as frontier
from benchmarks.frontier.rows import SYNCHRONOUS
from harness.member import pack_frames
from outerstep import plan
from outerstep.plan import Workload
from protocol.codecs import CODECS
from protocol.fragments import TensorSpec, plan_fragments
from protocol.wire import CHUNK_ELEMENTS, Contributor, DeltaHeader, pack_header
from tests.outerstep.conftest import outerstep
from worker.line import line

WORKLOAD = Workload(parameters=100_000_000, up=10e6, down=100e6, step_s=1.0, workers=4, latency_s=0.04, steps=20_000)
INT8 = CODECS["int8"].figures
INT8_BITS = (8 + 16 / 256) * INT8.zstd  # per parameter
COMMAND = ["plan", "--params", "1.2e9", "--up", "10mbit", "--down", "100Mbit/s", "--step-time", "1.0"]


@pytest.mark.parametrize("parameters", [1, 999, 1 << 23, (1 << 23) + 1, 139_584_000])
def test_fragments_are_those_of_the_run(parameters: int):
    layout = plan_fragments([TensorSpec(name="w", shape=[parameters])], plan.FRAGMENT_ELEMENTS)
    sizes = plan.fragment_sizes(parameters, plan.FRAGMENT_ELEMENTS)
    assert layout.elements == sizes


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_are_those_of_a_real_payload(codec: str):
    n, workers = 2 * CHUNK_ELEMENTS + 1000, 3
    values = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    frames = pack_frames(values, CODECS[codec], zstd=False)
    header = DeltaHeader(
        run="my-run",
        round=100,
        fragment=100,
        codec=codec,
        elements=n,
        chunk_elements=CHUNK_ELEMENTS,
        frame_bytes=[len(frame) for frame in frames],
        base=bytes(32),
        contributors=[Contributor(worker=f"worker-{index}", tokens=1 << 24, factor=1.0) for index in range(workers)],
    )
    real = len(pack_header(header)) + sum(map(len, frames))
    assert plan.delta_bytes(codec, n, workers, zstd=False) == real
    packed = plan.delta_bytes(codec, n, workers, zstd=True)
    assert packed <= real
    assert 0 < plan.contribution_bytes(codec, n, zstd=False) - sum(map(len, frames)) < 400


@pytest.mark.parametrize(
    ("workload", "seconds"),
    [
        (WORKLOAD, INT8_BITS * 100e6 / 10e6),
        (replace(WORKLOAD, up=1e9), INT8_BITS * 100e6 / 100e6),  # now the download is the slower one
    ],
    ids=["upload", "download"],
)
def test_a_sync_takes_as_long_as_its_slower_direction_and_little_more(workload: Workload, seconds: float):
    sync_s = plan.sync_cost(workload, "int8", "int8").sync_s
    assert seconds < sync_s < 1.25 * seconds


def test_one_fragment_goes_through_everything_one_after_the_other():
    workload = replace(WORKLOAD, parameters=1_000_000, latency_s=0.5)
    each = plan.sync_cost(workload, "int8", "int8")
    up, down = plan.uplink(workload.up, 0.5, 0.0), plan.downlink(workload.down, 0.5, 0.0)
    lines = up.transfer_s(each.upload_bytes + plan.ACK_SHARE * each.download_bytes)
    lines += down.transfer_s(each.download_bytes)
    assert lines > 8 * each.upload_bytes / workload.up + 8 * each.download_bytes / workload.down + 0.5
    cpu = 1e-3 * (1 / INT8.pack + 4 / INT8.accumulate)
    cpu += 1e-3 * (1 / INT8.pack + 1 / INT8.unpack)
    assert each.sync_s == pytest.approx(lines + cpu + 0.5)


def test_many_small_fragments_wait_for_the_latency_of_each():
    workload = replace(WORKLOAD, parameters=1_000_000, latency_s=0.5)
    assert plan.sync_cost(workload, "int8", "int8", fragment=10_000).sync_s > 100 / plan.UPLOADS * 0.5


def test_a_far_line_costs_its_slow_start_and_losses_the_last_parts():
    """Rows of benchmarks.wan, docs/performance.md: 8 M parameters over 100/10 Mbit/s."""
    near, far, lossy = (
        plan.sync_cost(replace(WORKLOAD, parameters=8_000_000, latency_s=latency_s, loss=loss), "int8", "int8").sync_s
        for latency_s, loss in ((0.0, 0.0), (0.15, 0.0), (0.15, 0.005))
    )
    assert near + 4 * 0.15 < far < near + 8 * 0.15
    assert lossy > far + 1


def test_utilisation_and_factor():
    each = plan.sync_cost(WORKLOAD, "int8", "int8")
    found = plan.setting(WORKLOAD, each, 500)
    assert found.utilisation == pytest.approx(500 / (500 + each.sync_s + 0.04))
    # 2 · 3/4 · 32 bits per step and direction, against about 7.5 bits per round and direction
    assert found.factor == pytest.approx(48 * 500 / INT8_BITS, rel=1e-3)
    assert found.loss == pytest.approx(0.0003 + 0.0001 + 0.003 + 0.6 / 40 + 9e-5 * 500)


def test_the_overlap_is_as_many_inner_steps_as_a_sync_takes():
    """A sync of 5 s and 40 ms for the next assignment."""
    each = plan.SyncCost("int8", "int8", 1, 1, 5.0, 0.0)
    steps = {h: plan.setting(replace(WORKLOAD, step_s=1.0, latency_s=0.04), each, h).overlap for h in (5, 6, 7, 500)}
    assert steps == {5: None, 6: "eager", 7: 6, 500: 6}


def test_an_all_reduce_goes_at_the_slower_direction():
    assert plan.allreduce_seconds(WORKLOAD) == pytest.approx(8 * 600e6 / 10e6 + 6 * 0.04)


def test_the_recommendation_loses_the_least_of_those_that_reach_the_share():
    found = plan.settings(WORKLOAD)
    best, reason = plan.recommend(found, 0.5)
    assert best.utilisation >= 0.5
    assert best.loss is not None
    for each in found:
        if each.utilisation >= 0.5 and each.loss is not None:
            assert each.loss > best.loss - plan.NOISE - 1e-12  # rounding
    assert plan.name(best) in reason
    assert "50%" in reason


def test_where_nothing_reaches_the_share_the_nearest_is_named():
    found = plan.settings(replace(WORKLOAD, up=1e3))
    best, reason = plan.recommend(found, 0.9)
    assert best.utilisation == max(each.utilisation for each in found if each.loss is not None)
    assert reason.startswith("No setting reaches 90%")


def test_the_gap_is_near_what_was_measured_and_says_where_nothing_was():
    """The rows of docs/convergence.md in which nothing but H and the codecs was changed: within a factor of two."""
    explored = frontier.read(frontier.RESULTS)
    losses = {(each.row, each.steps, each.seed): each.loss for each in explored}
    gaps: dict[tuple[str, int, int], list[float]] = {}
    for each in explored:
        if plain := re.fullmatch(r"([\d.]+ M, )?(int4|ternary) up, H \d+", each.row):
            base = losses[(plain[1] or "") + SYNCHRONOUS, each.steps, each.seed]
            gaps.setdefault((plain[2], each.steps, each.rounds), []).append(each.loss - base)
    assert len(gaps) >= 9
    for (codec, steps, rounds), found in gaps.items():
        h, upload = steps / rounds, CODECS[codec].figures.up
        assert upload is not None
        expected = plan.diloco_gap(h, rounds) + upload + 0.0010  # of int4 downloads
        near = 0.5 < statistics.mean(found) / expected < 2
        assert near == (not plan.is_extrapolated(h, rounds)), (codec, steps, rounds)
    assert plan.is_extrapolated(1000, 60)
    assert plan.is_extrapolated(100, 1000)


def test_a_recommendation_that_is_extrapolated_says_so():
    slow = replace(WORKLOAD, up=1e6, steps=200_000)
    best, reason = plan.recommend(plan.settings(slow), 0.9)
    assert best.inner_steps > plan.MEASURED_INNER_STEPS[1]
    assert "extrapolated: it was measured with 0.14 to 1.5 M parameters, H from 25 to 500" in reason
    near, reason = plan.recommend(plan.settings(replace(WORKLOAD, up=1e9, steps=5000)), 0.5)
    assert not near.extrapolated
    assert "extrapolated" not in reason


# --- transfers over far and lossy lines -----------------------------------------------------------------------------


WINDOW_BYTES = plan.INITIAL_WINDOW * plan.PACKET_BYTES


def test_on_a_near_line_a_transfer_takes_its_bytes_at_the_rate() -> None:
    assert plan.uplink(8e6, 0.0, 0.0).transfer_s(3e6) == 3
    assert plan.downlink(8e6, 0.001, 0.0).transfer_s(3e6) == pytest.approx(3, abs=0.001)


def test_slow_start_doubles_in_each_round_trip_until_the_line_is_full() -> None:
    """Four connections have 58 kB under way at first, 116 after a round trip, 232, 463: the line carries 250 in one."""
    way = plan.uplink(10e6, 0.2, 0.0)
    first = plan.UP_FIRST * WINDOW_BYTES
    assert way.transfer_s(first) == pytest.approx(first / 1.25e6)
    assert way.transfer_s(3 * first) == pytest.approx(0.2 + 2 * first / 1.25e6)
    assert way.transfer_s(10e6) == pytest.approx(3 * 0.2 + (10e6 - 7 * first) / 1.25e6)


def test_losses_bound_a_connection_and_many_add_up() -> None:
    one = plan.PACKET_BYTES / 0.15 * (1.5 / 0.005) ** 0.5  # bytes per second
    way = plan.uplink(1e9, 0.15, 0.005)
    assert way.connection_bytes_per_s == pytest.approx(one)
    assert way.bytes_per_s == pytest.approx(32 * one)
    assert plan.uplink(10e6, 0.15, 0.005).bytes_per_s == 1.25e6
    assert plan.uplink(10e6, 0.15, 0.005).last_part_s(1 << 18) == pytest.approx((1 << 18) * (1 / one - 1 / 1.25e6))
    assert plan.uplink(10e6, 0.15, 0.0).last_part_s(1 << 18) == 0


def test_the_figures_are_those_of_the_worker() -> None:
    assert (line.FAR_S, line.UP_FAR, line.UP[1]) == (plan.FAR_S, plan.UP_FIRST, plan.UP_MOST)
    assert line.DOWN_FAR // line.DOWN[0] == plan.DOWN_EACH
    assert (line.UP_FAR_BYTES[1], line.DOWN_FAR_BYTES[1]) == (plan.UP_PART_BYTES, plan.DOWN_PART_BYTES)


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_prints_a_row_per_pair_and_one_recommendation():
    code, out, err = outerstep(*COMMAND)
    assert code == 0, err
    pairs = list(plan.sync_costs(WORKLOAD))
    lines = out.splitlines()
    assert [tuple(line.split()[:2]) for line in lines[1 : 1 + len(pairs)]] == [
        (each.upload_codec, each.download_codec) for each in pairs
    ]
    assert sum(line.startswith("Recommended: ") for line in lines) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--up", "10"], "--up: '10' is not a rate in bits per second"),
        (["--latency", "soon"], "--latency: 'soon' is not a time"),
        (["--step-time", "0"], "--step-time: '0' is too small"),
        (["--params", "0"], "--params: '0' is too small"),
    ],
)
def test_what_cannot_be_meant_is_told_with_its_flag(arguments: list[str], said: str):
    code, _, err = outerstep(*COMMAND, *arguments)
    assert (code, said in err) == (2, True), err
