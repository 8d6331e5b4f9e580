"""Messages: requests refuse what they do not know, replies take it; which facts about its machine a worker reports; and who
talks with whom."""

import math
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from protocol import PROTOCOL_VERSION, __version__, messages
from protocol.errors import PROBLEM_PREFIX, Problem
from protocol.versions import (
    OURS,
    RESPONSE_HEADERS,
    Version,
    client_version,
    coordinator_version,
    incompatibility,
    request_headers,
)

DIGEST = "ab" * 32


BAD: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (messages.RunChange, {"state": "finished"}),
    (messages.DataSummary, {"digest": DIGEST.upper(), "units": 1}),
    (messages.DataSummary, {"digest": DIGEST, "units": 0}),
    (messages.Metrics, {"loss": "NaN"}),
    (messages.Metrics, {"round": -1}),
    (messages.Metrics, {"round": 1 << 63}),
    (messages.EvaluationReport, {"loss": float("inf"), "tokens": 1}),
    (messages.EvaluationReport, {"loss": 1.0, "tokens": 1, "bytes": 0}),
    (messages.TokenRequest, {"scope": "root"}),
    (messages.TokenRequest, {"scope": "viewer", "note": "x" * 201}),
    (messages.TokenRequest, {"scope": "viewer", "names": 1}),
    (messages.TokenRequest, {"scope": "worker", "uses": 1}),
    (messages.TokenRequest, {"scope": "worker", "expires_in_s": "inf"}),
    (messages.ExchangeRequest, {"token": "ost_short"}),
    (messages.JoinRequest, {"tensors": [{"name": "", "shape": []}]}),
    (messages.JoinRequest, {"tensors": [{"name": "w", "shape": [1.5]}]}),
]


@pytest.mark.parametrize(("kind", "document"), BAD)
def test_bad_requests(kind: type[BaseModel], document: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        kind.model_validate(document)


def test_requests_refuse_unknown_keys_and_replies_take_them() -> None:
    with pytest.raises(ValidationError, match="surprise"):
        messages.AssignmentRequest.model_validate({"state_round": 1, "surprise": 1})
    reply = {"directive": "hum", "reason": "", "lease_s": 1.0, "surprise": 1}
    assert messages.LeaseReply.model_validate(reply).directive == "continue", "of a later version"


def test_a_metric_that_is_not_known_yet_costs_no_lease() -> None:
    """A worker of a later version was refused its heartbeat, and with it the run, for a figure that is only shown."""
    newer = {"loss": 0.5, "watts": 350.0}
    assert messages.Metrics.model_validate(newer) == messages.Metrics(loss=0.5)
    assert messages.LeaveRequest.model_validate({"metrics": newer}).metrics.loss == 0.5
    with pytest.raises(ValidationError, match="loss"):
        messages.Metrics.model_validate({"loss": "low"})


@pytest.mark.parametrize("document", [{}, {"type": "about:blank", "detail": ""}, {"type": PROBLEM_PREFIX + "internal"}])
def test_problems_of_others_are_told_apart(document: dict[str, Any]) -> None:
    with pytest.raises(KeyError):
        Problem.from_document(document)


def test_only_known_problems_are_raised() -> None:
    with pytest.raises(KeyError, match="no-such"):
        Problem("no-such", "")


def test_facts_are_taken_as_they_are() -> None:
    host = {
        "host": "box-7",
        "threads": 8,
        "share": 0.5,
        "gpu": False,
        "note": None,
        "name": "θ" * messages.MAX_FACT_TEXT,
    }
    told = messages.JoinRequest(tensors=[], host=host).host
    assert told == host
    assert [type(each) for each in told.values()] == [type(each) for each in host.values()]


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ({f"k{i}": 1 for i in range(messages.MAX_FACTS + 1)}, "33 facts .* 32"),
        ({"k" * (messages.MAX_FACT_NAME + 1): 1}, "name of a fact has 1 to 64"),
        ({"": 1}, "name of a fact has 1 to 64"),
        ({"k\x1b[31m": 1}, "name of a fact has 1 to 64"),
        ({"host": "x" * (messages.MAX_FACT_TEXT + 1)}, "host = .*printable text of at most 256 characters"),
        ({"host": "\x1b[2J"}, "host = .*printable text"),
        ({"host": "two\nlines"}, "host = .*printable text"),
        ({"share": math.nan}, "share = float: .*finite number"),
        ({"share": math.inf}, "share = float: .*finite number"),
        ({"threads": 1 << 63}, "threads = int: .*finite number"),
        ({"gpus": ["a", "b"]}, "gpus = list: "),
        ({"gpus": {"a": 1}}, "gpus = dict: "),
    ],
)
def test_what_is_no_fact_is_refused(host: dict, said: str) -> None:
    with pytest.raises(ValidationError, match=said) as refused:
        messages.JoinRequest(tensors=[], host=host)
    assert len(refused.value.errors()) == 1


def test_the_names_of_tensors_and_of_a_tokenizer_can_be_printed() -> None:
    for given in ({"tensors": [{"name": "w\x1b", "shape": [1]}]}, {"data": {"units": 1, "tokenizer": "a\nb"}}):
        with pytest.raises(ValidationError, match="cannot be printed; leave it out"):
            messages.JoinRequest.model_validate({"tensors": [], **given})


def test_the_first_of_a_million_wrong_tensors_is_told() -> None:
    with pytest.raises(ValidationError) as refused:
        messages.JoinRequest.model_validate({"tensors": [{}] * 1_000})
    assert len(refused.value.errors()) == 2  # its name and its shape


# --- versions -------------------------------------------------------------------------------------------------------

OLD, NEW = Version("1", "0.1.4"), Version("2", "0.2.0")


def test_both_sides_say_what_they_are() -> None:
    assert client_version(request_headers("worker")) == coordinator_version(RESPONSE_HEADERS) == OURS
    assert request_headers("worker")["User-Agent"] == f"outerstep/{__version__} (worker)"
    assert (str(PROTOCOL_VERSION), __version__) == OURS


def test_the_same_protocol_talks_whatever_the_version() -> None:
    assert incompatibility(Version("1", "0.1.0"), Version("1", "0.9.3")) is None
    assert incompatibility(Version("1"), OLD) is incompatibility(OLD, Version(" 1".strip())) is None


def test_who_says_nothing_is_not_refused() -> None:
    assert incompatibility(Version(None, "7.0"), NEW) is incompatibility(NEW, Version(None)) is None
    assert client_version({"User-Agent": "curl/8.1"}) == (None, None)


def test_the_older_side_is_the_one_to_upgrade() -> None:
    of_both = "this client (Outerstep 0.1.4, protocol 1) and the coordinator (Outerstep 0.2.0, protocol 2)"
    assert str(incompatibility(OLD, NEW)).startswith(of_both)
    assert str(incompatibility(OLD, NEW)).endswith(": upgrade this client to Outerstep 0.2.0")
    assert ": upgrade the coordinator to Outerstep 0.2.0, or give this client" in str(incompatibility(NEW, OLD))


@pytest.mark.parametrize("told", ["", "1.5", "-1", "²", "one", "9" * 40, "\x1b[31m1"])
def test_what_is_no_number_is_another_protocol_and_harmless(told: str) -> None:
    for found in (
        incompatibility(client_version({"Outerstep-Protocol": told}), OLD),
        incompatibility(OLD, Version(told)),
    ):
        assert found is not None
    assert "\x1b" not in str(incompatibility(client_version({"Outerstep-Protocol": told, "User-Agent": told}), OLD))


@pytest.mark.parametrize(
    "agent", ["python-httpx/0.28", "outerstep/" + "9" * 33, "outerstep/0.1\x1b[31m", "my-outerstep/1"]
)
def test_a_version_that_is_none_is_not_repeated(agent: str) -> None:
    assert client_version({"User-Agent": agent}).software is None
