"""How a client reads what comes back over HTTP: a message, a coordinator's problem, or the words of somebody else.

Both clients, a worker's and an operator's, read by these functions; what they then do about it is their own affair.
The answer is anything shaped like an `httpx.Response`, so that nothing here needs httpx.
"""

import json
from collections.abc import Mapping
from typing import Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from protocol.errors import Problem, Transient, UnexpectedAnswer

Reply = TypeVar("Reply", bound=BaseModel)

_SHOWN = 200  # characters of a stranger's answer
_PASSING = (408, 429)  # what a proxy says where trying again helps, besides 5xx


class Request(Protocol):
    @property
    def method(self) -> str: ...
    @property
    def url(self) -> object: ...


class Answer(Protocol):
    """What is looked at of an `httpx.Response`; `read` returns the whole body."""

    @property
    def request(self) -> Request: ...
    @property
    def status_code(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    def read(self) -> bytes: ...


def raise_for_problem(answer: Answer) -> None:
    """Return where the status is a success (2xx), with the body unread. Otherwise raise what the answer means:

    Problem            the coordinator's own words
    Transient          5xx, 408 or 429 of a proxy in its place
    UnexpectedAnswer   a redirect, or any other answer that no coordinator gives
    """
    status = answer.status_code
    if 200 <= status < 300:
        return
    body = answer.read()
    retry_after = answer.headers.get("Retry-After", "")
    retry_after_s = float(retry_after) if retry_after.isdecimal() else None
    try:
        problem = Problem.from_document(json.loads(body), retry_after_s=retry_after_s)
    except (ValueError, KeyError, TypeError, AttributeError):
        # Not ours: a proxy's page, or nothing at all.
        if 300 <= status < 400 and "Location" in answer.headers:
            raise UnexpectedAnswer(
                f"{answer.request.url} redirects to {answer.headers['Location']}; give that address"
            ) from None
        said = f"{_where(answer)} answered {status}"
        if status >= 500 or status in _PASSING:
            raise Transient(f"{said}: {_start(body)}", retry_after_s=retry_after_s) from None
        raise UnexpectedAnswer(
            f"{said}, which is not a coordinator's answer: {_start(body)}; check the URL and what lies between"
        ) from None
    raise problem


def read_message(reply: type[Reply], answer: Answer) -> Reply:
    """Return the body as a `reply`. Raises UnexpectedAnswer where it is none: somebody else's page, or a broken one."""
    body = answer.read()
    try:
        return reply.model_validate_json(body)
    except ValidationError as error:
        raise UnexpectedAnswer(
            f"{_where(answer)} answered what is no {reply.__name__}: {_start(body)}; check the URL and what lies "
            "between, and whether both sides have the same version"
        ) from error


def _where(answer: Answer) -> str:
    return f"{answer.request.method} {answer.request.url}"


def _start(body: bytes) -> str:
    return repr(body.decode(errors="replace")[:_SHOWN].strip())
