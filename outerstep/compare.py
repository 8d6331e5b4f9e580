"""Measure models on the same held-out tokens, and compare them: runs, exports and transformers directories. Importing
this module needs torch and transformers.

Two losses depend on the same text, so their difference is known much more precisely than either. Its confidence
interval comes from a paired bootstrap over documents (Koehn, EMNLP 2004; Efron and Tibshirani 1993, chapter 13):
documents are drawn with replacement, the same ones for both models.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers.utils import logging

from outerstep.common.drawing import INK, LINE, QUIET, TRAIN, Drawing
from outerstep.models import check_tokenizer, held_out_data, load_export, loss_of, micro_batches
from protocol.errors import SpecError
from protocol.messages import DataSummary, RunDetail
from protocol.spec.run import RunSpec, parse_spec
from worker.allowing import OF_DATA, OF_MODEL, allowed_by, permit
from worker.data.tokens.tokenizer import FILE, load_tokenizer
from worker.data.training_set import TrainingSet
from worker.errors import DataError, ModelError
from worker.export import load_checkpoint
from worker.inner.loss import Loss
from worker.inner.micro_batch import MicroBatches
from worker.link.client import Client
from worker.settings import BoxSettings
from worker.starting import choose_device

DRAWN = 2000  # bootstrap samples
LEVEL = 0.95
FEW = 20  # documents; with fewer, intervals come with a note

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Contender:
    """A model to measure: checkpoint `state` (None: the latest) of a `run`, or the model in a `directory`."""

    name: str
    run: RunDetail | None = None
    state: int | None = None
    directory: Path | None = None


@dataclass(frozen=True)
class Losses:
    """The held-out losses of one model by document: sums in nats, float64[documents], and the numbers of targets,
    int64[documents]."""

    nats: F64
    targets: I64

    @property
    def mean(self) -> float:
        """Nats per token."""
        return float(self.nats.sum() / self.targets.sum())


@dataclass(frozen=True)
class Difference:
    """The difference of two losses on the same documents, in nats per token, and its confidence interval."""

    nats: float
    low: float
    high: float


@dataclass(frozen=True)
class Measured:
    """The losses of the contenders, in order. `unit`: what the bootstrap draws, "documents", or "sequences" if the data
    set does not record where documents begin. `bytes_per_token`: None if unknown. `notes`: sentences for the reader."""

    losses: list[Losses]
    unit: str
    bytes_per_token: float | None
    notes: list[str]


def measure(
    contenders: Sequence[Contender],
    http: httpx.Client | None,
    token: str,
    box: BoxSettings,
    *,
    average: int = 1,
    report: Callable[[str], object] = lambda name: None,
    ask: Callable[[str], bool] | None = None,
) -> Measured:
    """Measure the held-out losses of all contenders on the data of the first one that names any. `average`: how many
    of a run's last states are averaged before measuring. `report` is called with each contender's name before it is
    measured. `http` is needed for runs. `ask` asks the machine's owner about what a spec names and `box` does not
    allow.

    Raises NotAllowed, DataError, ModelError, ValueError if this machine lacks the device, and what
    `worker.export.load_checkpoint` raises.
    """
    logging.disable_progress_bar()
    device = choose_device(box.device)
    spec, data = _data_of(contenders, box, ask)
    notes = [note for each in contenders if (note := _check_ids(each, spec.data.source, data.summary)) is not None]
    most = spec.evaluation.max_tokens
    known = data.held_out_documents(most)
    documents = list(known or _numbered(data, most))
    found = []
    for each in contenders:
        report(each.name)
        model = _load(each, http, token, box, average, ask)
        loss = loss_of(model, data, spec.data, device)
        batches = zip(data.held_out_batches(most), documents, strict=True)
        found.append(losses(loss, batches, device, micro_batches(spec.data)))
    unit, count = "sequences" if known is None else "documents", len(found[0].targets)
    if known is None and len(found) > 1:
        notes.append(
            "the data set does not record where documents begin, so neighbouring sequences count as independent, and "
            "the intervals are too narrow"
        )
    if count < FEW and len(found) > 1:
        notes.append(f"with only {count} held-out {unit} the intervals are too narrow: compare on more text, by --on")
    return Measured(found, unit, data.bytes_per_token, notes)


def _data_of(
    contenders: Sequence[Contender], box: BoxSettings, ask: Callable[[str], bool] | None
) -> tuple[RunSpec, TrainingSet]:
    for each in contenders:
        if each.run is not None:
            permit(each.run.spec, allowed_by(box), ask, OF_DATA)
            return each.run.spec, held_out_data(each.run.spec, box, f"run {each.run.name}", each.run.data)
    for each in contenders:
        if each.directory is not None and (each.directory / "spec.toml").is_file():
            spec = _spec_in(each.directory)
            permit(spec, allowed_by(box), ask, OF_DATA)
            return spec, held_out_data(spec, box, str(each.directory), None)
    raise DataError(
        "none of these names its held-out text: give also a run, or a directory that `outerstep run export` has written"
    )


def _spec_in(directory: Path) -> RunSpec:
    try:
        return parse_spec((directory / "spec.toml").read_text())
    except (OSError, UnicodeDecodeError, SpecError) as error:
        raise ModelError(f"{directory / 'spec.toml'} cannot be read: {error}") from error


def _check_ids(each: Contender, source: str, ours: DataSummary) -> str | None:
    """Return a note if the contender's tokenizer is unknown. Raises DataError if it is not the data's tokenizer."""
    if each.run is not None and each.run.data is not None and each.run.spec.data.source != "custom":
        check_tokenizer(f"run {each.run.name}", each.run.data, source, ours)
    if each.directory is None:
        return None
    if not (each.directory / FILE).is_file():
        unknown = f"{each.directory} has no {FILE}: it is assumed to use the token ids of {source!r}"
        return None if ours.tokenizer_digest is None else unknown
    own = load_tokenizer(str(each.directory))
    theirs = DataSummary(units=1, tokenizer=own.name, tokenizer_digest=own.digest)
    check_tokenizer(str(each.directory), theirs, source, ours)
    return None


def _load(
    each: Contender,
    http: httpx.Client | None,
    token: str,
    box: BoxSettings,
    average: int,
    ask: Callable[[str], bool] | None,
) -> nn.Module:
    if each.run is None:
        assert each.directory is not None
        return load_export(each.directory, allowed_by(box), box.max_parameters, ask)
    assert http is not None
    allowed = permit(each.run.spec, allowed_by(box), ask, OF_MODEL)
    client = Client(http, each.run.name, token)
    return load_checkpoint(client, each.state, allowed.factories, box.max_parameters, average)


@torch.no_grad()
def losses(
    loss: Loss, batches: Iterable[tuple[torch.Tensor, torch.Tensor]], device: torch.device, sizes: MicroBatches
) -> Losses:
    """Return the losses by document. `batches` yields the tokens, int64[batch, length + 1], and the number of each
    target's document, int64[batch, length]. Raises ModelError if a loss is not finite."""
    loss.model.eval()
    nats, targets = np.zeros(0), np.zeros(0, np.int64)
    for batch, of_targets in batches:
        each = sizes.over(batch.to(device), lambda parts: torch.cat([loss.of_each(part).cpu() for part in parts]))
        numbers = of_targets.flatten().numpy()
        counted = loss.counted(batch).flatten().numpy()
        size = max(len(nats), int(numbers.max()) + 1)
        nats, targets = (np.concatenate([old, np.zeros(size - len(old), old.dtype)]) for old in (nats, targets))
        nats += np.bincount(numbers, each.double().flatten().numpy(), size)
        targets += np.bincount(numbers, counted, size).astype(np.int64)
    if not np.isfinite(nats).all():
        raise ModelError("the held-out loss is not finite: the model's parameters are far too large")
    return Losses(nats[targets > 0], targets[targets > 0])


def _numbered(data: TrainingSet, max_tokens: int) -> Iterator[torch.Tensor]:
    """Yield the number of each target's sequence."""
    seen = 0
    for batch in data.held_out_batches(max_tokens):
        rows, columns = batch.shape
        yield torch.arange(seen, seen + rows)[:, None].expand(rows, columns - 1)
        seen += rows


def difference(ours: Losses, base: Losses) -> Difference:
    """Return how far `ours` is above `base`, which has the same documents. The same losses always give the same
    interval."""
    apart, generator = ours.nats - base.nats, np.random.default_rng(0)
    found = np.empty(DRAWN)
    for index in range(DRAWN):
        drawn = generator.integers(0, len(apart), len(apart))
        found[index] = apart[drawn].sum() / base.targets[drawn].sum()
    low, high = np.quantile(found, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Difference(float(apart.sum() / base.targets.sum()), float(low), float(high))


def perplexity_change(nats: float) -> float:
    """Return the relative increase of the perplexity for a loss that is `nats` higher."""
    return math.expm1(nats)


_LEFT, _WIDTH, _ROW = 260.0, 420.0, 34.0


def plot(names: Sequence[str], differences: Sequence[Difference]) -> str:
    """Return an SVG with each model's difference from the first of `names`, in percent of its perplexity."""
    bounds = [[100 * perplexity_change(value) for value in (each.low, each.nats, each.high)] for each in differences]
    lowest, highest = min(0.0, *(each[0] for each in bounds)), max(0.0, *(each[2] for each in bounds))
    span = max(highest - lowest, 1e-6)
    height = _ROW * (len(names) + 1)
    drawing = Drawing(_LEFT + _WIDTH + 40, height + 24, f"perplexity above {names[0]}, with confidence intervals")

    def at(percent: float) -> float:
        return _LEFT + _WIDTH * (percent - lowest) / span

    drawing.line((at(0), 10), (at(0), height - 14), dashed=True)
    for row, (name, (low, middle, high)) in enumerate(zip(names[1:], bounds, strict=True)):
        y = 14 + _ROW * (row + 0.5)
        drawing.words(_LEFT - 16, y + 5, name, at="end")
        drawing.line((at(low), y), (at(high), y), ink=TRAIN)
        for end in (low, high):
            drawing.line((at(end), y - 5), (at(end), y + 5), ink=TRAIN)
        drawing.box(at(middle) - 4, y - 4, 8, 8, TRAIN)
        drawing.words(at(middle), y - 9, f"{middle:+.2f} %", ink=QUIET, size=11, at="middle")
    drawing.line((_LEFT, height - 14), (_LEFT + _WIDTH, height - 14), ink=LINE)
    for tick in (lowest, highest):
        drawing.words(at(tick), height + 2, f"{tick:+.2f} %", ink=INK, size=11, at="middle")
    drawing.words(_LEFT + _WIDTH / 2, height + 18, f"perplexity above {names[0]}", ink=QUIET, size=11, at="middle")
    return drawing.svg()
