"""Conversations as token ids with marks: by the tokenizer's chat template, or a prompt with its completion.

The template is a Jinja template in the tokenizer's directory. A child process renders it and finds which parts of the
text are trained on (worker/data/tokens/rendering.py); the text is tokenised here, with `tokenizers`.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from protocol.text import decoded
from worker.data.tokens.answers import EMPTY, Text, TrainOn
from worker.data.tokens.marks import BEGINS, TRAINED
from worker.data.tokens.rendering import Renderer, renderer
from worker.data.tokens.tokenizer import TEMPLATE, Ids, Tokenizer, read_json, special_tokens, template_files
from worker.errors import DataError

_CONFIG = "tokenizer_config.json"
_CLOCK = "strftime_now"  # what a template calls for the date
_EXCERPT = 60  # characters of a conversation in errors


@dataclass(frozen=True)
class ChatTemplate:
    """The chat templates of the tokenizer `name`.

    templates  by name, "default" and possibly "tool_use"
    special    the texts of the special tokens that the tokenizer's files name, which templates may use
    ends       the texts of all its special tokens
    date       YYYY-MM-DD: what they show as today; None: today, or they do not ask
    """

    name: str
    templates: dict[str, str]
    special: dict[str, str]
    ends: list[str]
    date: str | None = None

    def prompt(self, child: Renderer, messages: Sequence[Any]) -> str:
        """Return the text of the messages, with the prompt for an answer. Raises DataError if the template rejects
        them, or exceeds a limit."""
        (found,) = self._ask(child, {"messages": messages}, None)["texts"]
        return str(found["text"])

    def texts(self, child: Renderer, example: dict[str, Any], train_on: TrainOn, ignored: Counter[str]) -> list[Text]:
        """Return the texts of a conversation with what is trained on, and count in `ignored` the answers that are not,
        by reason. Raises BadConversation, and DataError if the template exceeds a limit."""
        found = self._ask(child, example, train_on)
        ignored.update(found["ignored"])
        return [Text(**each) for each in found["texts"]]

    def _ask(self, child: Renderer, example: dict[str, Any], train_on: TrainOn | None) -> Any:
        messages = example.get("messages") or [*example["prompt"], *example["completion"]]
        text = json.dumps(messages, ensure_ascii=False)
        excerpt = text if len(text) <= _EXCERPT else text[:_EXCERPT] + "…"
        return child.ask(vars(self), {"example": example, "train_on": train_on, "excerpt": excerpt})


def load_chat_template(tokenizer: Tokenizer, today: date | None = None) -> ChatTemplate | None:
    """Return the chat template in the tokenizer's directory; None if it has none. `today`: the date that it shows if it
    asks for one; None: the day on which it is rendered. Raises DataError if it cannot be read."""
    if tokenizer.file is None:
        return None
    directory = tokenizer.file.parent
    templates: dict[str, str] = {}
    found = read_json(directory / _CONFIG).get("chat_template")
    if isinstance(found, str):
        templates["default"] = found
    elif isinstance(found, list):
        named = (each for each in found if isinstance(each, dict) and {"name", "template"} <= each.keys())
        templates = {str(each["name"]): str(each["template"]) for each in named}
    for path in template_files(directory):
        templates["default" if path.name == TEMPLATE else path.stem] = _read(path)
    if "default" not in templates:
        return None
    dated = today is not None and any(_CLOCK in each for each in templates.values())
    added = read_json(tokenizer.file).get("added_tokens") or []
    ends = [str(each["content"]) for each in added if each.get("special")]
    return ChatTemplate(tokenizer.name, templates, special_tokens(directory), ends, str(today) if dated else None)


def _read(path: Path) -> str:
    try:
        return decoded(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def conversation_encoder(
    tokenizer: Tokenizer, template: ChatTemplate | None, train_on: TrainOn
) -> Callable[[str, Counter[str]], Ids]:
    """Return a function that encodes a conversation, as JSON (see `Rows.pieces`), to ids with marks. The ids may be of
    several parts; each part begins with the mark BEGINS (worker/data/tokens/answers.py). The function's second argument
    counts the answers that are not trained on, by reason.

    It raises BadConversation for a conversation that cannot be used, and DataError.
    """
    fast = tokenizer.fast()
    fast.encode_special_tokens = False  # the template's special tokens are meant
    child = renderer()

    def encode(line: str, ignored: Counter[str]) -> Ids:
        example = json.loads(line)
        plain = isinstance(example.get("prompt"), str)
        if plain:
            texts = [_plain(example, train_on, ignored)]
        elif template is None:
            raise no_template(tokenizer)
        else:
            texts = template.texts(child, example, train_on, ignored)
        return np.concatenate([_marked(tokenizer, fast, text, plain) for text in texts])

    return encode


def _plain(example: dict[str, str], train_on: TrainOn, ignored: Counter[str]) -> Text:
    """Return the text of a prompt and its completion, which no template renders."""
    prompt, completion = example["prompt"], example["completion"]
    text = prompt + completion
    if train_on == "all":
        return Text(text, [(0, len(text))], end=True)
    if not completion.strip():
        ignored[EMPTY] += 1
        return Text(text, [])
    return Text(text, [(len(prompt), len(text))], end=True)


def _marked(tokenizer: Tokenizer, fast: Any, text: Text, plain: bool) -> Ids:
    """Return the ids of a text with their marks. A `plain` one gets the special tokens that the tokenizer adds; a
    template has written them already."""
    try:
        encoding = fast.encode(text.text, add_special_tokens=plain)
    except Exception as error:  # tokenizers raises Exception itself
        raise DataError(
            f"{tokenizer.file} cannot tokenise {text.text[:_EXCERPT]!r}: {error}; fix it, or name another tokenizer"
        ) from error
    ids = list(encoding.ids)
    places = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    trained = np.zeros(len(ids), bool)
    for start, stop in text.spans:  # every token that has a character in one of them
        trained |= (places[:, 0] < stop) & (places[:, 1] > start) & (places[:, 0] < places[:, 1])
    if text.end and tokenizer.end is not None:
        if ids[-1:] != [tokenizer.end]:
            ids, trained = [*ids, tokenizer.end], np.append(trained, False)
        trained[-1] = True  # also if the tokenizer has added it, which leaves it without a place in the text
    marks = np.where(trained, TRAINED, 0)
    marks[:1] = BEGINS
    return (np.array(ids, np.int64) | marks).astype(np.uint32)


def no_template(tokenizer: Tokenizer) -> DataError:
    """Return the error for a tokenizer without a chat template."""
    where = "" if tokenizer.file is None else f"; put its {TEMPLATE} into {tokenizer.file.parent}, or"
    return DataError(
        f"data.tokenizer = {tokenizer.name!r} has no chat template{where or ';'} name the tokenizer of a model that "
        "was trained on conversations"
    )
