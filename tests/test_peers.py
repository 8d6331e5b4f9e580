"""The comparison with other systems: its arithmetic, and what it says of a peer that cannot be had. None is installed."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks.peers import deltas
from benchmarks.peers.comparison import Row, compared, missing_row, own_rows, peer_row, table
from benchmarks.peers.environments import REQUIREMENTS, Unavailable, run
from tests.support.python import python

PEERS = ["flower", "hivemind", "torchft"]

OWN: dict[str, Any] = {
    "parameters": 1_000_000,
    "sync_s": 0.5,
    "gloo_fp32_s": 0.25,
    "upload_bytes": 1_000_250,
    "download_bytes": 1_000_260,
    "allreduce_bytes": 6_000_000,
    "relative_error": 0.0099,
}
# Two workers, three syncs: from 0 to 2, from 10 to 11, from 20 to 26.
SPANS = [[(0.5, 2.0), (10.0, 10.5), (20.0, 26.0)], [(0.0, 1.5), (10.5, 11.0), (21.0, 22.0)]]
PEER: dict[str, Any] = {
    "version": "1.2",
    "spans": SPANS,
    "loopback_bytes": [14_000_000, 12_000_000, 13_000_000],
    "relative_error": 0.03,
}


def test_a_peer_is_compared_with_both_of_our_own() -> None:
    rows = [*own_rows(OWN, rounds=5), peer_row("peer", 1_000_000, 2, PEER, own_loopback=True)]
    assert rows[2] == Row("peer 1.2", 1_000_000, 2.0, 3, 6_500_000, 6_500_000, 0.03)
    outerstep, gloo, peer = compared(rows)
    assert outerstep.items() >= {"sync_s": 0.5, "syncs": 5, "times_outerstep": 1, "times_gloo": 2}.items()
    assert outerstep.items() >= {"upload_bytes": 1_000_250, "download_bytes": 1_000_260}.items()
    assert gloo.items() >= {"upload_bytes": 6_000_000, "times_outerstep": 0.5, "times_gloo": 1}.items()
    assert peer.items() >= {"times_outerstep": 4, "times_gloo": 8}.items()


@pytest.mark.parametrize(
    ("more", "own_loopback", "expected"),
    [
        # What goes before a sync is told apart.
        (
            {"before": {"what": "matchmaking", "spans": [[(0.0, 1.0), (5.0, 8.0), (15.0, 17.0)]]}},
            True,
            {"sync_s": 2.0, "remark": "2.00 s of matchmaking before it, not counted"},
        ),
        # Hops are not counted as payload.
        (
            {"payload_bytes": 4_000_000},
            True,
            {"upload_bytes": 4_000_000, "remark": "6 MB through lo per worker, all hops"},
        ),
        # Bytes that others share are not told.
        ({}, False, {"upload_bytes": None, "download_bytes": None, "sync_s": 2.0}),
    ],
)
def test_what_a_peer_reports_besides(more: dict[str, Any], own_loopback: bool, expected: dict[str, Any]) -> None:
    row = peer_row("peer", 1_000_000, 2, PEER | more, own_loopback=own_loopback)
    assert asdict(row).items() >= expected.items()


@pytest.mark.parametrize("error", [1.73, float("inf"), float("nan")])
def test_what_is_not_the_mean_has_no_time(error: float) -> None:
    row = peer_row("peer", 1_000_000, 2, PEER | {"relative_error": error}, own_loopback=True)
    assert (row.system, row.sync_s, row.syncs) == ("peer 1.2", None, 0)
    assert row.remark == f"not measured: not the mean: its relative error is {error:.2g}"


def test_a_missing_peer_is_in_table_and_document_with_the_reason() -> None:
    systems = compared([*own_rows(OWN, rounds=5), missing_row("peer", 1_000_000, "not installed: no network")])
    missing = json.loads(json.dumps(systems))[2]
    assert missing["remark"] == "not measured: not installed: no network"
    assert missing["sync_s"] is missing["upload_bytes"] is missing["times_gloo"] is None
    console = Console(width=160)
    with console.capture() as printed:
        console.print(table(systems, "a title"))
    (line,) = [line for line in printed.get().splitlines() if "peer" in line]
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells == ["peer", "1,000,000", *"–0–––––", "not measured: not installed: no network"]


def test_a_script_is_heard_by_its_last_line(tmp_path: Path) -> None:
    code = "import sys; print('talk'); print('noise', file=sys.stderr); print('{\"a\": 1}')"
    assert run([sys.executable, "-c", code], tmp_path / "logs" / "log", 60) == {"a": 1}
    assert (tmp_path / "logs" / "log").read_text() == "noise\n"


def test_a_script_that_fails_or_hangs_is_told_of(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(Unavailable, match=f"failed: LookupError: no such thing; see {log}"):
        run([sys.executable, "-c", "raise LookupError('no such thing')"], log, 60)
    with pytest.raises(Unavailable, match=f"not done after 0 s; see {log}"):
        run(["sleep", "infinity"], log, 0.01)


def test_every_peer_has_a_script_and_pinned_requirements() -> None:
    assert sorted(file.stem for file in REQUIREMENTS.iterdir()) == PEERS
    for peer in PEERS:
        assert (REQUIREMENTS.parent / f"{peer}_peer.py").exists()
        lines = (REQUIREMENTS / f"{peer}.txt").read_text().splitlines()
        assert all("==" in line for line in lines), lines


def test_the_mean_is_of_all_workers() -> None:
    each = [deltas.draw(rank, 1000) for rank in range(3)]
    assert not np.array_equal(each[0], each[1])
    exact = deltas.mean(3, 1000)
    assert exact.dtype == np.float32
    assert deltas.relative_error(exact, np.mean(each, axis=0)) < 1e-6
    assert deltas.relative_error(np.float32(1.5) * exact, exact) == pytest.approx(0.5, rel=1e-5)
    assert deltas.relative_error(exact[:1], exact) == float("inf")


@pytest.mark.nightly
def test_without_a_registry_the_rest_is_measured(tmp_path: Path) -> None:
    """The command itself; pip may look nowhere, so nothing is downloaded."""
    command = ["-m", "benchmarks.peers", "--quick", "--params", "3e5", "--only", "flower", "--json"]
    done = python(*command, XDG_CACHE_HOME=str(tmp_path), PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    outerstep, gloo, flower = report["systems"]
    assert outerstep["sync_s"] > 0 < gloo["sync_s"]
    assert outerstep["times_gloo"] == pytest.approx(outerstep["sync_s"] / gloo["sync_s"], rel=0.01)
    assert (flower["system"], flower["sync_s"]) == ("flower", None)
    assert flower["remark"].startswith("not measured: not installed: ERROR: No matching distribution found for flwr==")
