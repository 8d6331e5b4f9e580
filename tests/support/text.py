"""Text for tests: small files of words, the same for the same seed; and texts that are changed."""

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


def write_chapters(
    directory: Path, *, words: str = "all work and no play", chapters: int = 5, repeats: int = 40
) -> Path:
    """Text of few words, which a model learns within a round."""
    directory.mkdir(exist_ok=True)
    for index in range(chapters):
        (directory / f"{index}.txt").write_text(f"{words}, chapter {index}. " * repeats)
    return directory


def replaced(text: str, changes: dict[str, str]) -> str:
    """The text with each key of `changes`, which must be in it, replaced by its value."""
    for before, after in changes.items():
        assert before in text, before
        text = text.replace(before, after)
    return text
