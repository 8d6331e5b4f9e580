"""The run spec: defaults, and errors that name the key, its value and what is allowed."""

import pytest

from protocol.codecs import CODECS
from protocol.errors import SpecError
from protocol.spec import MAX_SPEC_BYTES, UNITS_PER_WORKER, RunSpec, parse_spec

LEAST = """
name = "demo"
[model]
preset = "tiny"
[sync]
rounds = 4
"""


def test_the_least_spec() -> None:
    spec = parse_spec(LEAST)
    assert (spec.name, spec.seed, spec.model.preset, spec.sync.rounds) == ("demo", 0, "tiny", 4)
    assert (spec.sync.inner_steps, spec.sync.upload_codec, spec.sync.download_codec) == (500, "int8", "int8")
    assert (spec.outer.learning_rate, spec.outer.momentum) == (0.7, 0.9)
    assert spec.unit_tokens == 8 * 256
    assert spec.total_inner_steps == 2000


def test_private_units_have_room() -> None:
    """Each worker's numbers lie in a space of their own, which no run may leave."""
    private = "[data]\nprivate = true\n"
    spec = parse_spec(LEAST + private)
    assert [spec.number_in_set(unit) for unit in (0, 7, UNITS_PER_WORKER, 3 * UNITS_PER_WORKER + 7)] == [0, 7, 0, 7]
    assert parse_spec(LEAST).number_in_set(3 * UNITS_PER_WORKER) == 3 * UNITS_PER_WORKER
    vast = LEAST.replace("rounds = 4", f"rounds = 4\ninner_steps = {UNITS_PER_WORKER // 4}")
    assert parse_spec(vast).sync.most_inner_steps == UNITS_PER_WORKER // 4
    with pytest.raises(SpecError, match="give less of either"):
        parse_spec(vast + private)
    auto = 'rounds = 1024\ninner_steps = "auto"\nround_s = 1.0\nmax_inner_steps = 1_073_741_824'
    with pytest.raises(SpecError, match="give less of either"):
        parse_spec(LEAST.replace("rounds = 4", auto) + private)


def test_a_spec_survives_json() -> None:
    spec = parse_spec(LEAST)
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec


def test_a_spec_does_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse_spec(LEAST).seed = 1  # type: ignore[misc]


def edited(old: str, new: str) -> str:
    assert old in LEAST
    return LEAST.replace(old, new)


ERRORS: dict[str, tuple[str, list[str]]] = {
    "no name": (edited('name = "demo"\n', ""), ["name: this key is missing"]),
    "a bad name": (edited('"demo"', '"De mo"'), ["name = 'De mo'", "^[a-z0-9]"]),
    "no model": (edited('[model]\npreset = "tiny"\n', ""), ["model: this key is missing"]),
    "no rounds": (edited("rounds = 4\n", ""), ["sync.rounds: this key is missing"]),
    "no rounds at all": (edited("rounds = 4", "rounds = 0"), ["sync.rounds = 0", "greater than 0"]),
    "rounds as text": (edited("rounds = 4", 'rounds = "many"'), ["sync.rounds = 'many'", "integer"]),
    "an unknown key": (edited("rounds = 4", "rounds = 4\nround = 5"), ["sync.round: there is no such key"]),
    "an unknown section": (LEAST + "[outr]\n", ["outr: there is no such key"]),
    "an unknown codec": (
        edited("rounds = 4", 'rounds = 4\nupload_codec = "int5"'),
        ["sync.upload_codec = 'int5'", *(f"'{name}'" for name in CODECS)],
    ),
    "an overlap of a round": (edited("rounds = 4", "rounds = 4\noverlap = 500"), ["sync: overlap = 500", '"eager"']),
    "eager and spread": (
        edited("rounds = 4", 'rounds = 4\noverlap = "eager"\noffsets = "spread"'),
        ['overlap = "eager" needs offsets = "together"'],
    ),
    "an alpha for nothing": (
        edited("rounds = 4", "rounds = 4\nalpha = 0.0"),
        ["alpha = 0.0: without an overlap nothing is trained that it could drop; leave it out"],
    ),
    "an alpha of more than all": (edited("rounds = 4", "rounds = 4\nalpha = 1.1"), ["sync.alpha", "or equal to 1"]),
    "an unknown preset": (edited('"tiny"', '"huge"'), ["model.preset = 'huge'", "'tiny', 'llama-150m' or 'llama-1b'"]),
    "no model chosen": (
        edited('preset = "tiny"', ""),
        ["model: give exactly one of preset, config and factory, not none"],
    ),
    "two models chosen": (
        edited('preset = "tiny"', 'preset = "tiny"\nfactory = "a:b"'),
        ["exactly one of preset, config and factory", "['preset', 'factory']"],
    ),
    "a config without a type": (
        edited('preset = "tiny"', "config = {hidden_size = 8}"),
        ['config needs a model_type, for example model_type = "llama"'],
    ),
    "a factory that is none": (edited('preset = "tiny"', 'factory = "my model"'), ["model.factory = 'my model'"]),
    "momentum of one": (LEAST + "[outer]\nmomentum = 1.0\n", ["outer.momentum = 1.0", "less than 1"]),
    "two momenta": (
        edited("rounds = 4", 'rounds = 4\nupload_codec = "sparse"'),
        ['sync.upload_codec = "sparse" needs outer.momentum = 0, not 0.9'],
    ),
    "a codec for uploads only": (
        edited("rounds = 4", 'rounds = 4\ndownload_codec = "ternary"'),
        [
            "sync.download_codec = 'ternary'",
            *(f"'{name}'" for name, codec in CODECS.items() if not codec.error_feedback),
        ],
    ),
    "an infinite rate": (LEAST + "[inner]\nlearning_rate = inf\n", ["inner.learning_rate = inf", "finite"]),
    "grace upside down": (
        LEAST + "[members]\ngrace_min_s = 9.0\ngrace_max_s = 1.0\n",
        ["members", "grace_min_s = 9.0 is larger than grace_max_s = 1.0"],
    ),
    "fragments too small": (
        edited("rounds = 4", "rounds = 4\nfragment_elements = 10"),
        ["sync.fragment_elements = 10", "greater than or equal to 256"],
    ),
    "two faults": (
        edited("rounds = 4", "rounds = -1\nzstd = 7"),
        ["sync.rounds = -1", "sync.zstd = 7", "; "],
    ),
    "no TOML": ("name = demo", ["not valid TOML", "line 1"]),
    "too large": (LEAST + "#" * MAX_SPEC_BYTES, ["larger than 65536 bytes"]),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_key_value_and_what_is_allowed(case: str) -> None:
    text, parts = ERRORS[case]
    with pytest.raises(SpecError) as caught:
        parse_spec(text)
    for part in parts:
        assert part in str(caught.value)


def test_sparse_without_momentum() -> None:
    spec = parse_spec(edited("rounds = 4", 'rounds = 4\nupload_codec = "sparse"') + "\n[outer]\nmomentum = 0.0\n")
    assert spec.sync.upload_codec == "sparse"
