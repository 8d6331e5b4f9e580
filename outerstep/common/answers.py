"""Reading of HTTP responses, for both clients: the worker and the operator's commands.

A response is a message, a coordinator's problem, or something from another server, such as a proxy. Any object shaped
like an `httpx.Response` with an unread body will do, so this module does not need httpx.

The server may be hostile, and no token protects against that. So every kind of body has a limit (LIMITS), and bodies
are read piece by piece up to it. Clients request uncompressed bodies and reject compressed ones, because a kilobyte of
gzip can contain a megabyte.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from outerstep.common.connections import proxy_of
from protocol.errors import PROBLEM_PREFIX, PROBLEMS, BeyondLimits, NotUnderstood, Problem, Transient, UnexpectedAnswer
from protocol.messages import Assignment, CheckpointDetail, JoinReply, Page, RoundDetail
from protocol.text import printable
from protocol.validation_errors import explain_all
from protocol.versions import OURS, coordinator_version, different_builds, incompatibility

Reply = TypeVar("Reply", bound=BaseModel)


class Limit(NamedTuple):
    """The maximum bytes and values of a message; parsing it costs memory for both."""

    most_bytes: int
    most_values: int


MESSAGE = Limit(1 << 20, 1 << 15)
# The larger messages. A thousand workers in a round of a hundred fragments are 20 MB of verdicts; the largest layout,
# of MAX_TENSORS and MAX_FRAGMENTS, is 38 MB as part of a checkpoint.
LIMITS: dict[type[BaseModel], Limit] = {
    Assignment: Limit(4 << 20, 1 << 18),  # with MAX_UNIT_RANGES
    Page: Limit(16 << 20, 1 << 19),
    RoundDetail: Limit(64 << 20, 1 << 22),
    JoinReply: Limit(64 << 20, 1 << 22),
    CheckpointDetail: Limit(64 << 20, 1 << 22),
}
ERROR_BYTES = 1 << 16  # of a problem; a longer one is not a coordinator's

_SHOWN = 200  # characters of an unexpected response that are shown
_HEAD = 4096  # bytes of a page that are searched for its title
_TITLE = re.compile(rb"<title>(.*?)</title>", re.IGNORECASE | re.DOTALL)
_DIGITS = re.compile(r"[0-9]{1,18}")
_TRANSIENT = (408, 429)  # statuses of proxies, besides 5xx, for which a retry helps


class Request(Protocol):
    """The part of `httpx.Request` that is used."""

    @property
    def method(self) -> str: ...
    @property
    def url(self) -> object: ...


class Answer(Protocol):
    """The part of `httpx.Response` that is used; `iter_bytes` yields the body as it arrives."""

    @property
    def request(self) -> Request: ...
    @property
    def status_code(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    def iter_bytes(self) -> Iterator[bytes]: ...


def header_number(text: str) -> int | None:
    """Return the number in a header, in ASCII digits as HTTP requires; None for anything else, such as `²`, which
    `str.isdigit` accepts and `int` does not, and for more digits than bytes or seconds ever have."""
    return int(text) if _DIGITS.fullmatch(text) else None


def limit_of(reply: type[BaseModel]) -> Limit:
    """Return the limit of a message of this type."""
    return next((limit for kind, limit in LIMITS.items() if issubclass(reply, kind)), MESSAGE)


def values_of(body: bytes) -> int:
    """Return an upper bound of the number of values in a JSON body, without parsing it."""
    return 1 + sum(map(body.count, (b",", b"[", b"{")))


def check_not_encoded(answer: Answer) -> None:
    """Raise BeyondLimits if the body is compressed."""
    if (encoding := _encoding(answer)) is not None:
        raise BeyondLimits(
            f"{_where(answer)} answered with Content-Encoding {encoding}, though the request asked for identity; turn "
            "off compression in the proxy or server that answers there"
        )


def pieces_within(answer: Answer, limit_bytes: int) -> Iterator[bytes]:
    """Yield the body as it arrives. Raises BeyondLimits before reading if it is compressed or announced as longer than
    `limit_bytes`, otherwise as soon as it is longer."""
    check_not_encoded(answer)
    announced, size = header_number(answer.headers.get("Content-Length", "")), 0
    if announced is not None and announced > limit_bytes:
        raise BeyondLimits(f"{_where(answer)} announces {announced} bytes; {_expected(limit_bytes)}")
    for piece in answer.iter_bytes():
        size += len(piece)
        if size > limit_bytes:
            raise BeyondLimits(f"{_where(answer)} answered with more than expected; {_expected(limit_bytes)}")
        yield piece


def read_body(answer: Answer, limit_bytes: int) -> bytes:
    """Return the body. Raises BeyondLimits as `pieces_within` does."""
    return b"".join(pieces_within(answer, limit_bytes))


def beginning(answer: Answer, most_bytes: int) -> bytes:
    """Read and return at most the first `most_bytes` of the body; nothing if it is compressed."""
    if _encoding(answer) is not None:
        return b""
    pieces, size = [], 0
    for piece in answer.iter_bytes():
        pieces.append(piece)
        size += len(piece)
        if size > most_bytes:
            break
    return b"".join(pieces)[:most_bytes]


def raise_for_problem(answer: Answer) -> None:
    """Return if the status is a success (2xx) of our protocol, without reading the body. Otherwise raise what the
    response means:

    NotUnderstood      the coordinator speaks another protocol, or sent a problem that is unknown here
    Problem            the coordinator refused
    Transient          a proxy answered 5xx, 408 or 429 instead
    UnexpectedAnswer   a redirect, or any other response that no coordinator gives
    """
    status, difference = answer.status_code, incompatibility(OURS, coordinator_version(answer.headers))
    if difference is not None:
        raise NotUnderstood(difference)
    if 200 <= status < 300:
        return
    body = beginning(answer, ERROR_BYTES)
    retry_after_s = header_number(answer.headers.get("Retry-After", ""))
    said = f"{_where(answer)} answered {status}"
    try:
        document = json.loads(body)
        slug, detail = str(document["type"]), printable(str(document["detail"]))
        if slug.startswith(PROBLEM_PREFIX) and slug.removeprefix(PROBLEM_PREFIX) not in PROBLEMS:
            raise _unknown_problem(f"{said}: {printable(slug)[:_SHOWN]}: {detail}", status, retry_after_s)
        problem = Problem.from_document(document, retry_after_s=retry_after_s)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        # Not from a coordinator: a proxy's page, or nothing at all.
        if 300 <= status < 400 and "Location" in answer.headers:
            raise UnexpectedAnswer(
                f"{answer.request.url} redirects to {answer.headers['Location']}; use that address"
            ) from None
        if status >= 500 or status in _TRANSIENT:
            if status >= 500 and not body:
                why = "with nothing, as a proxy or load balancer does that reaches no coordinator"
                raise Transient(f"{said} {why}", retry_after_s=retry_after_s) from None
            raise Transient(f"{said}: {_start(body)}", retry_after_s=retry_after_s) from None
        raise UnexpectedAnswer(
            f"{said}, which is not a coordinator's response: {_start(body)}; check the URL and any proxy"
        ) from None
    raise problem


def read_message(reply: type[Reply], answer: Answer) -> Reply:
    """Return the body as a `reply`. Raises NotUnderstood for a message of another version, BeyondLimits for a body that
    is too large or compressed, and UnexpectedAnswer for another server's page or a broken body."""
    limit = limit_of(reply)
    body = read_body(answer, limit.most_bytes)
    if values_of(body) > limit.most_values:
        raise BeyondLimits(f"{_where(answer)} answered with a {reply.__name__} of more than {limit.most_values} values")
    try:
        return reply.model_validate_json(body)
    except ValidationError as error:
        coordinator, faults = coordinator_version(answer.headers), error.errors()
        if coordinator.protocol is not None and all(fault["type"] != "json_invalid" for fault in faults):
            raise NotUnderstood(
                f"{_where(answer)} answered with fields or values that this client does not know: "
                f"{explain_all(faults, most=3)}; {different_builds(OURS, coordinator)}"
            ) from error
        raise UnexpectedAnswer(
            f"{_where(answer)} answered, but not with the message {reply.__name__}: {_start(body)}; check the URL "
            "and any proxy, and that both sides have the same version"
        ) from error


def _unknown_problem(said: str, status: int, retry_after_s: float | None) -> Transient | NotUnderstood:
    """Return the error for a problem that is unknown here, from a later coordinator: its status decides."""
    if status >= 500 or status in _TRANSIENT:
        return Transient(said, retry_after_s=retry_after_s)
    return NotUnderstood(f"{said} (Outerstep {OURS.software} does not know this problem; the coordinator may be newer)")


def _where(answer: Answer) -> str:
    """Return method and URL of the request, and the proxy of the environment if it went through one. Without the query,
    which may contain a secret after a redirect."""
    url = str(answer.request.url).partition("?")[0]
    proxy = proxy_of(url)
    return f"{answer.request.method} {url}" + ("" if proxy is None else f", through the proxy {proxy},")


def _encoding(answer: Answer) -> str | None:
    """Return the body's compression; None if it is not compressed."""
    named = [each.strip().lower() for each in answer.headers.get("Content-Encoding", "").split(",")]
    encodings = [each for each in named if each not in ("", "identity")]
    return printable(", ".join(encodings))[:_SHOWN] if encodings else None


def _expected(limit_bytes: int) -> str:
    return f"at most {limit_bytes} bytes are expected. Check the URL and any proxy"


def _start(body: bytes) -> str:
    title = _TITLE.search(body[:_HEAD])
    if title is not None:
        return f"a page called {' '.join(title[1].decode(errors='replace').split())[:_SHOWN]!r}"
    return repr(body.decode(errors="replace")[:_SHOWN].strip())
