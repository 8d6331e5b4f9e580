"""OpenAPI tells what a client meets: problems, headers, media types. (`crew.problem` compares with it every refusal that
a test of the coordinator meets.)"""

import re
from typing import Any

import pytest

from protocol.digest import content_digest
from protocol.errors import PROBLEM_PREFIX, PROBLEMS
from protocol.wire import MEDIA_TYPE
from tests.support.openapi import problems_of, schema

OPERATIONS = [
    pytest.param(path, operation, id=f"{method.upper()} {path}")
    for path, methods in schema()["paths"].items()
    for method, operation in methods.items()
]
DELTA = "/v1/runs/{run}/rounds/{number}/fragments/{fragment}/delta"
CHECKPOINT = "/v1/runs/{run}/checkpoints/{number}/fragments/{fragment}"
UPLOADS = [
    "/v1/runs/{run}/rounds/{number}/fragments/{fragment}/contributions/{worker}",
    "/v1/runs/{run}/checkpoints/0/fragments/{fragment}",
]


def asked(operation: dict[str, Any]) -> dict[str, bool]:
    """The headers of a request, and whether they must be there."""
    headers = [each for each in operation["parameters"] if each["in"] == "header"]
    return {each["name"].lower(): each["required"] for each in headers}


@pytest.mark.parametrize(("path", "operation"), OPERATIONS)
def test_every_refusal_is_a_problem_document(path: str, operation: dict[str, Any]) -> None:
    refusals = {status: answer for status, answer in operation["responses"].items() if int(status) >= 400}
    for status, answer in refusals.items():
        assert answer["content"] == {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
        slugs = problems_of(operation, int(status))
        assert slugs
        assert {int(PROBLEMS[slug][0]) for slug in slugs} == {int(status)}
    expected = {"401", "405", "413", "422", "500"} if path.startswith("/v1/") else {"405", "413", "500"}
    assert expected <= set(refusals)
    of_all = {"X-Request-Id", "Outerstep-Version", "Outerstep-Protocol"}
    assert all(of_all <= set(answer["headers"]) for answer in operation["responses"].values())


def test_every_problem_is_told_somewhere_and_every_reference_leads_somewhere() -> None:
    told: set[str] = set()
    for parameter in OPERATIONS:
        _, operation = parameter.values
        for status in operation["responses"]:  # type: ignore[index]
            told |= problems_of(operation, int(status))  # type: ignore[arg-type]
    assert told == set(PROBLEMS)
    assert set(schema()["components"]["schemas"]["Problem"]["properties"]["type"]["enum"]) == {
        PROBLEM_PREFIX + slug for slug in PROBLEMS
    }
    text = str(schema())
    assert "ValidationError" not in text, "FastAPI's own document of a refusal, which nobody gets"
    for reference in set(re.findall(r"#/components/[\w/-]+", text)):
        found: Any = schema()
        for name in reference.removeprefix("#/").split("/"):
            found = found[name]


@pytest.mark.parametrize("path", UPLOADS)
def test_uploads(path: str) -> None:
    operation = schema()["paths"][path]["put"]
    assert list(operation["requestBody"]["content"]) == [MEDIA_TYPE]
    headers = asked(operation)
    assert headers["content-length"]
    assert headers["content-digest"]
    (pattern,) = [each["schema"]["pattern"] for each in operation["parameters"] if each["name"] == "Content-Digest"]
    assert re.fullmatch(pattern, content_digest(bytes(range(32))))
    assert {"200", "201", "408", "411"} <= set(operation["responses"])


@pytest.mark.parametrize("path", [DELTA, CHECKPOINT])
def test_immutable_bytes(path: str) -> None:
    operation = schema()["paths"][path]["get"]
    assert {"if-none-match", "range", "if-range"} <= set(asked(operation))
    answers = operation["responses"]
    assert list(answers["200"]["content"]) == list(answers["206"]["content"]) == [MEDIA_TYPE]
    assert all({"ETag", "Cache-Control"} <= set(answers[status]["headers"]) for status in ("200", "206", "304"))
    assert all("Content-Range" in answers[status]["headers"] for status in ("206", "416"))
    assert "410" in answers


def test_long_polls_and_streams() -> None:
    paths = schema()["paths"]
    for operation in (paths[DELTA]["get"], paths["/v1/runs/{run}/workers/{worker}/assignment"]["put"]):
        assert "prefer" in asked(operation)
        assert "Preference-Applied" in operation["responses"]["200"]["headers"]
    assert "Retry-After" in paths[DELTA]["get"]["responses"]["404"]["headers"]
    events = paths["/v1/runs/{run}/events"]["get"]
    assert "last-event-id" in asked(events)
    assert set(events["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert "Allow" in events["responses"]["405"]["headers"]
