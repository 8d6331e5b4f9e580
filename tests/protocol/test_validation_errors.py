"""pydantic's errors as sentences."""

import re

import pytest

from protocol.errors import SpecError
from protocol.spec.run import parse_spec

INTERNAL = re.compile(r"constrained|function-|literal\[|Value error|\b(int|str|path)\b[ :=]")
BAD: dict[str, list[object]] = {
    "sync.inner_steps": [-3, 1.5, '"later"', "[]"],
    "sync.rounds": [0, '"many"', "{}"],
    "inner.clip_norm": ['"some"', -1],
    "inner.learning_rate": [-1, '"high"', "nan"],
    "members.min_workers": [0, "{}"],
    "evaluation.max_tokens": [-1, '"all"'],
    "outer.momentum": [2, '"x"'],
    "sync.upload_codec": ['"int5"', 5],
    "name": ['"Not A Name"', 5],
    "sync.alpha": [7, '"x"'],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD.items() for value in values])
def test_a_wrong_value_of_a_spec_is_named_by_its_key_alone(key: str, value: object) -> None:
    given = {"name": '"r"', "model.preset": '"tiny"', "sync.rounds": 3} | {key: value}
    with pytest.raises(SpecError) as raised:
        parse_spec("".join(f"{name} = {each}\n" for name, each in given.items()))
    told = str(raised.value)
    assert told.startswith(key), told
    assert told.count(f"{key}") == 1 or key == "name", told
    assert not INTERNAL.search(told), told
