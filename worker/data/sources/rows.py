"""What a row of a data set contains: a document, a conversation, or a prompt with its completion.

Rows are objects in JSON lines, and rows of parquet files and hub data sets. The names and types of their members are
those of TRL's dataset formats (https://huggingface.co/docs/trl/dataset_formats), so the same sets can be used:

    text        {"text": "…"}, or another column
    chat        {"messages": [{"role": …, "content": …}, …]}, with or without "tools" and "chat_template_kwargs";
                or {"conversations": [{"from": …, "value": …}, …]}. A message with "weight": 0 is not trained on
    completion  {"prompt": …, "completion": …}, two texts or two lists of messages

Documents and conversations are held out by the digest of their text. So a text that occurs twice is never both trained
on and held out, and neither the tokenizer nor the other documents and their order change which ones are held out.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from worker.data.sources.documents import Piece, pieces
from worker.data.sources.files import draw
from worker.errors import DataError

_MESSAGES = ("messages", "conversations")
_OPTIONS = ("tools", "chat_template_kwargs")
_ROLES = {"human": "user"} | dict.fromkeys(("ai", "bot", "chatbot", "chatgpt", "gpt", "model"), "assistant")
_ROLES |= {role: role for role in ("assistant", "system", "user")}


class RowError(Exception):
    """The row or the file does not contain what it should; the message says what it has instead, and the remedy."""


@dataclass(frozen=True)
class Rows:
    """How the rows of a source are read: the share that is held out, their format, and the column with text."""

    holdout: float
    format: Literal["text", "chat", "completion"] = "text"
    column: str = "text"

    def identity(self) -> list[Any]:
        """Return values that distinguish it from any other."""
        return [self.column if self.format == "text" else self.format, self.holdout]

    def columns(self, names: Sequence[str]) -> list[str]:
        """Return which columns to read of a file that has the columns `names`. Raises RowError."""
        return [*self._needed(names), *(name for name in _OPTIONS if self.format != "text" and name in names)]

    def pieces(self, row: Any, where: str) -> Iterator[Piece]:
        """Yield the text of a row, which `where` names in errors: of a conversation one piece, with it as JSON.

        A row that is no conversation gives a piece with its `fault`: whether it is skipped is decided later. Raises
        DataError if the row has no text.
        """
        try:
            text = self._text(row) if self.format == "text" else self._conversation(row)
            content = text.encode()
        except RowError as error:
            yield self.faulty(str(error), where)
        except UnicodeEncodeError as error:
            yield self.faulty(f"lone surrogate in the text ({error}); fix or remove it", where)
        else:
            held_out = draw(content) < self.holdout
            if self.format == "text":
                yield from pieces(content, held_out)
            else:
                yield Piece(text, len(content), begins=True, ends=True, held_out=held_out, where=where)

    def pieces_of_table(self, row: dict[str, Any], where: str) -> Iterator[Piece]:
        """Yield the text of a row of a parquet file or of the hub; see `pieces`."""
        yield from self.pieces({name: without_nulls(value) for name, value in row.items()}, where)

    def faulty(self, fault: str, where: str) -> Piece:
        """Return the piece for a row that cannot be used. Raises DataError for one of text."""
        if self.format == "text":
            raise DataError(f"{where}: {fault}")
        return Piece("", 0, begins=True, ends=True, held_out=False, where=where, fault=fault)

    def _text(self, row: Any) -> str:
        _check_object(row, f"a text in {self.column!r}")
        text = row[self._needed(row)[0]]
        if not isinstance(text, str):
            raise RowError(f"its {self.column!r} is {_type(text)}, not text; name another column, or remove the row")
        return text

    def _conversation(self, row: Any) -> str:
        """Return a conversation as JSON, with the members "messages", or "prompt" and "completion", and those of
        `_OPTIONS` that it has."""
        _check_object(row, "a conversation" if self.format == "chat" else '"prompt" and "completion"')
        name, *_ = self._needed(row)
        found = {"messages": _messages(row[name], name)} if self.format == "chat" else _prompt_and_completion(row)
        for option, kind in zip(_OPTIONS, (list, dict), strict=True):
            if (given := _decoded(row, option, kind)) is not None:
                found[option] = given
        return json.dumps(found, ensure_ascii=False, separators=(",", ":"))

    def _needed(self, names: Any) -> list[str]:
        """Return the members with the text or the conversation. Raises RowError if they are not among `names`."""
        found = ", ".join(map(repr, names))
        if self.format == "text":
            if self.column in names:
                return [self.column]
            raise RowError(
                f"it has no {self.column!r}; name the column with the text (data.column, --column), one of {found}"
            )
        conversation, pair = [name for name in _MESSAGES if name in names], ["prompt", "completion"]
        if self.format == "chat" and conversation:
            return conversation[:1]
        if self.format == "completion" and all(name in names for name in pair):
            return pair
        missing, other, use = '"messages"', "completion" in names, "completion"
        if self.format == "completion":
            missing, other, use = '"prompt" and "completion"', bool(conversation), "chat"
        hint = f'; use the format "{use}"' if other else ""
        raise RowError(f'the format "{self.format}" needs {missing}, found {found}{hint}')


def without_nulls(value: Any) -> Any:
    """Return a value from parquet or the hub without the members that are null: a column of objects has the members of
    all its rows, null where a row does not have them."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def _prompt_and_completion(row: dict[str, Any]) -> dict[str, Any]:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return {"prompt": prompt, "completion": completion}
    if isinstance(prompt, list) and isinstance(completion, list):
        return {"prompt": _messages(prompt, "prompt"), "completion": _messages(completion, "completion")}
    raise RowError(
        f'its "prompt" is {_type(prompt)} and its "completion" {_type(completion)}; both must be texts, or both lists '
        "of messages"
    )


def _messages(found: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(found, list) or not found:
        raise RowError(f'its "{name}" is {_type(found)}, not a list of messages; fix or remove it')
    return [_message(each, f"{name}[{i}]") for i, each in enumerate(found)]


def _message(found: Any, name: str) -> dict[str, Any]:
    """Return a message with its role, whichever of the two conventions it follows."""
    if not isinstance(found, dict):
        raise RowError(f"its {name} is {_type(found)}, not an object with a role and a content; fix or remove it")
    message = {key: value for key, value in found.items() if value is not None}
    if "from" in message and "role" not in message:
        message = {"role": message.pop("from")} | message
    if "value" in message and "content" not in message:
        message["content"] = message.pop("value")
    role = message.get("role")
    if not isinstance(role, str):
        raise RowError(f'its {name} has no "role"; fix or remove it')
    message["role"] = _ROLES.get(role.lower(), role)
    if not isinstance(message.get("content", ""), str | list) or not message.keys() - {"role"}:
        raise RowError(f'its {name} has no "content"; fix or remove it')
    for part in message["content"] if isinstance(message.get("content"), list) else []:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = repr(part.get("type")) if isinstance(part, dict) else _type(part)
            raise RowError(f"its {name} has a part of the type {kind}; only parts of text can be trained on")
    if message.get("weight", 1) not in (0, 1):
        raise RowError(f"the weight of its {name} is {message['weight']!r}, not 0 or 1; fix or remove it")
    return message


def _decoded(row: dict[str, Any], name: str, kind: type) -> Any:
    """Return a member that is of this kind, or JSON that contains it; None if it is missing or empty."""
    found = row.get(name)
    if isinstance(found, str) and found:
        try:
            found = json.loads(found)
        except ValueError as error:
            raise RowError(f'its "{name}" is not valid JSON ({error}); fix or remove it') from error
    if not found:
        return None
    if not isinstance(found, kind):
        raise RowError(f'its "{name}" is {_type(found)}, not {_type(kind())}; fix or remove it')
    return found


def _check_object(row: Any, what: str) -> None:
    if not isinstance(row, dict):
        raise RowError(f"expected an object with {what}, found {_type(row)}")


def _type(value: Any) -> str:
    names = {type(None): "null", dict: "an object", list: "an empty list" if value == [] else "a list", str: "text"}
    return names.get(type(value), type(value).__name__)
