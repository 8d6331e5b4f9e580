"""What a bucket costs, against requests and bytes that were counted by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outerstep import plan
from outerstep.cli import app
from outerstep.plan import Workload
from outerstep.plan_blobs import MONTH_S, Prices, averaging, read_prices, store_cost, store_use
from protocol.errors import OuterstepError

COMMAND = ["plan", "--params", "10M", "--up", "10mbit", "--down", "100mbit", "--step-time", "1.0"]
WORKLOAD = Workload(parameters=10_000_000, up=10e6, down=100e6, step_s=1.0, workers=4, latency_s=0.04, steps=20_000)
SETTING = next(each for each in plan.settings(WORKLOAD) if each.cost.upload_codec == each.cost.download_codec == "int8")
PRICES = Prices(name="test", storage_per_gb_month=0.5, writes_per_1000=2.0, reads_per_1000=0.25, egress_per_gb=0.125)


def test_requests_and_bytes_of_a_round() -> None:
    """10 M parameters are five fragments of 2 M; with int8 each contribution to one has 2 MB, each delta two parts."""
    use, cost = store_use(WORKLOAD, SETTING), SETTING.cost
    assert 1 << 20 < cost.download_bytes / 5 < 2 << 20
    assert use.writes == pytest.approx(5 * 4 + 5 + 0.5 + 0.3), "contributions, deltas, of a checkpoint and its lists"
    assert use.reads == 5 * 4 * (1 + 1 + 1 + 2)
    assert use.egress_bytes == 4 * (cost.upload_bytes + cost.download_bytes)
    assert use.stored_bytes == 40 * cost.upload_bytes + 21 * cost.download_bytes + 3 * 80_000_000


def test_a_month() -> None:
    use, cost = store_use(WORKLOAD, SETTING), store_cost(WORKLOAD, SETTING, PRICES)
    assert cost.rounds == pytest.approx(MONTH_S / (SETTING.inner_steps + SETTING.cost.sync_s))
    assert cost.requests == pytest.approx(cost.rounds * (use.writes * 0.002 + use.reads * 0.00025))
    assert cost.egress == pytest.approx(cost.rounds * use.egress_bytes / 1e9 * 0.125)
    assert cost.storage == pytest.approx(use.stored_bytes / 1e9 * 0.5)
    assert cost.per_round * cost.rounds == pytest.approx(cost.requests + cost.egress + cost.storage)


def test_averaging_takes_as_long_as_was_measured() -> None:
    """Workers, parameters and an aggregator's core-seconds per round: docs/log.md. The constants come from the first
    two."""
    for workers, parameters, measured in ((16, 25e6, 1.59), (64, 25e6, 6.17), (32, 20e6, 2.43), (32, 20e6, 2.55)):
        workload = replace(WORKLOAD, workers=workers, parameters=int(parameters))
        assert averaging(workload, SETTING).core_s == pytest.approx(measured, rel=0.15)


def test_as_many_aggregators_as_make_the_deltas_in_a_twentieth_of_the_round() -> None:
    few, many = (averaging(replace(WORKLOAD, workers=workers), SETTING) for workers in (4, 400_000))
    assert few.aggregators == 1
    within_s = many.core_s / (4 * many.aggregators)
    assert within_s == pytest.approx(0.05 * SETTING.inner_steps * WORKLOAD.step_s, rel=0.1)
    assert few.leader_core_s == 4 * 5 * 0.015


def test_the_table_that_comes_with_it() -> None:
    table = read_prices()
    assert list(table.stores) == ["s3", "r2", "gcs"]
    assert table.stores["r2"].egress_per_gb == 0
    assert len(table.date) == 7


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no date"),
        ("date = ", "cannot be read"),
        ('date = "2026-11"\n[mine]\nname = "x"', "mine.storage_per_gb_month"),
        ('date = "2026-11"\nmine = 3', "mine"),
    ],
)
def test_a_table_that_is_none(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(text)
    with pytest.raises(OuterstepError, match=said):
        read_prices(file)


def planned(*more: str) -> Any:
    return CliRunner().invoke(app, [*COMMAND, *more])


def test_the_command() -> None:
    done = planned("--blobs", "s3")
    assert done.exit_code == 0, done.output
    assert "Amazon S3" in done.output
    document = json.loads(planned("--blobs", "s3", "--format", "json").stdout)["blobs"]
    assert document["prices"]["date"] == read_prices().date
    assert document["month"]["egress"] > 0
    assert document["averaging"]["aggregators"] == 1
    assert "Averaging takes 0.2 s of CPU time per round" in " ".join(done.output.split())
    assert "blobs" not in json.loads(planned("--format", "json").stdout)


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    prices = "\n".join(f"{key} = {json.dumps(value)}" for key, value in PRICES.model_dump().items())
    file.write_text(f'date = "2030-01"\n[mine]\n{prices}\n')
    assert "test (list prices of 2030-01)" in planned("--blobs", "mine", "--prices", str(file)).output


@pytest.mark.parametrize("given", [["--blobs", "floppy"], ["--prices", __file__]])
def test_what_cannot_be_meant(given: list[str]) -> None:
    assert planned(*given).exit_code == 2
