"""Conversations as token ids with marks: by the tokenizer's chat template, or a prompt with its completion.

The template is a Jinja template in the tokenizer's directory. A child process renders it and finds which parts of the
text are trained on (worker/data/tokens/rendering.py); the text is tokenised here, with `tokenizers`.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.text import decoded
from worker.data.tokens.answers import EMPTY, Span, Text, TrainOn
from worker.data.tokens.marks import BEGINS, IDS, TRAINED
from worker.data.tokens.rendering import Renderer, renderer
from worker.data.tokens.tokenizer import TEMPLATE, Ids, Tokenizer, read_json, special_tokens, template_files
from worker.errors import DataError

_CONFIG = "tokenizer_config.json"
_CLOCK = "strftime_now"  # what a template calls for the date
_RULES = 2  # changes whenever the same conversation gets other ids or marks
_EXCERPT = 60  # characters of a conversation in errors


@dataclass(frozen=True)
class ChatTemplate:
    """The chat templates of a tokenizer by name, "default" and possibly "tool_use", and the texts of its special
    tokens, which templates may use. `date`, YYYY-MM-DD: what they show as today; None: today, or they do not ask."""

    tokenizer: str
    templates: dict[str, str]
    special: dict[str, str]
    date: str | None = None

    def prompt(self, child: Renderer, messages: Sequence[Any]) -> str:
        """Return the text of the messages, with the prompt for an answer. Raises DataError if the template rejects
        them, or exceeds a limit."""
        (found,) = self._ask(child, {"messages": messages}, None, ())["texts"]
        return str(found["text"])

    def texts(
        self, child: Renderer, example: dict[str, Any], train_on: TrainOn, special: Sequence[str], ignored: Counter[str]
    ) -> list[Text]:
        """Return the texts of a conversation with what is trained on, and count in `ignored` the answers that are not,
        by reason. `special`: the texts of all special tokens. Raises BadConversation, and DataError if the template
        exceeds a limit."""
        found = self._ask(child, example, train_on, special)
        ignored.update(found["ignored"])
        return [
            Text(each["text"], [(start, stop) for start, stop in each["spans"]], each["end"]) for each in found["texts"]
        ]

    def _ask(self, child: Renderer, example: dict[str, Any], train_on: TrainOn | None, special: Sequence[str]) -> Any:
        template = {"templates": self.templates, "special": self.special, "ends": list(special), "date": self.date}
        messages = example.get("messages") or [*example["prompt"], *example["completion"]]
        request = {"example": example, "train_on": train_on, "excerpt": _excerpt(messages)}
        return child.ask(self.tokenizer, template, request)


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
    return ChatTemplate(tokenizer.name, templates, special_tokens(directory), str(today) if dated else None)


def _read(path: Path) -> str:
    try:
        return decoded(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


@dataclass(frozen=True)
class ConversationEncoder:
    """Encodes conversations, as JSON (see `ConversationRows`), to ids with marks. It can be sent to other processes;
    `encoder` loads the tokenizer."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    train_on: TrainOn

    def identity(self) -> list[Any]:
        """Return values that determine its result, beside the tokenizer's digest and end."""
        return [_RULES, self.train_on, None if self.template is None else asdict(self.template) | {"tokenizer": None}]

    def encoder(self) -> Callable[..., list[Ids]]:
        """Return a function that encodes several conversations. The ids of one may consist of several parts, each of
        which begins with the mark BEGINS: see worker/data/tokens/answers.py. As its second argument it takes a counter
        of the answers that are not trained on, by reason.

        It raises BadConversation for a conversation that cannot be used, and DataError.
        """
        fast = self.tokenizer.fast()
        fast.encode_special_tokens = False  # the template's special tokens are meant
        special = [each.content for each in fast.get_added_tokens_decoder().values() if each.special]
        child = renderer()

        def encode(texts: Sequence[str], ignored: Counter[str] | None = None) -> list[Ids]:
            counted: Counter[str] = Counter() if ignored is None else ignored
            return [
                np.concatenate([ids(each, plain) for each in found])
                for found, plain in (read(t, counted) for t in texts)
            ]

        def read(line: str, ignored: Counter[str]) -> tuple[list[Text], bool]:
            example = json.loads(line)
            if isinstance(example.get("prompt"), str):
                return [self._plain(example, ignored)], True
            if self.template is None:
                raise no_template(self.tokenizer)
            return self.template.texts(child, example, self.train_on, special, ignored), False

        def ids(text: Text, plain: bool) -> Ids:
            try:
                encoding = fast.encode(text.text, add_special_tokens=plain)  # the template has written them already
            except Exception as error:  # tokenizers raises Exception itself
                raise DataError(
                    f"{self.tokenizer.file} cannot tokenise {text.text[:_EXCERPT]!r}: {error}; fix it, or name "
                    "another tokenizer"
                ) from error
            found = np.array(encoding.ids, np.uint32)
            trained = _covered(encoding.offsets, text.spans)
            if text.end and self.tokenizer.end is not None:
                if not len(found) or found[-1] != self.tokenizer.end:
                    found, trained = np.append(found, np.uint32(self.tokenizer.end)), np.append(trained, False)
                trained[-1] = True  # also if the tokenizer has added it, which leaves it without a place in the text
            return _marked(found, trained)

        return encode

    def _plain(self, example: dict[str, str], ignored: Counter[str]) -> Text:
        """Return the text of a prompt and its completion, which no template renders."""
        prompt, completion = example["prompt"], example["completion"]
        text = prompt + completion
        if self.train_on == "all":
            return Text(text, [(0, len(text))], end=True)
        if not completion.strip():
            ignored[EMPTY] += 1
            return Text(text, [])
        return Text(text, [(len(prompt), len(text))], end=True)


def no_template(tokenizer: Tokenizer) -> DataError:
    """Return the error for a tokenizer without a chat template."""
    where = "" if tokenizer.file is None else f"; put its {TEMPLATE} into {tokenizer.file.parent}, or"
    return DataError(
        f"data.tokenizer = {tokenizer.name!r} has no chat template{where or ';'} name the tokenizer of a model that "
        "was trained on conversations"
    )


def _covered(offsets: Sequence[Span], spans: Iterable[Span]) -> npt.NDArray[np.bool_]:
    """Return for each token, from `offsets` in the text, whether it has a character in one of the spans."""
    found = np.array(offsets, np.int64).reshape(-1, 2)
    covered = np.zeros(len(found), bool)
    for start, stop in spans:
        covered |= (found[:, 0] < stop) & (found[:, 1] > start) & (found[:, 0] < found[:, 1])
    return covered


def _marked(ids: Ids, trained: npt.NDArray[np.bool_]) -> Ids:
    marked: Ids = ids | np.where(trained, np.uint32(TRAINED), np.uint32(0)).astype(np.uint32)
    if len(marked):
        marked[0] = (marked[0] & np.uint32(IDS)) | np.uint32(BEGINS)
    return marked


def _excerpt(messages: Any) -> str:
    text = json.dumps(messages, ensure_ascii=False)
    return text if len(text) <= _EXCERPT else text[:_EXCERPT] + "…"
