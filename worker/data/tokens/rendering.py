"""Render chat templates in a child process with limits of memory and time.

A template is a program in Jinja from whoever made the tokenizer, which may ask for any amount of memory and never end.
The child renders one conversation after the other: a JSON line with a request comes in, one with the result goes out.
It is this module as a program. It renders with transformers, as `apply_chat_template` does, and finds what is trained
on (worker/data/tokens/answers.py).
"""

import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections import Counter
from dataclasses import asdict
from datetime import datetime
from typing import Any

from worker.data.tokens.answers import CannotFind, Message, Rejected, Span, Special, Template, Text, text_of, texts_of
from worker.errors import DataError

CPU_S = 10  # to render a conversation once
MEMORY_BYTES = 1 << 30  # beside what the program itself takes
_TEXT_CHARACTERS = 1 << 20  # of a text, and eight for each byte of the conversation
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class BadConversation(DataError):
    """This conversation cannot be used; others with the same template may be."""


class Renderer:
    """A child process that renders. It ends when the object is no longer used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._template: dict[str, Any] | None = None

    def ask(self, template: dict[str, Any], request: dict[str, Any]) -> Any:
        """Return the child's answer to a request: the texts of a conversation by this template, a `ChatTemplate` as a
        dict. Raises BadConversation, and DataError if the template exceeds a limit."""
        name = template["name"]
        with self._lock:
            given = {**request, "cpu_s": CPU_S}
            if template != self._template or self._process is None:
                given["template"] = template
            line = json.dumps(given, ensure_ascii=False).encode() + b"\n"
            process = self._process = self._process or _start(self)
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = b""
            if not answer:
                self._process = None
                raise _ended(name, process.wait())
            self._template = template
        found = json.loads(answer)
        if "error" in found:
            raise BadConversation(f"the chat template of {name!r} {found['error']}")
        if "limit" in found:
            raise DataError(f"the chat template of {name!r} {found['limit']}; do not use it")
        return found


def _start(owner: Renderer) -> "subprocess.Popen[bytes]":
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path),
        "OPENBLAS_NUM_THREADS": "1",  # each thread would take memory
    }
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    weakref.finalize(owner, _stop, process)
    return process


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()  # closes its pipes, and waits for it


def _ended(name: str, status: int) -> DataError:
    if status == -signal.SIGXCPU:
        return DataError(
            f"the chat template of {name!r} took more than {CPU_S} s of CPU time for a conversation; do not use it"
        )
    why = "possibly because memory ran out" if status < 0 else "its error is shown above"
    return DataError(f"the process that renders the chat template of {name!r} ended with {status}: {why}")


_shared: "weakref.ref[Renderer] | None" = None


def renderer() -> Renderer:
    """Return the renderer of this process, which everybody who needs one at the same time shares."""
    global _shared
    found = _shared() if _shared is not None else None
    if found is None:
        found = Renderer()
        _shared = weakref.ref(found)
    return found


# --- in the child -------------------------------------------------------------------------------------------------


class _Jinja:
    """A `ChatTemplate`. `cpu_s`: the most seconds of CPU time that it may take to render a conversation."""

    cpu_s: int = CPU_S

    def __init__(self, template: dict[str, Any]) -> None:
        self._templates, self._special = template["templates"], template["special"]
        self._ends, date = Special(template["ends"]), template["date"]
        self._date = None if date is None else datetime.fromisoformat(date)
        self._in_parts: dict[str, tuple[bool, bool]] = {}

    def template(self, example: dict[str, Any]) -> Template:
        """Return the template for a conversation: with its tools and template arguments."""
        source = self._templates["default"]
        if (tools := example.get("tools")) is not None:
            source = self._templates.get("tool_use", source)
        arguments = {**self._special, **example.get("chat_template_kwargs", {}), "tools": tools}

        def render(messages: list[Message], prompt: bool) -> tuple[str, list[Span] | None]:
            adapted = [self._adapted(source, message) for message in messages]
            return self._rendered(source, adapted, prompt, arguments)

        return Template(source, render, self._ends)

    def _rendered(
        self, source: str, messages: list[Message], prompt: bool, arguments: dict[str, Any]
    ) -> tuple[str, list[Span] | None]:
        from transformers.utils import chat_template_utils as chat

        marks = _GENERATION.search(source) is not None
        _limit_cpu(self.cpu_s)
        try:
            if self._date is not None:
                chat._compile_jinja_template(source).environment.globals["strftime_now"] = self._date.strftime  # noqa: SLF001
            render: Any = chat.render_jinja_template  # its annotation names one of the two results
            texts, spans = render(
                [messages],
                chat_template=source,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **arguments,
            )
        except MemoryError:
            raise
        except Exception as error:  # whatever a template raises: jinja2's errors, TypeError, KeyError
            raise Rejected(f"{error or type(error).__name__}") from error
        return texts[0], [(start, stop) for start, stop in spans[0]] if marks else None

    def _adapted(self, source: str, message: Message) -> Message:
        """Return a message with its content as the template takes it: as text, or as a list of parts."""
        if source not in self._in_parts:
            self._in_parts[source] = (
                self._takes(source, "word"),
                self._takes(source, [{"type": "text", "text": "word"}]),
            )
        text, parts = self._in_parts[source]
        content = message.get("content")
        if isinstance(content, list) and not parts:
            return {**message, "content": text_of(message)}
        if isinstance(content, str) and parts and not text:
            return {**message, "content": [{"type": "text", "text": content}]}
        return message

    def _takes(self, source: str, content: Any) -> bool:
        try:
            found, _ = self._rendered(source, [{"role": "user", "content": content}], False, self._special)
        except Rejected:
            return False
        return "word" in found and "'text'" not in found  # a list as text


def _answer(request: dict[str, Any], most: int, jinja: _Jinja) -> dict[str, Any]:
    """Return the answer to a request, in which a text has at most `most` characters."""
    example = request["example"]
    template = jinja.template(example)
    texts, ignored = [], Counter[str]()
    try:
        if request["train_on"] is None:
            texts = [Text(template.render(example["messages"], True)[0], [])]
        else:
            before = example.get("prompt", [])
            messages = example["messages"] if "messages" in example else before + example["completion"]
            texts, ignored = texts_of(messages, len(before), request["train_on"], template)
    except Rejected as error:
        return {"error": f"rejects the conversation {request['excerpt']}: {error}; fix the conversation, or remove it"}
    except CannotFind as error:
        return {"error": str(error)}
    except MemoryError:
        return {"limit": f"needs more than {MEMORY_BYTES >> 20} MiB for a conversation"}
    longest = max(len(each.text) for each in texts)
    if longest > most:
        return {"limit": f"makes {longest} characters of a conversation that has fewer than {most // 8}"}
    return {"texts": [asdict(each) for each in texts], "ignored": ignored}


def _limit_cpu(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _set_limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + seconds + 1)


def _set_limit(kind: int, value: int) -> None:
    _, most = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if most == resource.RLIM_INFINITY else min(value, most), most))


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    logging.disable()
    import transformers.utils.chat_template_utils  # noqa: F401  before memory is limited

    if sys.platform == "linux":  # others do not count the memory that a process has
        with open("/proc/self/statm") as file:
            _set_limit(resource.RLIMIT_AS, int(file.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES)
    jinja: _Jinja | None = None
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if "template" in request:
            jinja = _Jinja(request["template"])
        assert jinja is not None
        jinja.cpu_s = request["cpu_s"]
        answer = _answer(request, _TEXT_CHARACTERS + 8 * len(line), jinja)
        sys.stdout.buffer.write(json.dumps(answer, ensure_ascii=False).encode(errors="replace") + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _main()
