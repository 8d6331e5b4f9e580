"""The table: losses as perplexity above synchronous training, and bytes as a factor below its all-reduce."""

import math
import statistics
from collections.abc import Mapping, Sequence

from rich.table import Table

from benchmarks.convergence.results import Result
from benchmarks.convergence.rows import FEWER, ONE_WORKER, ROWS, SYNCHRONOUS
from outerstep.plan import allreduce_bytes
from protocol.spec.run import parse_spec

PARAMETERS = 139_584  # of the preset tiny
DASH = "–"

HEADINGS = (
    *("row", "seeds", "loss", "same rate", "best rate", "gap closed"),
    *("MB up", "MB down", "bytes", "lines", "replicas"),
)


def table(results: Sequence[Result]) -> Table:
    shown = Table(*HEADINGS, title=f"{results[0].steps if results else 0} inner steps, means over the seeds")
    for cells in cells_of(results):
        shown.add_row(*cells)
    return shown


def cells_of(results: Sequence[Result]) -> list[list[str]]:
    """Return the cells of each row, in the order of ROWS. Perplexity is compared seed by seed."""
    by_row = {name: {each.seed: each for each in results if each.row == name} for name in ROWS}
    losses = {name: {seed: each.loss for seed, each in found.items()} for name, found in by_row.items()}
    best = min(
        (losses[name] for name in SYNCHRONOUS.values() if losses[name]),
        key=lambda found: statistics.mean(found.values()),
        default={},
    )
    return [_cells(name, list(found.values()), losses, best) for name, found in by_row.items() if found]


def _cells(
    name: str, found: Sequence[Result], losses: Mapping[str, Mapping[int, float]], best: Mapping[int, float]
) -> list[str]:
    row = ROWS[name]
    rate = parse_spec(row.spec(found[0].steps, 0)).inner.learning_rate
    is_fewer = row.workers in FEWER
    synchronous = FEWER[row.workers] if is_fewer else SYNCHRONOUS.get(rate, "")
    same, alone = losses.get(synchronous, {}), losses.get(ONE_WORKER.get(rate, ""), {})
    own = losses[name]
    both = [seed for seed in own if seed in alone and seed in same and alone[seed] != same[seed]]
    closed = [(alone[seed] - own[seed]) / (alone[seed] - same[seed]) for seed in both]
    one = found[0]
    moved = one.upload_bytes + one.download_bytes
    factor = 2 * allreduce_bytes(row.workers, PARAMETERS, one.steps) / moved
    dense = row.synchronous or row.workers == 1
    return [
        name,
        str(len(own)),
        f"{statistics.mean(own.values()):.4f}",
        _above(own, same),
        DASH if is_fewer else _above(own, best),
        f"{statistics.mean(closed):.0%}" if closed and not row.synchronous else DASH,
        DASH if dense else f"{one.upload_bytes / 1e6:.2f}",
        DASH if dense else f"{one.download_bytes / 1e6:.2f}",
        DASH if dense else f"1/{factor:,.0f}",
        f"{statistics.mean(each.lines for each in found):.1%}",
        "identical" if all(each.identical for each in found) else "DIFFERENT",
    ]


def _above(own: Mapping[int, float], other: Mapping[int, float]) -> str:
    """Return the relative difference of the perplexities, the mean over the seeds that both have."""
    both = [math.expm1(own[seed] - other[seed]) for seed in own if seed in other]
    return f"{statistics.mean(both):+.1%}" if both else DASH
