"""What came of the rows so far: a file of JSON lines, one for each row and seed."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.convergence.rows import Row
from protocol.digest import digest

RESULTS = Path(__file__).parents[2] / "docs" / "convergence.jsonl"


@dataclass(frozen=True)
class Result:
    """What came of a row. Losses are held out, nats per byte; bytes are one worker's accepted contributions and the
    deltas that it fetched, in all.

    spec        the digest of what was run, so that a row that is changed is run again
    curve       inner steps, and the loss of the global model after them
    lines       share of held-out lines whose end the model knows
    by_kind     bits per byte by what the byte is in the source
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
    """Return the digest of what is run for a row.

    It says nothing of the code: when the product's arithmetic changes, the results have to be deleted by hand, for they
    would be taken for those of the new code.
    """
    return digest(row.spec(steps, seed).encode()).hex()[:16]


def read(path: Path) -> list[Result]:
    """Return the results in `path`; none if it is not there."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Result(**json.loads(line)) for line in lines]


def append(path: Path, result: Result) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")
