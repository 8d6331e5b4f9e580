"""The run spec: defaults, and errors that name the key, its value and what is allowed."""

import re
from typing import Any

import pytest

from protocol.codecs import CODECS
from protocol.errors import SpecError
from protocol.spec.run import MAX_SPEC_BYTES, UNITS_PER_WORKER, RunSpec, parse_spec

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
    assert spec.unit_tokens == 8 * 256
    assert spec.total_inner_steps == 2000


def test_private_units_have_room() -> None:
    """Each worker's numbers lie in a space of their own, which no run may leave."""
    private = "[data]\nprivate = true\n"
    spec = parse_spec(LEAST + private)
    assert [spec.number_in_set(unit) for unit in (0, 7, UNITS_PER_WORKER, 3 * UNITS_PER_WORKER + 7)] == [0, 7, 0, 7]
    assert parse_spec(LEAST).number_in_set(3 * UNITS_PER_WORKER) == 3 * UNITS_PER_WORKER
    vast = LEAST.replace("rounds = 4", f"rounds = {UNITS_PER_WORKER >> 20}\ninner_steps = {1 << 20}")
    assert parse_spec(vast).sync.inner_steps == 1 << 20
    with pytest.raises(SpecError, match="data.private = true has room"):
        parse_spec(vast + private)


@pytest.mark.covers("security:huge-spec-numbers")
def test_no_number_of_a_spec_is_without_bounds() -> None:
    def unbounded(schema: dict[str, Any]) -> bool:
        kinds = [schema, *schema.get("anyOf", [])]
        return any(
            kind.get("type") in ("integer", "number") and not {"maximum", "exclusiveMaximum"} & kind.keys()
            for kind in kinds
        )

    schema = RunSpec.model_json_schema()
    sections = [schema, *schema["$defs"].values()]
    found = [
        f"{each['title']}.{key}" for each in sections for key, field in each["properties"].items() if unbounded(field)
    ]
    assert found == []


@pytest.mark.covers("security:huge-spec-numbers")
def test_the_tokens_of_an_inner_step_are_bounded() -> None:
    with pytest.raises(SpecError, match="1,099,511,627,776 tokens per inner step"):
        parse_spec(LEAST + "[data]\nsequence_length = 1048576\n[inner]\nbatch_size = 1048576\n")


@pytest.mark.covers("security:huge-model")
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("num_hidden_layers = 100_000_000\nhidden_size = 64", "config.num_hidden_layers = 100,000,000"),
        ("n_layer = 100_000_000\nn_embd = 64", "config.n_layer = 100,000,000"),
        ("text_config = { num_hidden_layers = 100_000_000 }", "config.num_hidden_layers = 100,000,000"),
        ("num_hidden_layers = 4\nhidden_size = 1_000_000", "at least 4,000,000,000,000 parameters"),
    ],
)
def test_a_model_that_nobody_can_train_is_refused(config: str, said: str) -> None:
    text = edited('[model]\npreset = "tiny"', f'[model.config]\nmodel_type = "llama"\n{config}')
    with pytest.raises(SpecError, match=re.escape(said)):
        parse_spec(text)


def edited(old: str, new: str) -> str:
    assert old in LEAST
    return LEAST.replace(old, new)


SCRIPT = '[data]\nsource = "custom"\n'
TINY, ROUNDS = 'preset = "tiny"', "rounds = 4"
ERRORS: dict[str, tuple[str, list[str]]] = {
    "no name": (edited('name = "demo"\n', ""), ["name: this key is missing"]),
    "a bad name": (edited('"demo"', '"De mo"'), ["name = 'De mo': a name has at most 63", "such as 'de-mo'"]),
    "a preset that is nearly one": (edited('"tiny"', '"tinny"'), ["model.preset = 'tinny'", "did you mean 'tiny'?"]),
    "an optimizer that is none": (
        LEAST + '[inner]\noptimizer = "adam w"\n',
        ["inner.optimizer = 'adam w': give adamw, muon, sgd or module:function"],
    ),
    "a function without its module": (
        edited(TINY, 'factory = "make"'),
        ["model.factory = 'make': give module:function"],
    ),
    "no model": (
        edited(f"[model]\n{TINY}\n", ""),
        ["model: give exactly one of preset, config, factory and pretrained"],
    ),
    "no rounds": (edited("rounds = 4\n", ""), ["sync.rounds: this key is missing"]),
    "an unknown key": (edited(ROUNDS, "rounds = 4\nround = 5"), ["sync.round: unknown key; did you mean sync.rounds?"]),
    "a key in the wrong place": ("rounds = 4\n" + LEAST, ["rounds: unknown key; did you mean sync.rounds?"]),
    "an overlap of a round": (edited(ROUNDS, "rounds = 4\noverlap = 500"), ["sync: overlap = 500", '"eager"']),
    "eager and spread": (
        edited(ROUNDS, 'rounds = 4\noverlap = "eager"\noffsets = "spread"'),
        ['overlap = "eager" needs offsets = "together"'],
    ),
    "an optimizer for scripts": (
        LEAST + SCRIPT + "[inner]\nbatch_size = 4\njoiner_warmup_steps = 3\nlearning_rate = 0.1\n",
        ['inner.learning_rate = 0.1 does nothing with data.source = "custom"'],
    ),
    "an overlap without waiting": (edited(ROUNDS, "rounds = 4\noverlap = 4"), ['need wait = "always"']),
    "two models chosen": (edited(TINY, f'{TINY}\nfactory = "a:b"'), ["exactly one of preset", "['preset', 'factory']"]),
    "another run's parameters for a script": (edited(TINY, 'run = "other"') + SCRIPT, ["without model.run"]),
    "a config without a type": (edited(TINY, "config = {hidden_size = 8}"), ["config needs a model_type"]),
    "a vocabulary of a model that has its own": (
        edited(TINY, 'factory = "a:b"\nvocab_size = 300'),
        ["vocab_size needs preset"],
    ),
    "a revision of nothing": (edited('"tiny"', '"tiny"\nrevision = "main"'), ["revision needs pretrained"]),
    "a round of no run": (edited('"tiny"', '"tiny"\nround = 3'), ["round needs run: give both, or leave round out"]),
    "adapters on a model that knows nothing": (edited('"tiny"', '"tiny"\n[model.lora]'), ["lora needs pretrained"]),
    "a run that starts from itself": (edited('"tiny"', '"tiny"\nrun = "demo"'), ["'demo' is this run itself"]),
    "two momenta": (
        edited(ROUNDS, 'rounds = 4\nupload_codec = "sparse"'),
        ['sync.upload_codec = "sparse" needs outer.momentum = 0, not 0.6'],
    ),
    "a codec for uploads only": (
        edited(ROUNDS, 'rounds = 4\ndownload_codec = "ternary"'),
        ["sync.download_codec = 'ternary'", *(f"'{name}'" for name, each in CODECS.items() if not each.error_feedback)],
    ),
    "AdamW's setting with SGD": (
        LEAST + '[inner]\noptimizer = "sgd"\nbeta1 = 0.9\n',
        ['inner.beta1 = 0.9 does nothing with optimizer = "sgd": leave it out'],
    ),
    "Muon's settings with AdamW": (
        LEAST + '[inner]\noptimizer = "adamw"\nmuon_learning_rate = 0.01\nmomentum = 0.5\n',
        ["inner.momentum = 0.5 does nothing", "inner.muon_learning_rate = 0.01 does nothing"],
    ),
    "a decay of the cosine": (
        LEAST + "[inner]\ndecay_fraction = 0.2\n",
        ['inner.decay_fraction = 0.2 does nothing with schedule = "cosine"'],
    ),
    "an end of what is constant": (
        LEAST + '[inner]\nschedule = "constant"\nfinal_fraction = 0.1\n',
        ['inner.final_fraction = 0.1 does nothing with schedule = "constant"'],
    ),
    "grace upside down": (
        LEAST + "[members]\ngrace_min_s = 9.0\ngrace_max_s = 1.0\n",
        ["members", "grace_min_s = 9.0 is larger than grace_max_s = 1.0"],
    ),
    "too few learned positions": (
        edited(TINY, 'config = { model_type = "gpt2", n_positions = 64 }') + "\n[data]\nsequence_length = 65\n",
        ["data.sequence_length = 65 is more than the 64 positions of the model (n_positions)"],
    ),
    "two faults": (edited(ROUNDS, "rounds = -1\nzstd = 7"), ["sync.rounds = -1", "sync.zstd = 7", "; "]),
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


@pytest.mark.parametrize(
    ("model", "inner", "expected"),
    [
        ('preset = "tiny"', "", ("muon", 0.4 / 64)),
        ('preset = "llama-150m"', "", ("muon", 4e-4)),
        ('preset = "llama-1b"', "", ("muon", 4e-4)),
        ('preset = "tiny"', "learning_rate = 1e-3", ("muon", 1e-3)),
        ('preset = "tiny"', 'optimizer = "adamw"', ("adamw", 0.4 / 64)),
        # Its JSON names all keys, also those that do nothing: only who writes them himself is told.
        ('preset = "tiny"', 'optimizer = "sgd"\nmomentum = 0.5', ("sgd", 0.4 / 64)),
        ('config = { model_type = "llama", hidden_size = 512 }', "", ("muon", 0.4 / 512)),
        ('config = { model_type = "llama", hidden_size = 16 }', "", ("muon", 8e-3)),
        ('config = { model_type = "gpt2" }', "", ("muon", 4e-4)),
        ('factory = "mine:model"', "", ("adamw", 4e-4)),
        ('pretrained = "llama"', "", ("adamw", 4e-4)),
    ],
)
def test_the_model_says_what_the_inner_optimizer_is_by_default(
    model: str, inner: str, expected: tuple[str, float]
) -> None:
    spec = parse_spec(f'name = "r"\nsync.rounds = 1\n[model]\n{model}\n[inner]\n{inner}\n')
    assert spec.inner.optimizer == expected[0]
    assert spec.inner.learning_rate == pytest.approx(expected[1])
    again = RunSpec.model_validate_json(spec.model_dump_json())
    assert again == spec


def test_your_own_optimizer_may_read_any_setting() -> None:
    keys = ["beta1 = 0.8", "momentum = 0.7", "muon_learning_rate = 0.1"]
    text = LEAST + '[inner]\noptimizer = "my_module:my_function"\nclip_norm = "none"\n' + "\n".join(keys)
    inner = parse_spec(text).inner
    assert (inner.beta1, inner.momentum, inner.muon_learning_rate, inner.clip_norm) == (0.8, 0.7, 0.1, "none")


# What pydantic says of itself, and no user needs to read.
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
