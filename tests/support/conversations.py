"""Conversations for tests: the answer is a rule about the question."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Message = dict[str, Any]


def conversation(number: int, turns: int = 1) -> list[Message]:
    """A conversation of `turns` questions and answers of different lengths."""
    messages = []
    for turn in range(turns):
        question = f"worker {number} " + "sends " * ((number + turn) % 5 + 1)
        answer = "the delta " * ((number + turn) % 3 + 1)
        messages += [{"role": "user", "content": question.strip()}, {"role": "assistant", "content": answer.strip()}]
    return messages


def write_rows(file: Path, rows: Iterable[Any]) -> Path:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return file


def write_conversations(file: Path, count: int = 60) -> Path:
    return write_rows(file, ({"messages": conversation(number, number % 3 + 1)} for number in range(count)))
