"""The results so far: a file of JSON lines, one per row and seed."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.convergence.rows import Row
from protocol.digest import digest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RESULTS = Path(__file__).parents[2] / "docs" / "convergence.jsonl"


@dataclass(frozen=True)
class Result:
    """The result of a row. Losses are held out, nats per byte; bytes are those of one worker's accepted contributions
    and downloaded deltas in total.

    spec        digest of the run spec, so that a changed row is run again
    curve       inner steps, and the loss of the global model after them
    lines       share of held-out lines whose end the model completes
    by_kind     bits per byte, by the kind of source text
    """

    row: str
    seed: int
    steps: int
    spec: str
    loss: float
    curve: list[tuple[int, float]]
    upload_bytes: int
    download_bytes: int
    lines: float
    by_kind: dict[str, float]
    identical: bool
    seconds: float


def spec_digest(row: Row, *, steps: int, seed: int) -> str:
    """Return the digest of a row's run spec.

    It does not cover the code: after a change of the arithmetic the results must be deleted by hand, or they would be
    taken for those of the new code.
    """
    return digest(row.spec(steps, seed).encode()).hex()[:16]


def read(path: Path) -> list[Result]:
    """Return the results in `path`; none if it does not exist."""
    return [Result(**fields) for fields in read_fields(path)]


def read_fields(path: Path) -> list[dict[str, Any]]:
    """Return the fields of each result in a file of JSON lines, of any benchmark; none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, result: "DataclassInstance") -> None:
    """Append a result of any benchmark to a file of JSON lines."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")
