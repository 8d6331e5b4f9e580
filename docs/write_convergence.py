"""Write docs/convergence.md and its plots from docs/{convergence,frontier}.jsonl, which `python -m
benchmarks.convergence` and `python -m benchmarks.frontier` write.

Run `python -m docs.write_convergence` in the repository. The plots need matplotlib (extra `dev`).

A test fails while the page is not what this writes.
"""

import itertools
import math
import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.convergence.completion import KINDS
from benchmarks.convergence.results import RESULTS, Result, read
from benchmarks.convergence.rows import BATCH, GROUPS, LENGTH, ROWS, STEPS, WORKERS
from benchmarks.convergence.table import HEADINGS, PARAMETERS, cells_of
from benchmarks.frontier import measuring as frontier
from benchmarks.frontier.beyond_loss import CONTINUED_STEPS
from benchmarks.frontier.rows import BASE as USUAL
from benchmarks.frontier.rows import ROWS as FRONTIER_ROWS
from benchmarks.frontier.rows import Row
from outerstep.plan import allreduce_bytes
from protocol.codecs import CODECS
from protocol.spec.run import parse_spec

WIDTH = 120  # columns
DOCS = Path(__file__).parent
PAGE = DOCS / "convergence.md"
PLOTS = {"tokens": DOCS / "convergence-tokens.svg", "bytes": DOCS / "convergence-bytes.svg"}
FRONTIER_PLOT = DOCS / "convergence-frontier.svg"
PLOTTED = ("one worker, rate 0.008", "synchronous, rate 0.008", "DiLoCo", "Muon", "H 20", "H 100", "H 500")

COMPARED = (*PLOTTED[:3], "DiLoCo, ternary up", "synchronous, Muon", "Muon", "Muon, 2bit", "Muon, H 75, 2bit")
BY_KIND = (
    "Equal loss may hide worse skill (arXiv 2511.13761): completed lines, and bits per byte of 128 KiB of held-out "
    "source code, by the kind of byte."
)

HEAD = """\
# Convergence

How much perplexity DiLoCo costs compared with synchronous training, and how many bytes it saves.
`docs/write_convergence.py` generates this page from the results committed beside it. Unless stated otherwise, the model
is `tiny` (139,584 parameters), trained on the source code of Python's standard library by 8 workers, each with 8
sequences of 64 bytes per step. To measure your own run, see [models.md](models.md#compare). [log.md](log.md) has the
experiments behind these settings, including those that failed.
"""

FRONTIER = """\
## What a saving of bytes costs

How far the perplexity per byte, and the loss, end above synchronous training with the same inner optimizer (Muon),
seed, tokens and schedule. Bytes are everything that a worker sends and receives, relative to a ring all-reduce of fp32
gradients at every step. The best setting for each saving, of those with three seeds if there are any:
"""

EVERY_SETTING = """\
All settings, the poor ones too. *Loop* rows are by `python -m benchmarks.frontier`, plain torch in one process with the
product's codecs; *product* rows, the filled points, are real runs. Each row is the mean over its *seeds*, each compared
with the synchronous run of the same seed; *by seed* has the lowest and the highest. Two runs that differ only in
rounding can differ by 0.5 %, so differences below 1 % between rows with one seed mean little. *Mean of 8* compares the
means of the last eight states: averaging helps synchronous training more than DiLoCo, whose outer momentum averages
already.
"""

AGREEMENT = """\
### The loop and the product

The same training, held-out loss in nats per byte. Rounding, and which worker gets which text, alone make runs differ by
up to 0.005. A page of torch and transformers that shares nothing with our code but the reader of the text
(`benchmarks/frontier/bare` of commit 080c9a5e) agrees with the loop as closely.
"""

CLAIMED = """\
### What others report

Published figures, not reproduced here; models, data and the way to count bytes differ. Their perplexity is per token of
about four bytes, so its percentages are about four times those per byte: compare the loss. The triangles at the lower
edge of the plot are less than 0.3 % above synchronous training, or below it.
"""

SIZED = """\
## Does it cost larger models less?

Rows of the loop with int4 both ways and H = 50, next to synchronous training with the same seed. Both use Muon, with a
learning rate of 8e-3 at a width of 64 and inversely proportional to the width. Longer runs have more rounds, as they
would in practice. The text has 12 MB, so larger models read it several times.
"""

BEYOND = """\
## Beyond loss, and training on

The share of held-out lines whose last 8 bytes the loop's models complete, and bits per byte by kind. Then each model is
trained on alone, in {steps} synchronous steps on C++ headers: the loss on them before and after, *learned*, and on
Python afterwards, *kept*. DiLoCo's models learn as fast as synchronous ones and forget more of the old text: a little
with 0.14 M parameters, clearly with 1.5 M. They complete fewer lines than their loss suggests, and are worst in
comments, where sentences such as licences repeat, which synchronous training memorises better.
"""

LIMITS = """\
## Limits

- The model is small, and the text is one kind of text. Others found the gap to shrink with size (arXiv 2503.09799, in
  the table above) or to remain in skills (arXiv 2511.13761).
- Rows with one seed are known to about 0.6 % of perplexity, those with three to about 0.3 %.
- Learning rates are tuned for synchronous training and used for both.
- All workers are equally fast and see the same kind of text.
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
- **bytes**: as above, each way 2·(7/8)·4 bytes per parameter and step for the all-reduce.
- **lines**: the share of held-out lines of code whose last 8 bytes the model completes exactly.
- **replicas**: whether all workers ended with identical bits.
"""


@dataclass(frozen=True)
class Claim:
    """What a report says: `factor` times fewer bytes, and the perplexity or the loss in nats of it and of synchronous
    training."""

    who: str
    source: str
    setting: str
    factor: float
    perplexity: tuple[float, float]

    @classmethod
    def of_losses(cls, who: str, source: str, setting: str, factor: float, losses: tuple[float, float]) -> "Claim":
        return cls(who, source, setting, factor, (math.exp(losses[0]), math.exp(losses[1])))

    @property
    def loss_above(self) -> float:
        own, synchronous = map(math.log, self.perplexity)
        return own / synchronous - 1

    def cells(self) -> list[str]:
        above = self.perplexity[0] / self.perplexity[1] - 1
        return [
            self.who,
            self.source,
            self.setting,
            f"1/{self.factor:,.0f}",
            f"{above:+.1%}",
            f"{self.loss_above:+.1%}",
        ]


_SCALING = "8 workers, H 30, AdamW, 20 tokens per parameter"
CLAIMS = [
    Claim("DiLoCo", "arXiv 2311.08105, table 2", "150 M, 8 workers, H 500, from a trained model", 500, (15.02, 15.30)),
    Claim("OpenDiLoCo", "arXiv 2407.07852, by a summary of it", "150 M, 8 workers, H 500", 500, (13.73, 13.68)),
    Claim.of_losses("DisTrO", "preliminary report, table 3", "1.2 B, 32 GPUs, every step", 857, (2.373, 2.449)),
    *(
        Claim.of_losses("DiLoCo", "arXiv 2503.09799, table 4", f"{size}, {_SCALING}", 30, losses)
        for size, losses in (
            ("35 M", (3.621, 3.485)),
            ("180 M", (3.019, 2.950)),
            ("550 M", (2.698, 2.653)),
            ("2.4 B", (2.351, 2.326)),
        )
    ),
]


def page(results: Sequence[Result], explored: Sequence[frontier.Result]) -> str:
    found = points(results, explored)
    parts = [
        HEAD,
        FRONTIER,
        _markdown(BEST_HEADINGS, list(_best(found))),
        _filled(_targets(found)) + "\n",
        EVERY_SETTING,
    ]
    parts.append(f"![loss above synchronous training by bytes saved]({FRONTIER_PLOT.name})\n")
    parts.append(_markdown(FRONTIER_HEADINGS, [each.cells() for each in found]))
    claims = _markdown(("who", "source", "setting", "bytes", "perplexity", "loss"), [each.cells() for each in CLAIMS])
    parts += [AGREEMENT, _markdown(AGREEMENT_HEADINGS, list(_agreement(results, explored)))]
    parts += [CLAIMED, claims]
    sizes = list(_by_size(explored))
    if len({cells[0] for cells in sizes}) > 1:
        parts += [SIZED, _markdown(SIZE_HEADINGS, sizes)]
    if beyond := list(_beyond(explored)):
        parts += [BEYOND.format(steps=CONTINUED_STEPS), _markdown(BEYOND_HEADINGS, beyond)]
    parts.append(TABLES)
    usual = [each for each in results if each.steps == STEPS]
    cells = {each[0]: each for each in cells_of(usual)}
    for title, (names, text) in GROUPS.items():
        rows = [cells[name] for name in names if name in cells]
        if len(rows) < 2:  # nothing to compare yet
            continue
        parts.append(f"## {title}\n\n{_filled(text)}\n")
        parts.append(_markdown(HEADINGS, rows))
    parts.append(f"## More than loss\n\n{_filled(BY_KIND)}\n")
    parts.append(_markdown(("row", "lines", *KINDS), _by_kind(usual)))
    parts += [f"![held-out loss by {by}]({path.name})\n" for by, path in PLOTS.items()]
    parts.append(LIMITS)
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


FRONTIER_HEADINGS = ("row", "where", "seeds", "steps", "rounds", "bytes", "perplexity", "by seed", "mean of 8", "loss")
FRONTIER_STEPS = (STEPS, 4 * STEPS)
MUON = "synchronous, Muon"  # the product's row that is the base of the frontier
TARGETS = [(800, 0.01), (2_000, 0.02), (10_000, 0.05)]  # times fewer bytes, and the most perplexity above


@dataclass(frozen=True)
class Point:
    """One setting on the frontier: `factor` times fewer bytes than all-reduce, and the shares by which the perplexity,
    seed by seed, and the loss are above those of synchronous training; `averaged`: the perplexity of the means of the
    last states, None if unknown."""

    name: str
    is_product: bool
    upload: str
    steps: int
    rounds: int
    factor: float
    each_above: tuple[float, ...]
    averaged: float | None
    loss_above: float

    @property
    def seeds(self) -> int:
        return len(self.each_above)

    @property
    def above(self) -> float:
        return statistics.mean(self.each_above)

    def cells(self) -> list[str]:
        averaged = "–" if self.averaged is None else f"{self.averaged:+.1%}"
        where = "product" if self.is_product else "loop"
        counts = [str(self.seeds), f"{self.steps:,}", str(self.rounds), f"1/{self.factor:,.0f}"]
        of_seeds = f"{min(self.each_above):+.1%} to {max(self.each_above):+.1%}" if self.seeds > 1 else "–"
        return [self.name, where, *counts, f"{self.above:+.1%}", of_seeds, averaged, f"{self.loss_above:+.1%}"]


def points(results: Sequence[Result], explored: Sequence[frontier.Result]) -> list[Point]:
    """Return all measured points, means over the seeds, the fewest bytes saved first."""
    found = [*_explored(explored), *_of_product(results)]
    return sorted(found, key=lambda each: each.factor)


ABOUT = 0.97  # of a factor: 1,960 times fewer bytes are about 2,000 times fewer
SURE = 3  # seeds: the best of many rows with one seed is luck
BEST_HEADINGS = ("times fewer bytes, about", *(f"{steps:,} steps" for steps in FRONTIER_STEPS))


def _best(found: Sequence[Point]) -> Iterator[list[str]]:
    """Yield what each saving of bytes costs at least, in runs of each length."""
    for factor in (500, 1_000, 2_000, 5_000, 10_000):
        cells = [f"{factor:,}"]
        for steps in FRONTIER_STEPS:
            enough = [each for each in found if each.steps == steps and each.factor >= ABOUT * factor]
            surest = [each for each in enough if each.seeds >= SURE] or enough
            best = min(surest, key=lambda each: each.above)
            cells.append(f"{best.above:+.1%}: {best.name}, 1/{best.factor:,.0f}")
        yield cells


def _targets(found: Sequence[Point]) -> str:
    """Return what was aimed at, and which rows reach it."""
    parts = []
    for factor, above in TARGETS:
        reached = [
            each for each in found if each.seeds >= SURE and each.factor >= ABOUT * factor and each.above <= above
        ]
        best = min(reached, key=lambda each: each.above, default=None)
        aim = f"{above:+.0%} at about {factor:,} times fewer bytes"
        if best is None:
            parts.append(f"{aim}: not reached.")
            continue
        averaged = "" if best.averaged is None else f", or {best.averaged:+.1%} by the mean of 8"
        parts.append(f"{aim}: reached by {best.name}, with {best.above:+.1%} over {best.steps:,} steps{averaged}.")
    return " ".join(["Our targets are the crosses in the plot; only rows of three seeds count.", *parts])


def _groups(explored: Sequence[frontier.Result]) -> Iterator[tuple[Row, list[frontier.Result], list[frontier.Result]]]:
    """Yield each row with its results, one per seed, and those of the synchronous row that it is compared with, itself
    if it is that one."""
    known = [each for each in explored if each.row in FRONTIER_ROWS]
    known = [each for each in known if each.key == frontier.key_of(FRONTIER_ROWS[each.row], each.steps, each.seed)]
    by_key = {each.key: each for each in known}
    groups: dict[tuple[str, int], list[tuple[frontier.Result, frontier.Result]]] = {}
    for each in known:
        base = by_key.get(frontier.key_of(FRONTIER_ROWS[each.row].base, each.steps, each.seed))
        if base is not None:
            groups.setdefault((each.row, each.steps), []).append((each, base))
    for (name, _), pairs in groups.items():
        yield FRONTIER_ROWS[name], [own for own, _ in pairs], [base for _, base in pairs]


def _explored(explored: Sequence[frontier.Result]) -> Iterator[Point]:
    for row, own, base in _groups(explored):
        first = own[0]
        if row.synchronous or row.width != USUAL.width or first.steps not in FRONTIER_STEPS:
            continue
        above = tuple(math.expm1(a.loss - b.loss) for a, b in zip(own, base, strict=True))
        averaged = [math.expm1(a.mean_loss - b.mean_loss) for a, b in zip(own, base, strict=True)]
        factor = statistics.mean(each.factor or 0.0 for each in own)
        loss_above = [a.loss / b.loss - 1 for a, b in zip(own, base, strict=True)]
        means = statistics.mean(averaged), statistics.mean(loss_above)
        yield Point(first.row, False, row.upload, first.steps, first.rounds, factor, above, *means)


# A row of the loop -> the same as a row of the product.
SAME = {
    "synchronous": "synchronous, Muon",
    "int4 up, H 50": "Muon",
    "ternary up, H 50": "Muon, ternary up",
    "ternary up, H 100": "Muon, H 100, ternary up",
    "2bit both ways, H 50": "Muon, 2bit",
}


AGREEMENT_HEADINGS = ("setting", "steps", "seed", "loop", "product")


def _agreement(results: Sequence[Result], explored: Sequence[frontier.Result]) -> Iterator[list[str]]:
    """Yield the settings that both have trained."""
    products = {(each.row, each.steps, each.seed): each.loss for each in results}
    for each in explored:
        product = products.get((SAME.get(each.row, ""), each.steps, each.seed))
        if product is not None:
            yield [each.row, f"{each.steps:,}", str(each.seed), f"{each.loss:.4f}", f"{product:.4f}"]


SIZE_HEADINGS = ("parameters", "steps", "tokens per parameter", "rounds", "synchronous", "DiLoCo", "above", "mean of 8")


def _by_size(explored: Sequence[frontier.Result]) -> Iterator[list[str]]:
    """Yield the rows of the table of sizes, the smallest first."""
    found = []
    for row, own, base in _groups(explored):
        if replace(row, width=USUAL.width, layers=USUAL.layers, learning_rate=USUAL.learning_rate) != USUAL:
            continue
        mine, theirs = statistics.mean(each.loss for each in own), statistics.mean(each.loss for each in base)
        averaged = statistics.mean(each.mean_loss for each in own), statistics.mean(each.mean_loss for each in base)
        parameters, first = row.parameters, own[0]
        each_parameter = first.steps * WORKERS * BATCH * LENGTH / parameters
        cells = [f"{parameters:,}", f"{first.steps:,}", f"{each_parameter:.0f}", str(first.rounds)]
        cells += [f"{theirs:.4f}", f"{mine:.4f}", f"{math.expm1(mine - theirs):+.1%}"]
        found.append((parameters, first.steps, [*cells, f"{math.expm1(averaged[0] - averaged[1]):+.1%}"]))
    yield from (cells for *_, cells in sorted(found))


BEYOND_HEADINGS = ("row", "seeds", "steps", "lines", *KINDS, "C++ before", "learned", "kept")


def _beyond(explored: Sequence[frontier.Result]) -> Iterator[list[str]]:
    groups = sorted(_groups(explored), key=lambda group: (group[0].width, group[1][0].steps, group[1][0].factor or 0.0))
    for _, own, _ in groups:
        found = [each.beyond for each in own if each.beyond is not None]
        if not found:
            continue
        kinds = [f"{statistics.mean(each.by_kind[kind] for each in found):.3f}" for kind in KINDS]
        losses = zip(*((each.other, each.learned, each.kept) for each in found), strict=True)
        means = [f"{statistics.mean(each):.4f}" for each in losses]
        lines = statistics.mean(each.lines for each in found)
        yield [own[0].row, str(len(found)), f"{own[0].steps:,}", f"{lines:.1%}", *kinds, *means]


def _of_product(results: Sequence[Result]) -> Iterator[Point]:
    bases = {(each.steps, each.seed): each.loss for each in results if each.row == MUON}
    for (name, row), steps in itertools.product(ROWS.items(), FRONTIER_STEPS):
        own = [each for each in results if each.row == name and each.steps == steps and (steps, each.seed) in bases]
        if row.synchronous or row.workers != WORKERS or row.keys.get("inner.optimizer") != "muon" or not own:
            continue
        moved = statistics.mean(each.upload_bytes + each.download_bytes for each in own)
        sync = parse_spec(row.spec(steps, 0)).sync
        factor = 2 * allreduce_bytes(WORKERS, PARAMETERS, steps) / moved
        above = tuple(math.expm1(each.loss - bases[steps, each.seed]) for each in own)
        loss_above = statistics.mean(each.loss / bases[steps, each.seed] - 1 for each in own)
        yield Point(name, True, sync.upload_codec, steps, sync.rounds, factor, above, None, loss_above)


def _colour(codec: str) -> str:
    return f"C{list(CODECS).index(codec)}"  # of matplotlib's cycle


def plot_frontier(found: Sequence[Point], synchronous: float) -> None:
    """Plot the points, and the targets for this loss of synchronous training."""
    pyplot, ticks = _pyplot(), (0.3, 0.5, 1, 2, 5, 10, 20, 40)
    figure, axes = pyplot.subplots(figsize=(8.4, 4.2))
    for each in found:
        colour, marker = _colour(each.upload), "o" if each.steps <= 3000 else "s"
        fill = colour if each.is_product else "none"
        axes.plot(each.factor, 100 * each.loss_above, marker, markersize=6, color=colour, markerfacecolor=fill)
    for upload in dict.fromkeys(each.upload for each in found):
        axes.plot([], [], "o", color=_colour(upload), label=f"{upload} up")
    axes.plot([], [], "o", color="black", label="product", markersize=5)
    axes.plot([], [], "o", color="black", markerfacecolor="none", label="loop", markersize=5)
    if any(each.steps > 3000 for each in found):
        axes.plot([], [], "s", color="black", markerfacecolor="none", label="12,000 steps", markersize=5)
    lowest = 0.3
    for claim in CLAIMS:
        percent = 100 * claim.loss_above
        axes.plot(claim.factor, max(percent, lowest), "*" if percent > lowest else "v", color="grey", clip_on=False)
    axes.plot([], [], "*", color="grey", label="claimed by others")
    for factor, above in TARGETS:
        axes.plot(factor, 100 * math.log1p(above) / synchronous, "x", color="black")
    axes.plot([], [], "x", color="black", label="our targets")
    axes.set_xlabel("times fewer bytes than all-reduce of fp32 at every step")
    axes.set_ylabel("loss above synchronous training, %")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(lowest, 40)
    axes.set_yticks(ticks, [f"{each:g}" for each in ticks])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
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
    usual = [each for each in found if each.steps == STEPS]
    plot(usual)
    plot_frontier(points(found, explored), statistics.mean(each.loss for each in usual if each.row == MUON))
