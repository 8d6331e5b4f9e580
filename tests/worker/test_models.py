"""Models from presets, configurations and functions; export and sampling. Parameters that are not trained: their identity,
and that workers with others are refused."""

import logging
import re
import sys
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from outerstep.cli.run.advice import known_config
from protocol.errors import Problem, SpecError
from protocol.spec.model import PRESETS
from protocol.spec.run import RunSpec, parse_spec
from tests.support.trained import save_trained
from tests.worker import toy
from tests.worker.toy import MakeToy
from worker.diloco import DiLoCo
from worker.errors import ModelError
from worker.export import load_checkpoint, sample
from worker.link.client import Client, open_http
from worker.models import building
from worker.models.building import build_model, check_vocabulary, logits_of
from worker.state.parameters import frozen_summary

CPU = torch.device("cpu")
HEAD = 'name = "r"\nseed = {seed}\n[sync]\nrounds = 1\n[data]\nsequence_length = 64\n'


def spec(model: str, seed: int = 0) -> RunSpec:
    return parse_spec(HEAD.format(seed=seed) + model)


TINY = '[model]\npreset = "tiny"'


def test_tiny() -> None:
    model = build_model(spec(TINY), CPU)
    assert sum(parameter.numel() for parameter in model.parameters()) == 139_584
    assert logits_of(model, torch.zeros(2, 10, dtype=torch.int64)).shape == (2, 10, 256)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize(("model_type", "attention"), [("llama", "sdpa"), ("gemma2", "eager")])
def test_a_model_without_sdpa_is_built_on_a_gpu_too(model_type: str, attention: str) -> None:
    """transformers raises an error if it is asked for what the model does not have. A meta device is no CPU either."""
    shape = "hidden_size = 16, intermediate_size = 16, num_hidden_layers = 1, num_attention_heads = 2, head_dim = 8"
    config = f'[model]\nconfig = {{model_type = "{model_type}", vocab_size = 20, num_key_value_heads = 2, {shape}}}'
    model = build_model(spec(config), torch.device("meta"))
    assert model.config._attn_implementation == attention  # type: ignore[union-attr]  # noqa: SLF001
    for_a_gpu = build_model(spec(config), CPU, trains_on=torch.device("cuda"))
    assert for_a_gpu.config._attn_implementation == attention  # type: ignore[union-attr]  # noqa: SLF001


def test_the_embeddings_of_tiny_are_too_large_to_be_thrown_about() -> None:
    weights = build_model(spec(TINY), CPU).state_dict()
    assert weights["model.embed_tokens.weight"].std().item() == pytest.approx(1.0, rel=0.05)
    for name in ("lm_head.weight", "model.layers.0.mlp.down_proj.weight"):
        assert weights[name].std().item() == pytest.approx(0.08, rel=0.05)


def test_the_seed_makes_the_model_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one, same, other = (build_model(spec(TINY, seed), CPU) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    weights = [model.state_dict()["lm_head.weight"] for model in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("preset", "layers", "total"),
    [("llama-150m", 149_447_680, 214_983_680), ("llama-1b", 968_976_384, 1_100_048_384)],
)
def test_the_presets_have_the_sizes_of_opendiloco(preset: str, layers: int, total: int) -> None:
    """Its 150 M are those of the layers, without embedding and head; its 1.1 B are all of them."""
    shape = PRESETS[preset]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**shape))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == total
    assert count - 2 * shape["vocab_size"] * shape["hidden_size"] == layers


def test_a_preset_with_the_vocabulary_of_a_tokenizer() -> None:
    model = build_model(spec('[model]\npreset = "tiny"\nvocab_size = 300'), CPU)
    assert logits_of(model, torch.tensor([[299]])).shape == (1, 1, 300)
    assert model.config.vocab_size == 300  # type: ignore[union-attr]


def test_any_configuration_of_transformers() -> None:
    config = (
        '[model.config]\nmodel_type = "gpt2"\nvocab_size = 300\nn_embd = 16\nn_layer = 1\nn_head = 2\nn_positions = 64'
    )
    model = build_model(spec(config), CPU)
    assert logits_of(model, torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, 300)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ('[model.config]\nmodel_type = "clip_vision_model"', "model.config has no vocab_size"),
        ('[model.config]\nmodel_type = "no-such-model"', "transformers rejects model.config"),
        ('[model.config]\nmodel_type = "llama"\nhidden_size = "wide"', "model.config .*field 'hidden_size'.*got str"),
        (
            '[model.config]\nmodel_type = "llama"\nhidden_act = "nope"',
            "transformers cannot build model.config .*'nope'",
        ),
        ('[model.config]\nmodel_type = "llama"\nauto_map.AutoModel = "a/b--c.D"', "model.config names code .auto_map."),
        ('[model.config]\nmodel_type = "fuyu"\ntext_config.auto_map.AutoModel = "a/b--c.D"', "names code .auto_map."),
        ('[model]\nfactory = "no_such_module:make"', "No module named 'no_such_module'"),
        ('[model]\nfactory = "json:make"', "has no attribute 'make'"),
        ('[model]\nfactory = "platform:node"', "returned str, not a torch.nn.Module"),
        # No product of widths, layers and experts is built.
        ('[model]\npreset = "llama-1b"\nvocab_size = 16777216', "model.preset = 'llama-1b' has 69,"),
        (
            '[model.config]\nmodel_type = "gpt2"\nvocab_size = 300\nn_embd = 65536\nn_head = 1\nn_layer = 12',
            "model.config has 618,[0-9,]+ parameters",
        ),
        ('[model.config]\nmodel_type = "mixtral"\nvocab_size = 300\nnum_local_experts = 1000000', "model.config has"),
    ],
)
def test_models_that_cannot_be_built(model: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_model(spec(model), CPU)


LENGTHS = {
    "learned": ('config = { model_type = "gpt2", n_embd = 16, n_layer = 1, n_head = 2 }', 1024, "n_positions"),
    "rotary": (
        'config = { model_type = "llama", vocab_size = 256, hidden_size = 8, intermediate_size = 8, '
        "num_hidden_layers = 1, num_attention_heads = 1 }",
        2048,
        "max_position_embeddings",
    ),
    "scaled": (
        'config = { model_type = "llama", vocab_size = 256, hidden_size = 8, intermediate_size = 8, '
        "num_hidden_layers = 1, num_attention_heads = 1, max_position_embeddings = 1024, rope_scaling = { rope_type = "
        '"linear", factor = 4.0 } }',
        4096,
        "max_position_embeddings",
    ),
    "trained": ('pretrained = "{}"', 256, "max_position_embeddings"),
    "a factory": ('factory = "tests.worker.test_models:short"', 64, "n_positions"),
}


def short() -> nn.Module:
    return gpt2(256)


@pytest.mark.parametrize("case", LENGTHS)
def test_sequences_that_are_longer_than_the_model_allows(case: str, tmp_path: Path) -> None:
    """Learned positions ended in an IndexError at the first step, rotary ones were trained to the end."""
    model, most, key = LENGTHS[case]
    save_trained(tmp_path / "trained")

    def of(length: int) -> RunSpec:
        text = f'name = "r"\nsync.rounds = 1\n[model]\n{model.replace("{}", str(tmp_path / "trained"))}\n'
        return parse_spec(f"{text}[data]\nsequence_length = {length}\n")

    build_model(of(most), CPU)
    message = f"sequence_length = {most + 1:,} is more than the {most:,} positions of the model .{key}."
    with pytest.raises((ModelError, SpecError), match=message):
        build_model(of(most + 1), CPU)
    if case not in ("a factory", "scaled"):  # known to the worker only; known from the spec
        fault = of(most + 1).length_fault(known_config(of(most + 1).model))
        assert re.search(message, fault or ""), "run create says it too"
        assert of(most).length_fault(known_config(of(most).model)) is None


def test_a_preset_has_as_many_positions_as_a_sequence_has_tokens() -> None:
    found = parse_spec('name = "r"\nsync.rounds = 1\nmodel.preset = "tiny"\ndata.sequence_length = 5000\n')
    assert build_model(found, CPU).config.max_position_embeddings == 5000  # type: ignore[union-attr]


def gpt2(vocabulary: int) -> nn.Module:
    shape = f"vocab_size = {vocabulary}\nn_embd = 16\nn_layer = 1\nn_head = 2\nn_positions = 64"
    return build_model(spec(f'[model.config]\nmodel_type = "gpt2"\n{shape}'), CPU)


def test_ids_that_exceed_the_models_vocabulary(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelError, match="vocab_size = 100 is too small: .* 255; .* 256 or more"):
        check_vocabulary(gpt2(100), 256)
    models = gpt2(256), gpt2(32_000)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        for model in models:
            check_vocabulary(model, 256)
    (told,) = caplog.messages
    assert "256" in told
    assert "31,744 rows are never trained" in told
    check_vocabulary(nn.Linear(1, 1), 10**6)  # nobody knows


def test_a_function_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_model.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Sequential(torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    model = build_model(spec('[model]\nfactory = "my_own_model:make"'), CPU)
    assert isinstance(model, nn.Sequential)
    assert logits_of(model, torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3, 256)


def test_a_function_may_build_one_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for its own lock."""
    (tmp_path / "our_own_model.py").write_text(
        "import torch\nfrom protocol.spec.run import parse_spec\nfrom worker.models.building import build_model\n"
        f"def make():\n    return build_model(parse_spec({HEAD.format(seed=0) + TINY!r}), torch.device('cpu'))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    model, plain = build_model(spec('[model]\nfactory = "our_own_model:make"'), CPU), build_model(spec(TINY), CPU)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_working_directory_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It came first, so that a user's worker.py or json.py took the place of the packages that were imported next."""
    for name in ("coordinator.py", "own_factory.py"):
        (tmp_path / name).write_text("import torch\ndef make():\n    return torch.nn.Linear(1, 1)\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    monkeypatch.setattr(sys, "path", list(before))
    build_model(spec('[model]\nfactory = "own_factory:make"'), CPU)
    assert sys.path == [*before, str(tmp_path)]
    with pytest.raises(ModelError, match=r"<module 'coordinator' from .*has no attribute 'make'"):
        build_model(spec('[model]\nfactory = "coordinator:make"'), CPU)


@pytest.mark.slow
def test_sampling_is_repeatable() -> None:
    model = build_model(spec(TINY), CPU).eval()
    written = [sample(model, b"def ", 80, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert len(written[0]) == 80
    assert written[0] == written[1] != written[2]


LARGE = '[model.config]\nmodel_type = "llama"\nvocab_size = 300\nhidden_size = 65536\nnum_hidden_layers = 30'


@pytest.mark.covers("security:huge-model")
def test_a_model_is_counted_before_memory_is_taken_for_it() -> None:
    """30 layers of this width and transformers' own intermediate_size are 1.2 TB in fp32."""
    with pytest.raises(
        ModelError, match=r"model.config has ([0-9,]+) parameters, .*OUTERSTEP_MAX_PARAMETERS=\d+"
    ) as refused:
        build_model(spec(LARGE), CPU)
    told = int(str(refused.value).rpartition("=")[2])
    with torch.device("meta"):
        one, two = (
            AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=300, hidden_size=65536, num_hidden_layers=layers))
            for layers in (1, 2)
        )
    sizes = [sum(each.numel() for each in (*model.parameters(), *model.buffers())) for model in (one, two)]
    assert told == sizes[0] + 29 * (sizes[1] - sizes[0])


def test_what_the_owner_allows_is_built() -> None:
    tiny = spec(TINY)
    with pytest.raises(ModelError, match="has 139,584 parameters, .* OUTERSTEP_MAX_PARAMETERS=") as refused:
        build_model(tiny, CPU, 139_583)
    build_model(tiny, CPU, int(str(refused.value).rpartition("=")[2]))


def test_counting_ends_where_a_model_has_more_tensors_than_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "MAX_TENSORS", 15)
    with pytest.raises(ModelError, match="more than 15 tensors"):
        build_model(spec(TINY), CPU)
    monkeypatch.undo()
    build_model(spec(TINY), CPU)


@pytest.mark.covers("security:huge-model")
def test_a_directory_with_a_hundred_million_layers(tmp_path: Path) -> None:
    """Nobody reads the config.json of a repository of the hub before it is named."""
    LlamaConfig(num_hidden_layers=100_000_000).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="100,000,000 layers"):
        build_model(spec(f'[model]\npretrained = "{tmp_path}"'), CPU)


# --- parameters that are not trained -------------------------------------------------------------------------------


def frozen_model(*, frozen: tuple[int, ...] = (0,), dtype: torch.dtype = torch.float32) -> nn.Module:
    made = toy.make_model()
    for index in frozen:
        made[index].requires_grad_(False)  # type: ignore[index]
        made[index].to(dtype)  # type: ignore[index]
    return made


def test_the_digest_is_of_names_shapes_and_values() -> None:
    first = frozen_model()
    named = {"0.weight": "32,20", "0.bias": "32"}
    expected = blake3()
    for name, shape in named.items():
        values = first.get_parameter(name).detach().numpy().astype("<f4").tobytes()
        expected.update(f"{name}\0{shape}\0".encode() + values)
    summary = frozen_summary(first)
    assert summary is not None
    assert summary.digest == expected.hexdigest()
    assert summary.elements == 32 * 20 + 32


def test_nothing_frozen_is_nothing_to_tell() -> None:
    assert frozen_summary(frozen_model(frozen=())) is None
    without_elements = nn.Module()
    without_elements.weight = nn.Parameter(torch.empty(0, 3), requires_grad=False)
    assert frozen_summary(without_elements) is None


def test_one_value_makes_another_digest_and_what_is_trained_does_not() -> None:
    one, same, other = frozen_model(), frozen_model(), frozen_model()
    with torch.no_grad():
        same.get_parameter("2.weight").add_(1)
        other.get_parameter("0.bias")[3] += 1e-6
    assert frozen_summary(one) == frozen_summary(same) != frozen_summary(other)


def test_where_they_are_held_and_in_what_does_not_matter() -> None:
    """A compiled model has `_orig_mod.` in its names, and a box may hold in bf16 what was saved in bf16."""
    rounded = frozen_model(dtype=torch.bfloat16)
    wide = frozen_model(dtype=torch.bfloat16).float()
    assert frozen_summary(rounded) == frozen_summary(wide) == frozen_summary(torch.compile(wide))  # type: ignore[arg-type]
    assert frozen_summary(wide) != frozen_summary(frozen_model())


def test_integers_are_taken_as_they_are() -> None:
    made = nn.Module()
    made.table = nn.Parameter(torch.tensor([[1, 2**40]]), requires_grad=False)
    values = (1).to_bytes(8, "little") + (2**40).to_bytes(8, "little")
    summary = frozen_summary(made)
    assert summary is not None
    assert summary.digest == blake3(b"table\x001,2\0" + values).hexdigest()


@pytest.mark.slow
def test_workers_with_other_frozen_parameters_are_refused(toy_run: MakeToy) -> None:
    """They trained on before, each towards another model, and the mean of that was nobody's."""

    def other() -> nn.Module:
        made = frozen_model()
        with torch.no_grad():
            made.get_parameter("0.weight")[0, 0] = 1
        return made

    def join_as_another(diloco: DiLoCo) -> None:
        if diloco.global_step == 1:
            with pytest.raises(Problem, match="frozen parameters .* are not those of the run toy"):
                run.worker("b", model=other)

    run = toy_run(toy.spec(rounds=2))
    trained = run.worker("a", model=frozen_model, on_step=join_as_another)
    assert torch.equal(trained.model.get_parameter("0.weight"), frozen_model().get_parameter("0.weight"))
    shown = run.final()
    assert shown.frozen == frozen_summary(frozen_model())
    assert shown.elements == 32
    with (
        open_http(run.coordinator.url) as http,
        pytest.raises(ModelError, match=r"here \(none\) are not those of the run"),
    ):
        load_checkpoint(Client(http, "toy", run.token), factories=(toy.FACTORY,))
