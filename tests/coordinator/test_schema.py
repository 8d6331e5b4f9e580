"""What is answered is what OpenAPI tells: requests made from the schema, good ones and broken ones, with every kind of
token, against a real coordinator. Never a 500; no status, media type or body that the schema does not tell of.

The examples are the same every time. Most names and numbers in an address are of what is there, or nothing would be
found behind any of them; and most requests are of who may ask them.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from harness.coordinator import InThread
from protocol.digest import content_digest, digest
from protocol.messages import Scope
from protocol.wire import MEDIA_TYPE
from tests.coordinator.crew import crew
from tests.coordinator.test_tokens import HERE, Kind, may
from tests.support.openapi import schema


@schemathesis.serializer("application/toml", MEDIA_TYPE)
def as_bytes(context: Any, value: Any) -> bytes:
    """What the schema calls a string, as the bytes of a body."""
    return value if isinstance(value, bytes) else str(value).encode()


pytestmark = pytest.mark.system

FOUND = list(schemathesis.openapi.from_dict(schema()).get_all_operations())
OPERATIONS = [found.ok() for found in FOUND if isinstance(found, Ok)]
KINDS = ["none", *Scope, "member"]
EXAMPLES, REFUSED = 8, 2  # of each request, good and broken ones alike: by who may ask it, and by who may not
THERE = {"run": "here", "worker": "a", "number": 0, "fragment": 0}


def no_fault(ctx: Any, response: Any, case: Any) -> None:
    """503 is no fault, and is told of: the checkpoint of a run that has just begun may still be on its way to the disk."""
    assert response.status_code < 500 or response.status_code == 503, response.text


CHECKS = [
    no_fault,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def asking(shared: InThread) -> Iterator[Callable[[str, str], requests.Session]]:
    """A session with a token of a kind, for a run as it begins; one that somebody has written to is not used again."""
    kept: dict[str, tuple[str, requests.Session]] = {}
    sessions: list[requests.Session] = []
    numbers = itertools.count()

    def ask_as(kind: str, method: str) -> requests.Session:
        if kind not in kept:
            run = f"schema-{next(numbers)}"
            (member,) = crew(shared, run, ["a"])
            session = requests.Session()
            if kind == "member":
                session.headers["Authorization"] = f"Bearer {member.joined.member_token}"
            elif kind != "none":
                session.headers["Authorization"] = f"Bearer {shared.token(Scope(kind))}"
            sessions.append(session)
            kept[kind] = run, session
        THERE["run"], session = kept[kind]
        if method != "get":
            del kept[kind]
        return session

    yield ask_as
    for session in sessions:
        session.close()


def test_every_operation_is_one_that_can_be_asked_for() -> None:
    assert len(OPERATIONS) == len(FOUND) == sum(len(methods) for methods in schema()["paths"].values())


def as_it_is_sent(case: Any, *, there: bool) -> Any:
    """The case with the names of what is there, and then the digest of its body; without waiting."""
    if there:
        case.path_parameters |= {name: THERE[name] for name in case.path_parameters if name in THERE}
        if "Content-Digest" in case.headers and isinstance(case.body, bytes):
            case.headers["Content-Digest"] = content_digest(digest(case.body))
    case.headers.pop("Content-Length", None)  # another than the body's makes it no request
    if "Prefer" in case.headers:
        case.headers["Prefer"] = "wait=0"
    return case


@pytest.mark.nightly
@pytest.mark.covers("security:any-request")
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: f"{operation.method.upper()} {operation.path}")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_answered_is_what_openapi_tells(
    shared: InThread, asking: Callable[[str, str], requests.Session], kind: str, operation: Any
) -> None:
    session = asking(kind, operation.method)
    allowed = may(Kind(kind, HERE if kind == "member" else None), operation.method.upper(), operation.path)
    strategies = [operation.as_strategy(generation_mode=mode) for mode in GenerationMode]

    @settings(max_examples=EXAMPLES if allowed else REFUSED, suppress_health_check=list(HealthCheck))
    @given(case=st.one_of(strategies), there=st.sampled_from([True, True, True, False]))
    def asked(case: Any, there: bool) -> None:
        as_it_is_sent(case, there=there).call_and_validate(base_url=shared.url, session=session, checks=CHECKS)

    asked()
