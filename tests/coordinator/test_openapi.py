"""OpenAPI tells what a client meets: problems, media types. (`crew.problem` compares with it every refusal that
a test of the coordinator meets.)"""

import re
from typing import Any

import pytest

from protocol.errors import PROBLEM_PREFIX, PROBLEMS
from tests.support.openapi import problems_of, schema

OPERATIONS = [
    pytest.param(path, operation, id=f"{method.upper()} {path}")
    for path, methods in schema()["paths"].items()
    for method, operation in methods.items()
]


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
