"""Who talks with whom, and what the others are told."""

import pytest

from protocol import PROTOCOL_VERSION, __version__
from protocol.messages import Directive, LeaseReply
from protocol.versions import (
    OURS,
    RESPONSE_HEADERS,
    Version,
    client_version,
    coordinator_version,
    incompatibility,
    request_headers,
)

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
    assert incompatibility(OLD, NEW) == (
        "this client (Outerstep 0.1.4, protocol 1) and the coordinator (Outerstep 0.2.0, protocol 2) do not speak the same "
        "protocol: upgrade this client to Outerstep 0.2.0"
    )
    assert incompatibility(NEW, OLD) == (
        "this client (Outerstep 0.2.0, protocol 2) and the coordinator (Outerstep 0.1.4, protocol 1) do not speak the same "
        "protocol: upgrade the coordinator to Outerstep 0.2.0, or give this client the coordinator's version"
    )


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


def test_a_directive_of_a_later_version_is_passed_over() -> None:
    told = LeaseReply.model_validate_json('{"directive": "hum", "reason": "x", "lease_s": 60, "more": 1}')
    assert told.directive is Directive.CONTINUE
