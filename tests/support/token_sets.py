"""Token sets for tests, written shard by shard: ids that are all different, so that a wrong one is seen."""

from pathlib import Path

import numpy as np
from blake3 import blake3

from worker.data.tokens.index import FILE, Index, Shard


def write_token_set(directory: Path, *, shards: int, tokens: int, held_out: int = 1, vocabulary: int = 65_536) -> Index:
    """Write a set whose shards have `tokens` ids each; return its index."""
    directory.mkdir(parents=True)

    def write(name: str, number: int) -> Shard:
        ids = ((np.arange(tokens) + number * tokens) % vocabulary).astype("<u2")
        (directory / name).write_bytes(ids.tobytes())
        return Shard(file=name, tokens=tokens, digest=blake3(ids.tobytes()).hexdigest(), documents=1, bytes=tokens * 3)

    index = Index(
        dtype="uint16",
        vocabulary=vocabulary,
        tokenizer=None,
        tokenizer_digest=None,
        end=None,
        source="counted",
        training=[write(f"train-{number}.bin", number) for number in range(shards)],
        held_out=[write(f"held-out-{number}.bin", shards + number) for number in range(held_out)],
    )
    (directory / FILE).write_text(index.text())
    return index
