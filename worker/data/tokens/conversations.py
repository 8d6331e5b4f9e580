"""Conversations as token ids with marks: by the tokenizer's chat template, or a prompt with its completion.

The template is a Jinja template in the tokenizer's directory. It is rendered by transformers, as `apply_chat_template`
does it, and the result is tokenised with `tokenizers`. Which tokens are trained on follows from where their text is:

- If the template marks what the assistant generates ({% generation %}), by these marks.
- Otherwise the text of an assistant's message is what follows the conversation before it, rendered with the prompt for
  an answer, in the conversation up to it. That is exact only if the rendered conversation begins with both; a template
  that renders earlier messages differently once others follow is rejected.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from worker.data.tokens.marks import BEGINS, IDS, TRAINED
from worker.data.tokens.tokenizer import TEMPLATE, Ids, Tokenizer, read_json, special_tokens, template_files
from worker.errors import DataError

TrainOn = Literal["assistant", "completion", "all"]

_CONFIG = "tokenizer_config.json"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_EXCERPT = 60  # characters of a conversation in errors

Span = tuple[int, int]  # [start, stop) in characters


@dataclass(frozen=True)
class ChatTemplate:
    """The chat templates of a tokenizer by name, "default" and possibly "tool_use", and the texts of its special
    tokens, which templates may use."""

    tokenizer: str
    templates: dict[str, str]
    special: dict[str, str]

    def render(self, messages: Any, example: dict[str, Any], *, prompt: bool = False) -> tuple[str, list[Span] | None]:
        """Return the text of the messages, and what the template marks as generated; None if it marks nothing.

        example  a conversation whose tools and template arguments are used
        prompt   add the prompt for an answer

        Raises DataError if the template rejects the messages.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        tools = example.get("tools")
        template = self.templates["default"]
        if tools is not None:
            template = self.templates.get("tool_use", template)
        marks = _GENERATION.search(template) is not None
        arguments = {**self.special, **example.get("chat_template_kwargs", {})}
        try:
            render: Any = render_jinja_template  # its annotation names one of the two results
            texts, spans = render(
                [messages],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **arguments,
            )
        except Exception as error:  # whatever a template raises: jinja2's errors, TypeError, KeyError
            raise DataError(
                f"the chat template of {self.tokenizer!r} rejects the conversation {_excerpt(messages)}: "
                f"{error or type(error).__name__}; fix the conversation, or remove it"
            ) from error
        return texts[0], [(start, stop) for start, stop in spans[0]] if marks else None


def load_chat_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the chat template in the tokenizer's directory; None if it has none. Raises DataError if it cannot be
    read."""
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
    return ChatTemplate(tokenizer.name, templates, special_tokens(directory))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
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
        template = None if self.template is None else [self.template.templates, self.template.special]
        return [self.train_on, template]

    def encoder(self) -> Callable[[Sequence[str]], list[Ids]]:
        """Return a function that encodes several conversations at once."""
        fast = self.tokenizer.fast()
        fast.encode_special_tokens = False  # the template's special tokens are meant
        special = tuple(each.content for each in fast.get_added_tokens_decoder().values() if each.special)

        def encode(texts: Sequence[str]) -> list[Ids]:
            examples = [json.loads(text) for text in texts]
            found = [_Text.of(example, self.template, self.tokenizer, self.train_on, special) for example in examples]
            out: list[Ids] = []
            for text in found:
                try:
                    encoding = fast.encode(text.text, add_special_tokens=text.plain)
                except Exception as error:  # tokenizers raises Exception itself
                    raise DataError(
                        f"{self.tokenizer.file} cannot tokenise {text.text[:_EXCERPT]!r}: {error}; fix it, or name "
                        "another tokenizer"
                    ) from error
                ids = np.array(encoding.ids, np.uint32)
                trained = _covered(encoding.offsets, text.spans)
                if text.plain and self.tokenizer.end is not None:
                    if not len(ids) or ids[-1] != self.tokenizer.end:
                        ids, trained = np.append(ids, np.uint32(self.tokenizer.end)), np.append(trained, False)
                    trained[-1] = (
                        True  # also if the tokenizer has added it, which leaves it without a place in the text
                    )
                out.append(_marked(ids, trained))
            return out

        return encode


@dataclass(frozen=True)
class _Text:
    """The text of a conversation and the parts that are trained on. `plain`: it is not from a template, so the
    tokenizer adds its own special tokens."""

    text: str
    spans: list[Span]
    plain: bool = False

    @classmethod
    def of(
        cls,
        example: dict[str, Any],
        template: ChatTemplate | None,
        tokenizer: Tokenizer,
        train_on: TrainOn,
        special: tuple[str, ...],
    ) -> "_Text":
        """Return the text of an example. Raises DataError."""
        prompt = example.get("prompt", [])
        if isinstance(prompt, str):
            text = prompt + example["completion"]
            return cls(text, [(0 if train_on == "all" else len(prompt), len(text))], plain=True)
        if template is None:
            raise no_template(tokenizer)
        messages = example["messages"] if "messages" in example else prompt + example["completion"]
        text, generated = template.render(messages, example)
        if train_on == "all":
            return cls(text, [(0, len(text))])
        if train_on == "completion":
            spans = [_added(template, text, messages, example, len(prompt), len(messages))]
        elif generated is not None:
            return cls(text, generated)
        else:
            spans = [
                _added(template, text, messages, example, i, i + 1)
                for i, message in enumerate(messages)
                if message["role"] == "assistant"
            ]
        return cls(text, [_without_end(text, span, special) for span in spans])


def no_template(tokenizer: Tokenizer) -> DataError:
    """Return the error for a tokenizer without a chat template."""
    where = "" if tokenizer.file is None else f"; put its {TEMPLATE} into {tokenizer.file.parent}, or"
    return DataError(
        f"data.tokenizer = {tokenizer.name!r} has no chat template{where or ';'} name the tokenizer of a model that "
        "was trained on conversations"
    )


def _added(
    template: ChatTemplate, text: str, messages: list[Any], example: dict[str, Any], first: int, stop: int
) -> Span:
    """Return where in `text`, the whole conversation, its messages [first, stop) are, without the prompt for an answer.
    Raises DataError if that cannot be determined exactly."""
    before = template.render(messages[:first], example, prompt=True)[0] if first else ""
    upto = text if stop == len(messages) else template.render(messages[:stop], example)[0]
    if not (text.startswith(upto) and upto.startswith(before)):
        part = "completion" if "completion" in example else "answer"
        remedy = "put {% generation %} marks into the template, or " if part == "answer" else ""
        raise DataError(
            f"the chat template of {template.tokenizer!r} renders the earlier messages of {_excerpt(messages)} "
            f'differently once others follow, so the {part} cannot be found exactly: {remedy}set train_on = "all"'
        )
    return len(before), len(upto)


def _without_end(text: str, span: Span, special: tuple[str, ...]) -> Span:
    """Return the span without whitespace after the special token that ends the message: nobody generates it."""
    content = text[slice(*span)].rstrip()
    return (span[0], span[0] + len(content)) if content.endswith(special) else span


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
