"""Which facts about its machine a worker may report."""

import math

import pytest
from pydantic import ValidationError

from protocol.messages import MAX_FACT_NAME, MAX_FACT_TEXT, MAX_FACTS, JoinRequest


def test_facts_are_taken_as_they_are() -> None:
    host = {"host": "box-7", "threads": 8, "share": 0.5, "gpu": False, "note": None, "name": "θ" * MAX_FACT_TEXT}
    told = JoinRequest(tensors=[], host=host).host
    assert told == host
    assert [type(each) for each in told.values()] == [type(each) for each in host.values()]


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ({f"k{i}": 1 for i in range(MAX_FACTS + 1)}, "33 facts .* 32"),
        ({"k" * (MAX_FACT_NAME + 1): 1}, "name of a fact has 1 to 64"),
        ({"": 1}, "name of a fact has 1 to 64"),
        ({"k\x1b[31m": 1}, "name of a fact has 1 to 64"),
        ({"host": "x" * (MAX_FACT_TEXT + 1)}, "host = .*printable text of at most 256 characters"),
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
        JoinRequest(tensors=[], host=host)
    assert len(refused.value.errors()) == 1


def test_the_names_of_tensors_and_of_a_tokenizer_can_be_printed() -> None:
    for given in ({"tensors": [{"name": "w\x1b", "shape": [1]}]}, {"data": {"units": 1, "tokenizer": "a\nb"}}):
        with pytest.raises(ValidationError, match="cannot be printed; leave it out"):
            JoinRequest.model_validate({"tensors": [], **given})


def test_the_first_of_a_million_wrong_tensors_is_told() -> None:
    with pytest.raises(ValidationError) as refused:
        JoinRequest.model_validate({"tensors": [{}] * 1_000})
    assert len(refused.value.errors()) == 2  # its name and its shape
