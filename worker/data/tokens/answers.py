"""Which parts of a conversation's text are trained on. Pure: the chat template is a function.

An answer's text begins where the conversation before it, rendered with the prompt for an answer, ends. It ends with the
special token that the template puts after it. If the template puts none there, that is the one that begins the next
message: a model generates it to end its turn (GLM). If there is none either, the tokenizer's end token is added.

Some templates render an earlier answer differently once others follow: Qwen 3 without its thoughts, gpt-oss with
another end. The model never generates such a text. So one conversation becomes several texts, each an answer's own: the
conversation up to it, as at inference. Answers that a later text repeats unchanged share it, so a template that never
rewrites anything gives one text.

A template with {% generation %} marks is taken at its word: one text, and the marked parts, with the special token that
follows each.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

TrainOn = Literal["assistant", "completion", "all"]
Span = tuple[int, int]  # [start, stop) in characters
Message = dict[str, Any]

EMPTY = "they are empty"
CALL = "the chat template does not render their tool calls"
UNASKED = "the chat template wants a question before them"

_PLACE = "\ue000ANSWER\ue001"  # stands for a content that the template would change
_TAIL = 500  # characters, more than the special tokens at the end of an answer
_MISSING = object()
_ASKS_FOR_NULL = re.compile(r"""content['"]?\]?\s+is\s+(not\s+)?none""")
_TAGS = re.compile(r"(?:\s|<[^<>]*>)*")
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_ROLES = {"assistant", "developer", "function", "ipython", "system", "tool", "user"}


class CannotFind(Exception):
    """What is trained on cannot be found in this conversation; the message says why, as what the template does."""


@dataclass
class Text:
    """A text and the parts that are trained on. `end`: the tokenizer's end token follows, and is trained on."""

    text: str
    spans: list[Span]
    end: bool = False


class Rejected(Exception):
    """The template raised an error."""


class Special:
    """The special tokens of a tokenizer, to find them in texts."""

    def __init__(self, texts: Iterable[str]) -> None:
        any_of = "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)"
        self._next = re.compile(rf"\s*(?:{any_of})")
        self._last = re.compile(rf"(?:{any_of})(?:\s|{any_of})*\Z")

    def at_end(self, text: str, start: int = 0, stop: int | None = None) -> list[int]:
        """Return where each of the special tokens stops that text[start:stop] ends with, whitespace aside."""
        stop = len(text[:stop].rstrip())
        found = self._last.search(text, max(start, stop - _TAIL), stop)
        return [each.end() for each in self._next.finditer(text, found.start(), stop)] if found else []

    def after(self, text: str, at: int) -> int | None:
        """Return where the special token stops that follows `at`, whitespace aside; None if none does."""
        found = self._next.match(text, at)
        return found and found.end()


@dataclass(frozen=True)
class Template:
    """A chat template. `render(messages, prompt)` returns the text of the messages, with the prompt for an answer if
    asked, and the parts that it marks as generated, None if it has no such marks; raises Rejected."""

    source: str
    render: Callable[[list[Message], bool], tuple[str, list[Span] | None]]
    special: Special


def texts_of(
    messages: list[Message], completion: int, train_on: TrainOn, template: Template
) -> tuple[list[Text], Counter[str]]:
    """Return the texts of a conversation, the last one the longest, and how many of its answers are not trained on, by
    reason. `completion`: the number of the message that begins it. Raises CannotFind and Rejected."""
    rejected: Rejected | None = None
    for variant in _variants(messages, template.source):
        found = _Conversation(variant, completion, template)
        try:
            return found.texts(train_on), found.ignored
        except Rejected as error:
            rejected = rejected or error
    assert rejected is not None
    raise rejected


def _variants(messages: list[Message], source: str) -> Iterator[list[Message]]:
    """Yield the messages as a template may take them, the likeliest first: beside tool calls, the content may have to
    be null, missing, or empty, and the arguments of the calls may have to be text."""
    if not any(each.get("tool_calls") for each in messages):
        yield messages
        return
    contents: list[Any] = [None] if _ASKS_FOR_NULL.search(source) else [_MISSING] if "tool_calls" in source else []
    for content in [*contents, ""]:
        for as_text in (False, True):
            yield [_variant(each, content, as_text) for each in messages]


def _variant(message: Message, content: Any, as_text: bool) -> Message:
    found = dict(message)
    if found.get("tool_calls") and found.get("content") is None:
        found["content"] = content
    if as_text and found.get("tool_calls"):
        found["tool_calls"] = [_with_text(call) for call in found["tool_calls"]]
    return {key: value for key, value in found.items() if value is not _MISSING}


def _with_text(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_text(call["function"])}
    given = call.get("arguments")
    return {**call, "arguments": json.dumps(given, ensure_ascii=False)} if isinstance(given, dict) else call


@dataclass(frozen=True)
class _Answer:
    """An answer in `text`, the conversation up to it. `stops`: where each of the special tokens stops that end it.
    `end`: as of `Text`."""

    text: str
    start: int
    stops: list[int]
    end: bool = False


@dataclass
class _Conversation:
    messages: list[Message]
    completion: int
    template: Template
    ignored: Counter[str] = field(default_factory=Counter)

    def texts(self, train_on: TrainOn) -> list[Text]:
        if train_on != "assistant":
            return [self._whole(train_on)]
        answers = self._answers()
        if not answers and (others := {str(each["role"]) for each in self.messages} - _ROLES):
            raise CannotFind(f'finds no message of the role "assistant", but of {", ".join(sorted(map(repr, others)))}')
        text, marks = self.template.render(self.messages, False)
        if marks is not None:
            return [self._marked(text, marks, answers)]
        found = [Text(text, [])]  # from the last to the first
        for i in reversed(answers):
            if self._is_ignored(i):
                continue
            try:
                answer = self._answer(i)
            except Rejected:
                if any(each["role"] == "user" for each in self.messages[:i]):
                    raise
                self.ignored[UNASKED] += 1
                continue
            if not found[-1].spans and answer.text.startswith(found[-1].text):
                found[-1] = Text(answer.text, [], answer.end)
            if (span := _shared(found[-1], answer)) is None:
                span = answer.start, answer.stops[-1]
                found.append(Text(answer.text, [], answer.end))
            found[-1].spans.insert(0, span)
        return [each for each in reversed(found) if each.spans] or found

    def _answers(self, first: int = 0) -> list[int]:
        return [i for i, each in enumerate(self.messages) if i >= first and each["role"] == "assistant"]

    def _text(self, messages: list[Message], prompt: bool = False) -> str:
        return self.template.render(messages, prompt)[0]

    def _marked(self, text: str, marks: list[Span], answers: list[int]) -> Text:
        spans = self._without_ignored(text, marks, filter(self._is_ignored, answers))
        end = False
        for k, (start, stop) in enumerate(spans):
            if start < stop and not self.template.special.at_end(text, start, stop):
                if following := self.template.special.after(text, stop):
                    spans[k] = start, following
                else:
                    end = end or stop == len(text)
        return Text(text, spans, end)

    def _whole(self, train_on: TrainOn) -> Text:
        """Return the text of all messages, with all of it or the completion to be trained on."""
        last = len(self.messages) - 1
        if self.messages[last]["role"] == "assistant":
            text, (*_, stop), end = self._ended(last)
        else:
            text, end = self._text(self.messages), False
            stop = (self.template.special.at_end(text) or [len(text)])[-1]
        if train_on == "all":
            ignored = [i for i in self._answers() if _weight(self.messages[i]) == 0]
            return Text(text, self._without_ignored(text, [(0, len(text))], ignored), end)
        ignored = list(filter(self._is_ignored, self._answers(self.completion)))
        if len(ignored) == len(self.messages) - self.completion:
            return Text(text, [])
        start = self._start(self.completion, text, "completion")
        return Text(text, self._without_ignored(text, [(start, stop)], ignored), end)

    def _is_ignored(self, i: int) -> bool:
        """Return whether an answer is not to be trained on; count why, unless the data says so."""
        message = self.messages[i]
        if _weight(message) == 0:
            return True
        if message.get("tool_calls"):
            without = {key: value for key, value in message.items() if key != "tool_calls"}
            without["content"] = message.get("content") or ""
            before = self.messages[:i]
            try:
                ignored = CALL if self._text([*before, without]) == self._text([*before, message]) else None
            except Rejected:  # it needs them
                ignored = None
        else:
            thoughts = any(str(message.get(key) or "").strip() for key in _THOUGHTS)
            ignored = None if thoughts or text_of(message).strip() else EMPTY
        if ignored is not None:
            self.ignored[ignored] += 1
        return ignored is not None

    def _without_ignored(self, text: str, spans: list[Span], ignored: Iterable[int]) -> list[Span]:
        """Return what remains of the spans without these messages."""
        for i in ignored:
            first, stop = (self._text(self.messages[:n]) if n else "" for n in (i, i + 1))
            if not (text.startswith(stop) and stop.startswith(first)):
                raise CannotFind(_differently("message that is not trained on", "leave it out"))
            a, b = len(first), len(stop)
            parts = [((start, min(end, a)), (max(start, b), end)) for start, end in spans]
            spans = [part for pair in parts for part in pair if part[0] < part[1]]
        return spans

    def _answer(self, i: int) -> _Answer:
        text, stops, end = self._ended(i)
        return _Answer(text, self._start(i, text, "answer"), stops, end)

    def _ended(self, i: int) -> tuple[str, list[int], bool]:
        """Return the text up to message i, an answer, with what ends it, and the members of `_Answer` from `stops`."""
        message, upto, special = self.messages[i], self.messages[: i + 1], self.template.special
        text, content = self._verbatim(i), text_of(message)
        if stops := special.at_end(text):
            return text, stops, False
        if content.strip() and not _squeezed(text).endswith(_squeezed(content)[-20:]):
            return text, [len(text)], False  # the template ends it with other text
        follows = [{"role": "tool" if message.get("tool_calls") else "user", "content": "?"}]
        if i + 1 < len(self.messages) and self.messages[i + 1]["role"] != "assistant":
            follows = self.messages[i + 1 : i + 2]
        try:
            longer = self._text(upto + follows)
        except Rejected:
            longer = ""
        if longer.startswith(text) and (following := special.after(longer, len(text))):
            return longer[:following], [following], False
        return text, [len(text)], True

    def _verbatim(self, i: int) -> str:
        """Return the text up to message i, with its content even if the template leaves a part out: as the thoughts of
        every answer (DeepSeek R1)."""
        before, message = self.messages[:i], self.messages[i]
        text = self._text([*before, message])
        content = text_of(message)
        if content in text or _squeezed(content) in _squeezed(text):
            return text
        placed = self._text([*before, {**message, "content": _PLACE}])
        if placed.count(_PLACE) != 1:
            raise CannotFind("leaves out a part of an answer's content, so it cannot be trained on")
        return placed.replace(_PLACE, content)

    def _start(self, i: int, text: str, what: str) -> int:
        """Return where the answer to the first `i` messages begins in `text`, after the prompt for it. The prompt may
        end with tags that the text does not repeat: it opens the thoughts of an answer that has none."""
        before = self.messages[:i]
        try:
            prompt = self._text(before, prompt=self.messages[i]["role"] == "assistant")
            if prompt and text.startswith(prompt):
                return len(prompt)
        except Rejected:
            prompt = ""
        if before and prompt:
            shared = _shared_length(prompt, text)
            for at in (shared, prompt.rfind("<", 0, shared)):  # another tag may begin as the prompt's does
                if at >= 0 and _TAGS.fullmatch(prompt, at):
                    return at
        else:  # the first answer comes before any question: search for the prompt
            asked = [*before, {"role": "user", "content": "?"}]
            question, longer = self._text(asked), self._text(asked, prompt=True)
            header = longer[_shared_length(question, longer) :]
            for length in range(len(header), 0, -1):
                if (at := text.find(header[:length])) >= 0 and _TAGS.fullmatch(header, length):
                    return at + length
            content = text_of(self.messages[i]).strip()
            if not header and content in text:
                return text.index(content)
        marks = "put {% generation %} marks into the template, or " if what == "answer" else ""
        raise CannotFind(_differently(what, f'{marks}set train_on = "all"'))


def _shared_length(a: str, b: str) -> int:
    """Return how many characters two texts begin with together."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a.startswith(b[:middle]) else (low, middle - 1)
    return low


def _differently(what: str, remedy: str) -> str:
    return f"renders earlier messages differently once others follow, so the {what} cannot be found exactly: {remedy}"


def _shared(text: Text, answer: _Answer) -> Span | None:
    """Return where the answer is in a longer text, with the token that ends it; None if it is not there."""
    if answer.end and text.text != answer.text:
        return None
    for stop in reversed(answer.stops):
        if text.text.startswith(answer.text[:stop]):
            return answer.start, stop
    return None


def text_of(message: Message) -> str:
    """Return the text of a message, which may be in parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _weight(message: Message) -> Any:
    return message.get("weight", 1)


def _squeezed(text: str) -> str:
    return "".join(text.split())
