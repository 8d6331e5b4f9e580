"""The benchmark of long lines: its limits and verdicts, and that it is complete, at sizes that say nothing of speed."""

import json
import os
import sys
from dataclasses import replace

import pytest

from benchmarks.wan import __main__ as wan
from benchmarks.wan.__main__ import QUICK_PART
from benchmarks.wan.changing import CHANGES, Change
from benchmarks.wan.rows import ROWS, chosen, missed
from harness import lines
from harness.lines import NO_LINES_EXIT, Shape
from tests.support.python import python


def test_the_limit_is_the_slower_ways_bytes_with_their_heads() -> None:
    a = ROWS["A"]
    assert a.limit_s(1_448_000, 0) == pytest.approx(1_538_000 * 8 / 10e6)
    assert a.limit_s(1_448_000, 14_480_000) == pytest.approx(15_380_000 * 8 / 100e6)
    assert a.limit_s(1_448_000, 28_960_000) == pytest.approx(30_760_000 * 8 / 100e6)


def test_a_queue_holds_a_round_trip_or_100_ms() -> None:
    assert Shape(10, 100, 0.04).queue_bytes(10) == 125_000
    assert Shape(10, 100, 0.15).queue_bytes(10) == 187_500
    assert Shape(500, 500, 0.2).queue_bytes(500) == 12_500_000


def test_a_verdict_says_what_is_missing() -> None:
    a, b, f = ROWS["A"], ROWS["B"], ROWS["F"]
    assert missed(a, 1.08 * 6 + 4 * 0.04, 6.0, 50.0) == []
    assert missed(a, 7.0, 6.0, 40.0) == ["7.00 s > 6.64", "gloo 5.7 × < 6 ×"]
    assert missed(b, 1.0, 1.0, 14.9) == ["gloo 14.9 × < 15 ×"]
    assert missed(f, 3.0, 0.4, None) == []
    assert missed(f, 3.1, 0.4, None) == ["3.10 s > 3.00"]


def test_rows_are_chosen_by_name() -> None:
    assert chosen("C,A", ["A", "B", "C"]) == ["A", "C"]
    assert chosen("", ["A"]) == []
    with pytest.raises(ValueError, match="Z: .* A, B"):
        chosen("A,Z", ["A", "B"])


def test_the_floor_of_a_line_that_changes() -> None:
    assert Change("", 0.25, 600.0, rate=0.5).floor_s(8.0) == 2 + 12
    assert Change("", 0.25, 4.0, rate=0.5).floor_s(8.0) == 2 + 4 + 4
    assert Change("", 0.25, 30.0, loss=1.0).floor_s(8.0) == 38
    assert Change("", 0.5, 60.0, loss=0.05).floor_s(8.0) == pytest.approx(4 + 4 / 0.95)


def test_without_lines_it_says_so_and_ends_with_a_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["command"])
    assert wan.main() == NO_LINES_EXIT
    assert capsys.readouterr() == ("", "Slow lines are not available on this machine: not root.\n")


@pytest.mark.nightly
def test_rows_are_measured() -> None:
    if reason := lines.why_not("openssl"):
        pytest.skip(f"no slow lines to measure: {reason}")
    done = python("-m", "benchmarks.wan", "--quick", "--json", "--rows", "A-tls,B,train,changes")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert [sync["row"] for sync in report["syncs"]] == ["A-tls", "B"]
    for sync in report["syncs"]:
        assert sync["parameters"] == 400_000
        row = replace(ROWS[sync["row"]], parameters=400_000)
        payload, wire = sync["payload_bytes"], sync["wire_bytes"]
        for way in ("up", "down"):
            assert wire[way] > payload[way] > 400_000 / 8  # more than a bit per parameter
        assert sync["limit_s"] == pytest.approx(row.limit_s(payload["up"], payload["down"]))
        # Nothing is faster than the line, and nothing arrives without a round trip.
        assert min(sync["sync_s"]) > sync["limit_s"] * 0.99
        assert sync["plain_s"]["up"] > payload["up"] * 8 / 10e6 + 0.04
        assert sync["plain_s"]["down"] > payload["down"] * 8 / 100e6 + 0.04
        assert sync["gloo_s"] > 2 * 3 / 4 * 4 * 400_000 * 8 / 10e6
        assert sync["worst_s"] == max(sync["sync_s"]) >= sync["median_s"]
        assert sync["ratio"] == pytest.approx(sync["median_s"] / sync["limit_s"])
        assert sync["row"] in done.stdout
    assert [training["kind"] for training in report["training"]] == ["classic", "overlap", "never"]
    assert all(0 < training["share_in_steps"] < 1 for training in report["training"])
    assert [each["change"] for each in report["changes"]] == [change.name for change in CHANGES]
    for each in report["changes"]:
        for way in ("up", "down"):  # what had arrived was not sent again
            assert 0 <= each["repeated_bytes"][way] < each["payload_bytes"][way]
    gone = report["changes"][-1]
    assert gone["sync_s"] > 30 / QUICK_PART
