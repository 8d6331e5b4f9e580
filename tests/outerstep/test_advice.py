"""What is noted of a spec outside of what was found sound."""

from pathlib import Path

import pytest

from outerstep.cli.run.advice import advice
from protocol.spec.run import parse_spec
from tests.outerstep.conftest import Served
from tests.support.tokenizers import write_tokenizer

SOUND = """
name = "sound"
model.preset = "tiny"
members.min_workers = 8
[outer]
learning_rate = {rate}
momentum = {momentum}
[sync]
wait = "always"
rounds = {rounds}
inner_steps = {h}
upload_codec = "{codec}"
"""


def noted(*, rate: float = 1.0, momentum: float = 0.8, rounds: int = 60, h: int = 50, codec: str = "int4") -> list[str]:
    text = SOUND.format(rate=rate, momentum=momentum, rounds=rounds, h=h, codec=codec)
    return [each.split(" ", 1)[0] for each in advice(parse_spec(text))]


def test_nothing_is_noted_of_what_is_sound() -> None:
    assert noted() == []
    assert noted(momentum=0.0, h=1, rounds=3000) == [], "rounds of one step are synchronous training"
    assert noted(momentum=0.0, codec="sparse") == [], "what is not sent yet is its momentum"
    assert noted(rounds=4, h=10, momentum=0.9) == [], "a trial"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rounds": 20, "h": 150}, ["sync.rounds"]),
        ({"rounds": 20, "h": 150, "momentum": 0.9}, ["sync.rounds", "outer.momentum"]),
        ({"rounds": 300, "h": 10}, ["outer.momentum"]),
        ({"rate": 2.5, "momentum": 0.0}, ["outer.learning_rate"]),
        ({"momentum": 0.0}, ["outer.learning_rate"]),
    ],
)
def test_what_is_outside_is_noted(changes: dict[str, float], expected: list[str]) -> None:
    assert noted(**changes) == expected  # type: ignore[arg-type]


def test_another_end_of_text_than_the_tokenizers_is_noted(tmp_path: Path) -> None:
    text = 'name = "a"\nmodel.config = {{model_type = "llama"{more}}}\ndata.tokenizer = "{name}"\nsync = {{rounds = 2, inner_steps = 4}}'
    directory = write_tokenizer(tmp_path)
    wrong = parse_spec(text.format(more=", eos_token_id = 2", name=directory))
    (note,) = advice(wrong)
    assert "eos_token_id = 2" in note
    assert "documents with 0" in note
    for more, name in (("", directory), (", eos_token_id = 0", directory), (", eos_token_id = 2", "bytes")):
        assert advice(parse_spec(text.format(more=more, name=name))) == []


def test_few_rounds_are_told_what_they_cost_and_how_to_have_more() -> None:
    text = SOUND.format(rate=1.0, momentum=0.8, rounds=20, h=150, codec="int4")
    (note,) = advice(parse_spec(text))
    assert "5% above synchronous training" in note
    assert "3,000 inner steps in at least 50 rounds, of sync.inner_steps = 60, end about 2% above it" in note
    assert "extrapolated" not in note
    (far,) = advice(parse_spec(SOUND.format(rate=1.0, momentum=0.8, rounds=20, h=2000, codec="int4")))
    assert far.endswith("(extrapolated)")


def test_a_run_is_created_with_notes_on_stderr(served: Served) -> None:
    text = SOUND.format(rate=1.0, momentum=0.8, rounds=20, h=150, codec="int4")
    code, out, err = served.outerstep("run", "create", "-", stdin=text)
    assert (code, "is created" in out) == (0, True)
    assert err.startswith("note: sync.rounds = 20: ")
