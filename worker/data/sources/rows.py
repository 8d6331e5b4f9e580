"""What a row of a data set contains: a document, a conversation, or a prompt with its completion.

Rows are objects in JSON lines, and rows of parquet files and hub data sets. The names and types of their members are
those of TRL's dataset formats (https://huggingface.co/docs/trl/dataset_formats), so the same sets can be used:

    text        {"text": "…"}, or another column
    chat        {"messages": [{"role": …, "content": …}, …]}, with or without "tools" and "chat_template_kwargs";
                or {"conversations": [{"from": …, "value": …}, …]}. A message with "weight": 0 is not trained on
    completion  {"prompt": …, "completion": …}, two texts or two lists of messages
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from worker.data.sources.documents import HoldOut, Piece, document
from worker.errors import DataError

Format = Literal["text", "chat", "completion"]

_MESSAGES = ("messages", "conversations")
_OPTIONS = ("tools", "chat_template_kwargs")
_ROLES = {"human": "user"} | dict.fromkeys(("ai", "bot", "chatbot", "chatgpt", "gpt", "model"), "assistant")
_ROLES |= {role: role for role in ("assistant", "system", "user")}


class RowError(Exception):
    """The row or the file does not contain what it should; the message says what it has instead, and the remedy."""


class RowFormat(Protocol):
    """A format of rows."""

    def columns(self, names: Sequence[str]) -> list[str]:
        """Return which columns to read of a file that has the columns `names`. Raises RowError."""

    def pieces(self, row: Any, hold_out: HoldOut, where: Callable[[], str] = str) -> Iterator[Piece]:
        """Yield the text of a row, in order. `where` names the row in errors. Raises RowError."""

    def identity(self) -> list[str]:
        """Return values that distinguish it from any other format."""


@dataclass(frozen=True)
class TextRows:
    """Rows with a document in `column`."""

    column: str

    def columns(self, names: Sequence[str]) -> list[str]:
        if self.column not in names:
            raise RowError(f"it has no column {self.column!r}; {self._remedy(names)}")
        return [self.column]

    def pieces(self, row: Any, hold_out: HoldOut, where: Callable[[], str] = str) -> Iterator[Piece]:
        _check_object(row, f"a text in {self.column!r}")
        if self.column not in row:
            raise RowError(f"it has no {self.column!r}; {self._remedy(row)}")
        text = row[self.column]
        if not isinstance(text, str):
            raise RowError(f"its {self.column!r} is {_type(text)}, not text; name another column, or remove the row")
        try:
            yield from document(text, hold_out)
        except UnicodeEncodeError as error:
            raise _lone_surrogate(error) from error

    def identity(self) -> list[str]:
        return [self.column]

    def _remedy(self, names: Any) -> str:
        return f"name the column with the text (data.column, --column), one of {', '.join(map(repr, names))}"


@dataclass(frozen=True)
class ConversationRows:
    """Rows with a conversation, or with a prompt and its completion. Each gives one piece: the conversation as JSON,
    with the members "messages", or "prompt" and "completion", and those of `_OPTIONS` that it has."""

    format: Literal["chat", "completion"]

    def columns(self, names: Sequence[str]) -> list[str]:
        return [*self._needed(names), *(name for name in _OPTIONS if name in names)]

    def pieces(self, row: Any, hold_out: HoldOut, where: Callable[[], str] = str) -> Iterator[Piece]:
        _check_object(row, "a conversation" if self.format == "chat" else '"prompt" and "completion"')
        needed = self._needed(row)
        found: dict[str, Any]
        if self.format == "chat":
            found = {"messages": _messages(row[needed[0]], needed[0])}
        else:
            found = _prompt_and_completion(row)
        if (tools := _decoded(row, "tools", list)) is not None:
            found["tools"] = tools
        if (options := _decoded(row, "chat_template_kwargs", dict)) is not None:
            found["chat_template_kwargs"] = options
        text = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
        try:
            content = text.encode()
        except UnicodeEncodeError as error:
            raise _lone_surrogate(error) from error
        yield Piece(text, len(content), begins=True, ends=True, held_out=hold_out(content), where=where)

    def identity(self) -> list[str]:
        return [self.format]

    def _needed(self, names: Any) -> list[str]:
        """Return the members with the conversation. Raises RowError if they are not among `names`."""
        if self.format == "completion":
            if "prompt" in names and "completion" in names:
                return ["prompt", "completion"]
            missing, other = '"prompt" and "completion"', list(_MESSAGES)
        else:
            for name in _MESSAGES:
                if name in names:
                    return [name]
            missing, other = '"messages"', ["completion"]
        instead = "chat" if self.format == "completion" else "completion"
        hint = f'; use the format "{instead}"' if any(name in names for name in other) else ""
        raise RowError(f'the format "{self.format}" needs {missing}, found {", ".join(map(repr, names))}{hint}')


def row_format(name: Format, column: str) -> RowFormat:
    """Return the format called `name`; of text in `column`."""
    return TextRows(column) if name == "text" else ConversationRows(name)


def row_pieces(row_format: RowFormat, row: Any, hold_out: HoldOut, where: Callable[[], str]) -> Iterator[Piece]:
    """Yield the text of a row. A row that is no conversation gives a piece with its `fault`: whether it is skipped is
    decided later. Raises DataError, which names the row, if it has no text."""
    try:
        yield from row_format.pieces(row, hold_out, where)
    except RowError as error:
        yield faulty(row_format, str(error), where)


def faulty(row_format: RowFormat, fault: str, where: Callable[[], str]) -> Piece:
    """Return the piece for a row that cannot be used. Raises DataError for one of text."""
    if isinstance(row_format, TextRows):
        raise DataError(f"{where()}: {fault}")
    return Piece("", 0, begins=True, ends=True, held_out=False, where=where, fault=fault)


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


def _lone_surrogate(error: UnicodeEncodeError) -> RowError:
    return RowError(f"lone surrogate in the text ({error}); fix or remove it")
