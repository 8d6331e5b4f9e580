"""The systems' reports on their syncs as rows, a table and a JSON document. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from benchmarks.sync import round_seconds

# An average with one byte per value has an error of 1 to 4 %; a result with more than this is not the mean.
WRONG_MEAN = 0.1


@dataclass(frozen=True)
class Row:
    """A row of one system. `sync_s` is a median of `syncs`, bytes are per worker and sync; `remark` explains a gap."""

    system: str
    parameters: int
    sync_s: float | None = None
    syncs: int = 0
    upload_bytes: int | None = None
    download_bytes: int | None = None
    relative_error: float | None = None
    remark: str = ""


def own_rows(report: dict[str, Any], rounds: int) -> list[Row]:
    """Return Outerstep's and gloo's rows, from one entry of `rounds` in the output of `benchmarks/sync.py --json`."""
    size, moved = report["parameters"], report["allreduce_bytes"]
    outerstep = (report["sync_s"], rounds, report["upload_bytes"], report["download_bytes"], report["relative_error"])
    return [
        Row("Outerstep int8", size, *outerstep, "durable, authenticated, outer step included"),
        Row(
            "gloo fp32",
            size,
            report["gloo_fp32_s"],
            rounds,
            moved,
            moved,
            None,
            "bytes as a ring's; error: see Outerstep",
        ),
    ]


def peer_row(name: str, parameters: int, workers: int, report: dict[str, Any], own_loopback: bool) -> Row:
    """Return a peer's row, from the report that its script prints, without the warm-up:

    `version`; `spans`: start and end of each sync in seconds, per worker; `loopback_bytes` per sync, of all workers
    (and only of them if `own_loopback`); `relative_error` of the mean; `before`, if something precedes a sync: `what`
    it is and its `spans`; `payload_bytes` of a worker each way, if they take several hops through `lo`. With one hop,
    each byte is one worker's upload and another's download.
    """
    system, error = f"{name} {report['version']}", report["relative_error"]
    if not error <= WRONG_MEAN:
        return missing_row(system, parameters, f"not the mean: its relative error is {error:.2g}")
    remarks = []
    if "before" in report:
        before = statistics.median(round_seconds(report["before"]["spans"]))
        remarks.append(f"{before:.2f} s of {report['before']['what']} before it, not counted")
    moved = round(statistics.median(report["loopback_bytes"]) / workers) if own_loopback else None
    payload = report.get("payload_bytes", moved)
    if moved is not None and payload != moved:
        remarks.append(f"{moved / 1e6:.0f} MB through lo per worker, all hops")
    seconds = round_seconds(report["spans"])
    sync_s = round(statistics.median(seconds), 4)
    return Row(system, parameters, sync_s, len(seconds), payload, payload, error, "; ".join(remarks))


def missing_row(system: str, parameters: int, reason: str) -> Row:
    """Return the row of a system that could not be measured."""
    return Row(system, parameters, remark=f"not measured: {reason}")


def compared(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows, each with the ratios of its sync's time to Outerstep's and to gloo's."""
    outerstep_s, gloo_s = rows[0].sync_s, rows[1].sync_s
    return [
        asdict(row) | {"times_outerstep": _ratio(row.sync_s, outerstep_s), "times_gloo": _ratio(row.sync_s, gloo_s)}
        for row in rows
    ]


def _ratio(seconds: float | None, others: float | None) -> float | None:
    return None if seconds is None or others is None else round(seconds / others, 3)


def table(systems: Sequence[dict[str, Any]], title: str) -> Table:
    """Return a table of what `compared` returns, with a dash for each missing figure."""
    columns = ["system", "parameters", "sync s", "n", "× Outerstep", "× gloo", "MB up", "MB down", "error", "remark"]
    filled = Table(*columns, title=title)
    for each in systems:
        filled.add_row(
            each["system"],
            f"{each['parameters']:,}",
            _figure(each["sync_s"], "{:.3f}"),
            str(each["syncs"]),
            _figure(each["times_outerstep"], "{:.2f}"),
            _figure(each["times_gloo"], "{:.2f}"),
            _figure(each["upload_bytes"], "{:.1f}", 1e6),
            _figure(each["download_bytes"], "{:.1f}", 1e6),
            _figure(each["relative_error"], "{:.4f}"),
            each["remark"],
        )
    return filled


def _figure(value: float | None, form: str, unit: float = 1) -> str:
    return "–" if value is None else form.format(value / unit)
