"""Write docs/convergence.md and its plots from docs/convergence.jsonl, which `python -m benchmarks.convergence` writes.

Run `python -m docs.write_convergence` in the repository. The plots need matplotlib (extra `dev`).

A test fails while the page is not what this writes.
"""

import statistics
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.convergence.completion import KINDS
from benchmarks.convergence.results import RESULTS, Result, read
from benchmarks.convergence.rows import BATCH, GROUPS, LENGTH, ROWS, WORKERS
from benchmarks.convergence.table import HEADINGS, cells_of

WIDTH = 120  # columns
DOCS = Path(__file__).parent
PAGE = DOCS / "convergence.md"
PLOTS = {"tokens": DOCS / "convergence-tokens.svg", "bytes": DOCS / "convergence-bytes.svg"}
PLOTTED = ("one worker, rate 0.008", "synchronous, rate 0.008", "DiLoCo", "Muon", "H 20", "H 100", "H 500")

COMPARED = (*PLOTTED[:3], "DiLoCo, ternary up", "synchronous, Muon", "Muon")
BY_KIND = (
    "Equal loss may hide worse skill (arXiv 2511.13761). This table has completed lines, as above, and bits per byte "
    "of 128 KiB of held-out source code, by the kind of byte."
)

HEAD = """\
# Convergence

How much perplexity DiLoCo costs against synchronous training, and how many bytes it saves. `docs/write_convergence.py`
generates this page from the results of `python -m benchmarks.convergence`. Each row is a real run: a coordinator and 8
worker processes, the model `tiny` (139,584 parameters) on the source code of Python's standard library, and 3000 inner
steps of 8 sequences of 64 bytes per worker. Unless a row says otherwise: H = 50, int4 both ways, AdamW at 8e-3, outer
learning rate 1.0 and momentum 0.8. [log.md](log.md) has the experiments that led to these settings.

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


def page(results: Sequence[Result]) -> str:
    parts = [HEAD]
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


def plot(results: Sequence[Result]) -> None:
    _plot(results, PLOTS["tokens"], tokens, f"million tokens of {WORKERS} workers", logarithmic=False)
    synchronised = [each for each in results if not ROWS[each.row].synchronous]
    _plot(synchronised, PLOTS["bytes"], moved, "megabytes moved by one worker", logarithmic=True)


def _plot(
    results: Sequence[Result], path: Path, across: Callable[[Result], list[float]], label: str, *, logarithmic: bool
) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "outerstep"
    from matplotlib import pyplot

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
    figure.tight_layout()
    metadata: dict[str, Any] = {"Date": None}
    figure.savefig(path, metadata=metadata)
    pyplot.close(figure)


if __name__ == "__main__":
    found = read(RESULTS)
    PAGE.write_text(page(found))
    plot(found)
