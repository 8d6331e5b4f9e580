"""Reading of HTTP responses, for both clients, the worker's and the operator's.

A response is a message, a coordinator's problem, or something that another server sent, a proxy for example. It is
anything shaped like an `httpx.Response`, so that nothing here needs httpx.
"""

import json
import re
from collections.abc import Mapping
from typing import Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from protocol.errors import PROBLEM_PREFIX, PROBLEMS, NotUnderstood, Problem, Transient, UnexpectedAnswer
from protocol.explaining import explain
from protocol.printable import printable
from protocol.versions import OURS, both_named, said_by_coordinator, why_not

Reply = TypeVar("Reply", bound=BaseModel)

_SHOWN = 200  # characters of an answer that no coordinator gave
_HEAD = 4096  # bytes of a page that have its title
_TITLE = re.compile(rb"<title>(.*?)</title>", re.IGNORECASE | re.DOTALL)
_DIGITS = re.compile(r"[0-9]{1,18}")
_TRANSIENT = (408, 429)  # what a proxy says where trying again helps, besides 5xx


class Request(Protocol):
    """The part of `httpx.Request` that is used."""

    @property
    def method(self) -> str: ...
    @property
    def url(self) -> object: ...


class Answer(Protocol):
    """The part of `httpx.Response` that is used; `read` returns the whole body."""

    @property
    def request(self) -> Request: ...
    @property
    def status_code(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    def read(self) -> bytes: ...


def header_number(text: str) -> int | None:
    """Return the number that a header gives in digits of ASCII, as HTTP has them; None for anything else, such as the
    `²` that `str.isdigit` takes and `int` does not, and for more digits than bytes or seconds ever have."""
    return int(text) if _DIGITS.fullmatch(text) else None


def raise_for_problem(answer: Answer) -> None:
    """Return if the status is a success (2xx) of our protocol, leaving the body unread. Otherwise raise what the
    answer means:

    NotUnderstood      the coordinator speaks another protocol, or refused by a problem that is not known here
    Problem            the coordinator refused
    Transient          a proxy answered 5xx, 408 or 429 in its place
    UnexpectedAnswer   a redirect, or any other answer that no coordinator gives
    """
    status, difference = answer.status_code, why_not(OURS, said_by_coordinator(answer.headers))
    if difference is not None:
        raise NotUnderstood(difference)
    if 200 <= status < 300:
        return
    body = answer.read()
    retry_after_s = header_number(answer.headers.get("Retry-After", ""))
    said = f"{_where(answer)} answered {status}"
    try:
        document = json.loads(body)
        slug, detail = str(document["type"]), printable(str(document["detail"]))
        if slug.startswith(PROBLEM_PREFIX) and slug.removeprefix(PROBLEM_PREFIX) not in PROBLEMS:
            raise _unknown_problem(f"{said}: {printable(slug)[:_SHOWN]}: {detail}", status, retry_after_s)
        problem = Problem.from_document(document, retry_after_s=retry_after_s)
    except (ValueError, KeyError, TypeError, AttributeError):
        # Not a coordinator's: a proxy's page, or nothing at all.
        if 300 <= status < 400 and "Location" in answer.headers:
            raise UnexpectedAnswer(
                f"{answer.request.url} redirects to {answer.headers['Location']}; give that address"
            ) from None
        if status >= 500 or status in _TRANSIENT:
            raise Transient(f"{said}: {_start(body)}", retry_after_s=retry_after_s) from None
        raise UnexpectedAnswer(
            f"{said}, which is not a coordinator's answer: {_start(body)}; check the URL and what lies between"
        ) from None
    raise problem


def read_message(reply: type[Reply], answer: Answer) -> Reply:
    """Return the body as a `reply`. Raises NotUnderstood for words of another version, and UnexpectedAnswer for another
    server's page or a broken body."""
    body = answer.read()
    try:
        return reply.model_validate_json(body)
    except ValidationError as error:
        coordinator, faults = said_by_coordinator(answer.headers), error.errors()
        if coordinator.protocol is not None and all(fault["type"] != "json_invalid" for fault in faults):
            raise NotUnderstood(
                f"{_where(answer)} answered in words that this client does not know: "
                f"{'; '.join(explain(fault) for fault in faults[:3])}; {both_named(OURS, coordinator)}"
            ) from error
        raise UnexpectedAnswer(
            f"{_where(answer)} answered what is no {reply.__name__}: {_start(body)}; check the URL and what lies "
            "between, and whether both sides have the same version"
        ) from error


def _unknown_problem(said: str, status: int, retry_after_s: float | None) -> Transient | NotUnderstood:
    """Return what a problem means whose name is not known here: a later coordinator's is treated by its status."""
    if status >= 500 or status in _TRANSIENT:
        return Transient(said, retry_after_s=retry_after_s)
    return NotUnderstood(f"{said} (Outerstep {OURS.version} does not know this problem; the coordinator may be later)")


def _where(answer: Answer) -> str:
    return f"{answer.request.method} {answer.request.url}"


def _start(body: bytes) -> str:
    title = _TITLE.search(body[:_HEAD])
    if title is not None:
        return f"a page called {' '.join(title[1].decode(errors='replace').split())[:_SHOWN]!r}"
    return repr(body.decode(errors="replace")[:_SHOWN].strip())
