"""The measurement of a row, and the file of results: JSON lines, one per row, steps and seed."""

import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import benchmarks.convergence.rows as product
from benchmarks.convergence.results import append, read_fields
from benchmarks.frontier.beyond_loss import BeyondLoss, beyond_loss
from benchmarks.frontier.rows import BASE, ROWS, WORKERS, Row
from benchmarks.frontier.training import Training
from outerstep.plan import allreduce_bytes
from protocol.digest import digest
from protocol.spec.model import ModelSpec
from protocol.spec.run import RunSpec, parse_spec
from worker.codecs import pack_fragment

RESULTS = Path(__file__).parents[2] / "docs" / "frontier.jsonl"
HEADERS_BYTES = 3 * 250  # of the three fragments of a sync
AVERAGED = 8  # states
EVERY = 50  # steps, of synchronous training


@dataclass(frozen=True)
class Result:
    """`loss` and `mean_loss`, that of the mean of the last states: held out, nats per byte. `factor`: bytes of an
    all-reduce at every step / bytes of this run. `key`: digest of what the row is, so that a changed row is run
    again."""

    row: str
    steps: int
    seed: int
    key: str
    loss: float
    mean_loss: float
    rounds: int
    upload_bytes: int
    download_bytes: int
    factor: float | None
    seconds: float
    beyond: BeyondLoss | None = None


def read(path: Path) -> list[Result]:
    """Return the results in `path`; none if it does not exist."""
    return [_result(**fields) for fields in read_fields(path)]


def _result(beyond: dict[str, Any] | None = None, **fields: Any) -> Result:
    return Result(**fields, beyond=None if beyond is None else BeyondLoss(**beyond))


def key_of(row: Row, steps: int, seed: int) -> str:
    values = asdict(row)
    differs = {name: values[name] for name in row.differs()}
    return digest(json.dumps([differs, steps, seed], sort_keys=True).encode()).hex()[:16]


def measure(name: str, steps: int, seed: int, device: str = "cpu") -> Result:
    """Train one row."""
    torch.set_num_threads(1)
    row, began = ROWS[name], time.monotonic()
    spec = _spec(row, steps, seed)
    last: deque[Tensor] = deque(maxlen=AVERAGED)
    up = down = 0
    if row.synchronous:
        training, rounds = Training(spec, 1, torch.device(device)), steps // EVERY
        for _ in range(rounds):
            training.train_synchronously(EVERY, WORKERS)
            last.append(training.theta.clone())
    else:
        training, rounds = Training(spec, WORKERS, torch.device(device)), len(row.rounds(steps))
        for inner_steps in row.rounds(steps):
            first, mean = training.round(inner_steps, row.upload, row.download, row.outer)
            up, down = up + _bytes(first, row.upload), down + _bytes(mean, row.download)
            last.append(training.point())
    moved = up + down
    return Result(
        name,
        steps,
        seed,
        key_of(row, steps, seed),
        round(training.loss(last[-1]), 4),
        round(training.loss(torch.stack(list(last)).mean(0)), 4),
        rounds,
        up,
        down,
        round(2 * allreduce_bytes(WORKERS, len(training.theta), steps) / moved, 1) if moved else None,
        round(time.monotonic() - began, 1),
        beyond_loss(training, last[-1], WORKERS),
    )


def _spec(row: Row, steps: int, seed: int) -> RunSpec:
    """Return the spec of the product's row, as far as training depends on it."""
    keys = {"inner.optimizer": "muon", "inner.learning_rate": row.learning_rate, "sync.inner_steps": steps}
    spec = parse_spec(product.Row(keys=keys).spec(steps, seed))
    if (row.width, row.layers) == (BASE.width, BASE.layers):
        return spec
    return spec.model_copy(update={"model": ModelSpec(config=row.config)})


def _bytes(vector: Tensor, codec: str) -> int:
    return HEADERS_BYTES + sum(len(frame) for frame in pack_fragment(vector, codec, zstd=True))


def results_of(
    names: Sequence[str], steps: int, seeds: Sequence[int], path: Path | None, jobs: int, device: str = "cpu"
) -> Iterator[Result]:
    """Yield the result of each row and seed: from `path` if it is there, otherwise measured and appended."""
    found = {} if path is None else {each.key: each for each in read(path)}
    wanted = [(name, key_of(ROWS[name], steps, seed), seed) for seed in seeds for name in names]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        running = [pool.submit(measure, name, steps, seed, device) for name, key, seed in wanted if key not in found]
        for done in as_completed(running):
            result = done.result()
            print(result, file=sys.stderr, flush=True)
            if path is not None:
                append(path, result)
            found[result.key] = result
    for name, key, _ in wanted:
        yield replace(found[key], row=name)
