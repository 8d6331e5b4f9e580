"""The protocol's number changes when messages, headers or requests do."""

import copy
import json
from typing import Any

import pytest

from docs import write_protocol
from docs.write_protocol import breaks
from protocol import PROTOCOL_VERSION

RELEASED: dict[str, Any] = json.loads(write_protocol.FILE.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_what_the_sides_say_has_a_number_of_its_own() -> None:
    last, changes = RELEASED["protocol"], breaks(RELEASED, write_protocol.spoken())
    assert not changes or last < PROTOCOL_VERSION, (
        f"protocol {last} was released, and another one is spoken now: {'; '.join(changes)}. Set PROTOCOL_VERSION = "
        f"{last + 1} in protocol/__init__.py (docs/releasing.md)"
    )
    assert last <= PROTOCOL_VERSION <= last + 1, (
        f"the last released protocol is {last}: until the next release all changes share {last + 1}"
    )


def test_the_last_release_is_on_record() -> None:
    released = write_protocol.released_version()
    assert released in (None, RELEASED["version"]), "run python -m docs.write_protocol (docs/releasing.md)"


def changed(*path: str, to: Any) -> dict[str, Any]:
    """Return the record with the item at `path` replaced, or removed if `to` is None."""
    record = copy.deepcopy(RELEASED)
    *outer, last = path
    holder = record
    for key in outer:
        holder = holder[key]
    if to is None:
        del holder[last]
    else:
        holder[last] = to
    return record


@pytest.mark.parametrize(
    ("path", "to", "said"),
    [
        (("messages", "LeaseReply", "reason"), None, ["LeaseReply.reason is gone"]),
        (("messages", "LeaseReply", "lease_s"), "needed 00000000", ["LeaseReply.lease_s has changed"]),
        (("messages", "LeaseReply", "more"), "needed 00000000", ["LeaseReply.more is new"]),
        (("messages", "LeaseReply", "more"), "optional 00000000", []),
        (("messages", "LeaveRequest", "more"), "optional 00000000", ["LeaveRequest.more is new"]),
        (("messages", "LeaveRequest", "more"), "unsent 00000000", []),
        (("messages", "ContributionHeader", "more"), "needed 00000000", ["ContributionHeader.more is new"]),
        (("messages", "SyncSpec", "more"), "optional 00000000", ["SyncSpec.more is new"]),
        (("messages", "Health"), None, ["Health is gone"]),
        (("messages", "More"), {"…": "ignored"}, []),
        (("words", "Action"), [*RELEASED["words"]["Action"], "hum"], ["Action has other words: hum"]),
        (("words", "Directive"), [*RELEASED["words"]["Directive"], "hum"], []),
        (("words", "Directive"), ["continue", "stop"], ["Directive has other words: drain"]),
        (("codecs", "int8"), "00000000", ["codec int8 has changed"]),
        (("codecs", "more"), "00000000", []),
        (("problems", "gone"), 404, ["problem gone has changed"]),
        (("problems", "more"), 409, []),
        (("requests",), RELEASED["requests"][1:], [f"request {RELEASED['requests'][0]} is gone"]),
    ],
    ids=str,
)
def test_what_breaks_and_what_does_not(path: tuple[str, ...], to: Any, said: list[str]) -> None:
    assert breaks(RELEASED, changed(*path, to=to)) == said


def test_a_spec_key_may_gain_words_and_an_answer_may_not() -> None:
    for message, key, said in (("SyncSpec", "aggregation", []), ("UnitRangeInfo", "state", ["has changed"])):
        before = RELEASED["messages"][message][key]
        found = breaks(RELEASED, changed("messages", message, key, to=f"{before} hum"))
        assert [each.removeprefix(f"{message}.{key} ") for each in found] == said
