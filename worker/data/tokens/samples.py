"""Conversations of a token set as text, to look at what is trained on."""

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from worker.data.tokens.index import Index
from worker.data.tokens.marks import BEGINS, IDS, TRAINED
from worker.data.tokens.preparing import TOKENIZER
from worker.data.tokens.token_files import in_directory
from worker.data.tokens.tokenizer import Ids, load_tokenizer
from worker.errors import DataError


@dataclass(frozen=True)
class Part:
    text: str
    trained: bool


@dataclass(frozen=True)
class Sample:
    """A conversation: where it is, how many tokens it has and how many are trained on, and its text in parts."""

    shard: str
    sequence: int
    tokens: int
    trained: int
    parts: list[Part]


def samples(index: Index, directory: Path, count: int) -> list[Sample]:
    """Return `count` conversations of the training shards of the set in `directory`, evenly spaced: of each sequence
    chosen, the first one. Fewer if there are fewer sequences. Raises DataError, also for a set of text."""
    if index.conversations is None:
        raise DataError(f"{directory} is a token set of text; only conversations can be sampled")
    fast = load_tokenizer(str(directory / TOKENIZER)).fast()
    row = index.row_tokens
    ends = np.cumsum([shard.tokens // row for shard in index.training])
    files = in_directory(index, index.training, directory)
    found = []
    for chosen in np.arange(count) * int(ends[-1]) // count if count < ends[-1] else np.arange(int(ends[-1])):
        shard = int(np.searchsorted(ends, chosen, "right"))
        sequence = int(chosen) - (int(ends[shard - 1]) if shard else 0)
        ids = files.read(np.array([shard]), np.array([sequence * row]), row)[0].astype(np.uint32)
        ids = _first(ids)
        trained = (ids & np.uint32(TRAINED)) != 0
        parts = [
            Part(fast.decode([int(each) & IDS for each, _ in run], skip_special_tokens=False), bool(is_trained))
            for is_trained, run in (
                (key, list(group)) for key, group in groupby(zip(ids, trained, strict=True), key=lambda pair: pair[1])
            )
        ]
        found.append(Sample(index.training[shard].file, sequence, len(ids), int(trained.sum()), parts))
    return found


def _first(ids: Ids) -> Ids:
    """Return the first conversation of a sequence, without what follows its last trained token if nothing else does:
    the padding looks like a part of it."""
    starts = np.flatnonzero(ids & np.uint32(BEGINS))
    if len(starts) > 1:
        return ids[: starts[1]]
    return ids[: np.flatnonzero(ids & np.uint32(TRAINED))[-1] + 1]
