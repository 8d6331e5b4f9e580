"""Text for tests: small files of words, the same for the same seed."""

import random
from pathlib import Path

WORDS = [
    "the",
    "a",
    "worker",
    "round",
    "outer",
    "inner",
    "step",
    "sends",
    "delta",
    "model",
    "trains",
    "on",
    "text",
    "and",
    "waits",
    "for",
    "nobody",
    "else",
]


def write_text(directory: Path, *, seed: int, files: int = 12, words: int = 4000) -> Path:
    directory.mkdir(parents=True)
    for index in range(files):
        draw = random.Random(f"{seed}/{index}")
        (directory / f"{index:02}.txt").write_text(" ".join(draw.choice(WORDS) for _ in range(words)))
    return directory
