"""Write docs/convergence.md and its plots from docs/convergence.jsonl and docs/frontier.jsonl, which `python -m
benchmarks.convergence` and `python -m benchmarks.frontier` write.

Run `python -m docs.write_convergence` in the repository. The plots need matplotlib (extra `dev`).

A test fails while the page is not what this writes.
"""

import math
import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.convergence.completion import KINDS
from benchmarks.convergence.results import RESULTS, Result, read
from benchmarks.convergence.rows import BATCH, GROUPS, LENGTH, ROWS, WORKERS
from benchmarks.convergence.table import HEADINGS, PARAMETERS, cells_of
from benchmarks.frontier import measuring as frontier
from benchmarks.frontier.rows import ROWS as FRONTIER_ROWS
from benchmarks.frontier.rows import SYNCHRONOUS as FRONTIER_BASE
from outerstep.plan import allreduce_bytes
from protocol.codecs import CODECS
from protocol.spec.run import parse_spec

WIDTH = 120  # columns
DOCS = Path(__file__).parent
PAGE = DOCS / "convergence.md"
PLOTS = {"tokens": DOCS / "convergence-tokens.svg", "bytes": DOCS / "convergence-bytes.svg"}
FRONTIER_PLOT = DOCS / "convergence-frontier.svg"
PLOTTED = ("one worker, rate 0.008", "synchronous, rate 0.008", "DiLoCo", "Muon", "H 20", "H 100", "H 500")

COMPARED = (*PLOTTED[:3], "DiLoCo, ternary up", "synchronous, Muon", "Muon")
BY_KIND = (
    "Equal loss may hide worse skill (arXiv 2511.13761). This table has completed lines, as above, and bits per byte "
    "of 128 KiB of held-out source code, by the kind of byte."
)

HEAD = """\
# Convergence

How much perplexity DiLoCo costs against synchronous training, and how many bytes it saves, from the frontier to single
settings. `docs/write_convergence.py` generates this page from results that are committed beside it. All are of one
small model, `tiny` (139,584 parameters), on the source code of Python's standard library, with 8 workers of 8 sequences
of 64 bytes per step. To measure your own run beside its synchronous baseline: [models.md](models.md#compare).
[log.md](log.md) has the experiments that led to the settings here.
"""

FRONTIER = """\
## What a saving of bytes costs

The perplexity above synchronous training with the same inner optimizer (Muon), seed, tokens and schedule. *Loop* rows
are by `python -m benchmarks.frontier`, plain torch in one process with the product's codecs; *product* rows, the filled
points, are real runs, from the tables below. Differences below 0.5 % say nothing: two seeds, or two runs that differ by
rounding alone, differ as much. *Mean of 8* compares the means of the last eight states, for both: averaging helps
synchronous training more than DiLoCo, whose outer momentum averages already. Bytes are everything that a worker sends
and receives, relative to a ring all-reduce of fp32 gradients at every step.
"""

TABLES = """\
## The rows below

Each row is a real run: a coordinator and 8 worker processes, and 3000 inner steps, by `python -m
benchmarks.convergence`. Unless a row says otherwise: H = 50, int4 both ways, AdamW at 8e-3, outer learning rate 1.0 and
momentum 0.8.

- **loss**: held-out loss of the last state in nats per byte, over 65,536 bytes, the mean over **seeds**. Two seeds
  differ by about 0.01, so compare rows with different numbers of seeds by the next two columns.
- **same rate**, **best rate**: perplexity above synchronous training (one worker that does the work of all, batch by
  batch) at the same learning rate, and at the best one measured; compared seed by seed.
- **gap closed**: 0 % is one worker alone, 100 % synchronous training, both at the row's learning rate.
- **bytes**: everything that a worker sends and receives, relative to a ring all-reduce of fp32 gradients at every step,
  2·(7/8)·4 bytes per parameter each way.
- **lines**: the share of held-out lines of code whose last 8 bytes the model completes exactly.
- **replicas**: whether all workers ended with identical bits.
"""


def page(results: Sequence[Result], explored: Sequence[frontier.Result]) -> str:
    parts = [HEAD, FRONTIER, f"![perplexity above synchronous training by bytes saved]({FRONTIER_PLOT.name})\n"]
    parts += [_markdown(FRONTIER_HEADINGS, [each.cells() for each in points(results, explored)]), TABLES]
    cells = {each[0]: each for each in cells_of(results)}
    for title, (names, text) in GROUPS.items():
        rows = [cells[name] for name in names if name in cells]
        if len(rows) < 2:  # nothing to compare yet
            continue
        parts.append(f"## {title}\n\n{_filled(text)}\n")
        parts.append(_markdown(HEADINGS, rows))
    parts.append(f"## More than loss\n\n{_filled(BY_KIND)}\n")
    parts.append(_markdown(("row", "lines", *KINDS), _by_kind(results)))
    parts += [f"![held-out loss by {by}]({path.name})\n" for by, path in PLOTS.items()]
    return "\n".join(parts)


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_on_hyphens=False)


def _by_kind(results: Sequence[Result]) -> list[list[str]]:
    """Return the rows of COMPARED, averaged over seeds: completed lines, and bits per byte of each kind."""
    rows = []
    for name in COMPARED:
        found = [each for each in results if each.row == name]
        if found:
            bits = [statistics.mean(each.by_kind[kind] for each in found) for kind in KINDS]
            lines = statistics.mean(each.lines for each in found)
            rows.append([name, f"{lines:.1%}", *(f"{each:.3f}" for each in bits)])
    return rows


def _markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def tokens(result: Result) -> list[float]:
    """Return the tokens that all workers have trained on, in millions, at each point of the curve."""
    return [step * ROWS[result.row].workers * BATCH * LENGTH / 1e6 for step, _ in result.curve]


def moved(result: Result) -> list[float]:
    """Return the megabytes that one worker has moved, both ways, at each point of the curve."""
    last, all_of_it = result.curve[-1][0], (result.upload_bytes + result.download_bytes) / 1e6
    return [all_of_it * step / last for step, _ in result.curve]


FRONTIER_HEADINGS = ("row", "where", "steps", "rounds", "bytes", "above synchronous", "mean of 8")
MUON = "synchronous, Muon"  # the product's row that is the base of the frontier
TARGETS = [(800, 1.0), (2_000, 2.0), (10_000, 5.0)]  # times fewer bytes, and the most percent


@dataclass(frozen=True)
class Point:
    """One setting on the frontier: `factor` times fewer bytes than all-reduce, and the share by which the perplexity is
    above that of synchronous training; `averaged`: the same of the means of the last states, None if unknown."""

    name: str
    is_product: bool
    upload: str
    steps: int
    rounds: int
    factor: float
    above: float
    averaged: float | None

    def cells(self) -> list[str]:
        averaged = "–" if self.averaged is None else f"{self.averaged:+.1%}"
        where = "product" if self.is_product else "loop"
        counts = [f"{self.steps:,}", str(self.rounds), f"1/{self.factor:,.0f}"]
        return [self.name, where, *counts, f"{self.above:+.1%}", averaged]


def points(results: Sequence[Result], explored: Sequence[frontier.Result]) -> list[Point]:
    """Return all measured points, means over the seeds, the fewest bytes saved first."""
    found = [*_explored(explored), *_of_product(results)]
    return sorted(found, key=lambda each: each.factor)


def _explored(explored: Sequence[frontier.Result]) -> Iterator[Point]:
    bases = {(each.steps, each.seed): each for each in explored if each.row == FRONTIER_BASE}
    groups: dict[tuple[str, int], list[frontier.Result]] = {}
    for each in explored:
        row = FRONTIER_ROWS.get(each.row)
        known = row is not None and each.key == frontier.key_of(row, each.steps, each.seed)
        if known and each.factor is not None and (each.steps, each.seed) in bases:
            groups.setdefault((each.row, each.steps), []).append(each)
    for (name, steps), own in groups.items():
        base = [bases[steps, each.seed] for each in own]
        above = [math.expm1(a.loss - b.loss) for a, b in zip(own, base, strict=True)]
        averaged = [math.expm1(a.mean_loss - b.mean_loss) for a, b in zip(own, base, strict=True)]
        factor = statistics.mean(each.factor or 0.0 for each in own)
        means = statistics.mean(above), statistics.mean(averaged)
        yield Point(name, False, FRONTIER_ROWS[name].upload, steps, own[0].rounds, factor, *means)


def _of_product(results: Sequence[Result]) -> Iterator[Point]:
    bases = {each.seed: each for each in results if each.row == MUON}
    for name, row in ROWS.items():
        own = [each for each in results if each.row == name and each.seed in bases]
        if row.synchronous or row.workers != WORKERS or row.keys.get("inner.optimizer") != "muon" or not own:
            continue
        moved = statistics.mean(each.upload_bytes + each.download_bytes for each in own)
        sync = parse_spec(row.spec(own[0].steps, 0)).sync
        factor = 2 * allreduce_bytes(WORKERS, PARAMETERS, own[0].steps) / moved
        above = statistics.mean(math.expm1(each.loss - bases[each.seed].loss) for each in own)
        yield Point(name, True, sync.upload_codec, own[0].steps, sync.rounds, factor, above, None)


def _colour(codec: str) -> str:
    return f"C{list(CODECS).index(codec)}"  # of matplotlib's cycle


def plot_frontier(found: Sequence[Point]) -> None:
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for each in found:
        colour, marker = _colour(each.upload), "o" if each.steps <= 3000 else "s"
        fill = colour if each.is_product else "none"
        axes.plot(each.factor, 100 * each.above, marker, markersize=6, color=colour, markerfacecolor=fill)
    for upload in dict.fromkeys(each.upload for each in found):
        axes.plot([], [], "o", color=_colour(upload), label=f"{upload} up")
    axes.plot([], [], "o", color="black", label="product", markersize=5)
    axes.plot([], [], "o", color="black", markerfacecolor="none", label="loop", markersize=5)
    if any(each.steps > 3000 for each in found):
        axes.plot([], [], "s", color="black", markerfacecolor="none", label="12,000 steps", markersize=5)
    for factor, percent in TARGETS:
        axes.plot(factor, percent, "x", color="black")
    axes.plot([], [], "x", color="black", label="our targets")
    axes.set_xlabel("times fewer bytes than all-reduce of fp32 at every step")
    axes.set_ylabel("perplexity above synchronous training, %")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(0.5, 60)
    axes.set_yticks([0.5, 1, 2, 5, 10, 20, 50], [f"{each:g}" for each in (0.5, 1, 2, 5, 10, 20, 50)])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    _save(pyplot, figure, FRONTIER_PLOT)


def plot(results: Sequence[Result]) -> None:
    _plot(results, PLOTS["tokens"], tokens, f"million tokens of {WORKERS} workers", logarithmic=False)
    synchronised = [each for each in results if not ROWS[each.row].synchronous]
    _plot(synchronised, PLOTS["bytes"], moved, "megabytes moved by one worker", logarithmic=True)


def _plot(
    results: Sequence[Result], path: Path, across: Callable[[Result], list[float]], label: str, *, logarithmic: bool
) -> None:
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name in PLOTTED:
        of_row = [each for each in results if each.row == name]
        if of_row:
            losses = [
                statistics.mean(points) for points in zip(*([y for _, y in each.curve] for each in of_row), strict=True)
            ]
            axes.plot(across(of_row[0])[1:], losses[1:], label=name)
    axes.set_xlabel(label)
    axes.set_ylabel("held-out loss, nats per byte")
    axes.set_ylim(1.15, 2.2)
    if logarithmic:
        axes.set_xscale("log")
    axes.legend()
    axes.grid(alpha=0.3)
    _save(pyplot, figure, path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "outerstep"
    from matplotlib import pyplot

    return pyplot


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    figure.tight_layout()
    metadata: dict[str, Any] = {"Date": None}
    figure.savefig(path, metadata=metadata)
    pyplot.close(figure)


if __name__ == "__main__":
    found, explored = read(RESULTS), frontier.read(frontier.RESULTS)
    PAGE.write_text(page(found, explored))
    plot(found)
    plot_frontier(points(found, explored))
