"""A frozen model in 4 bits (QLoRA): what is held, that both kinds share a run, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel

from harness.coordinator import InThread
from outerstep.common.exit_codes import Exit
from protocol.messages import WorkerInfo
from protocol.spec.run import RunSpec, parse_spec
from tests.support.trained import save_trained
from tests.support.workers import worker_settings
from tests.worker.runs import create, exported
from tests.worker.toy import at_once
from worker.agent import run_worker
from worker.box import base_of, summary_of_frozen
from worker.errors import BoxError, ModelError
from worker.inner.precision import cast_parameters, precision_on
from worker.models.building import build_model, logits_of
from worker.models.pretrained import Pretrained
from worker.state.parameters import frozen_summary, tensor_specs

pytest.importorskip("bitsandbytes", reason="needs: pip install 'outerstep[qlora]'")

CPU = torch.device("cpu")
TOKENS = torch.arange(20)[None]
LORA = 'pretrained = "{}", lora = {{ rank = 2, target_modules = ["q_proj", "v_proj"], base = "nf4" }}'


def spec(directory: Path) -> RunSpec:
    return parse_spec(f'name = "r"\nmodel = {{ {LORA.format(directory)} }}\n[sync]\nrounds = 1\n')


def work(coordinator: InThread, directory: Path, name: str, **settings: object) -> Exit:
    return run_worker(worker_settings(coordinator, "tuned", directory / "state" / name, name=name, **settings))


def test_linear_layers_are_in_4_bits_and_the_digest_is_that_of_the_weights(tmp_path: Path) -> None:
    save_trained(tmp_path, hidden_size=64, intermediate_size=128, shard_size="60KB")
    run = spec(tmp_path)
    full, quantised = build_model(run, CPU), build_model(run, CPU, base="nf4")
    frozen = summary_of_frozen(quantised, run.model, "nf4")
    assert frozen == summary_of_frozen(full, run.model, "full") == frozen_summary(full)
    assert tensor_specs(quantised) == tensor_specs(full)

    held = {name: each for name, each in quantised.named_parameters() if not each.requires_grad}
    linear = {name for name, each in held.items() if each.dtype is torch.uint8}
    assert linear == {name for name in held if "_proj." in name}, "all but the embeddings, the head and the norms"
    assert sum(held[name].nbytes for name in linear) == sum(full.get_parameter(name).numel() for name in linear) / 2
    assert {each.dtype for name, each in held.items() if name not in linear} == {torch.bfloat16}

    expected, found = logits_of(full, TOKENS), logits_of(quantised, TOKENS).float()
    assert_close_in_4_bits(found, expected)


def test_adapters_can_be_in_bf16_as_well(tmp_path: Path) -> None:
    save_trained(tmp_path)
    model = build_model(spec(tmp_path), CPU, base="nf4")
    before = logits_of(model, TOKENS)
    cast_parameters(model, torch.bfloat16)
    assert {each.dtype for each in model.parameters() if each.requires_grad} == {torch.bfloat16}
    torch.testing.assert_close(logits_of(model, TOKENS), before, rtol=0, atol=0)


@pytest.mark.slow
def test_workers_in_4_bits_and_in_fp32_share_a_run_whose_export_is_in_full_precision(
    coordinator: InThread, tmp_path: Path
) -> None:
    trained = save_trained(tmp_path / "trained")
    create(coordinator, tmp_path, "tuned", LORA.format(tmp_path / "trained"), rounds=3, min_workers=2)
    ended = at_once(
        {
            "quantised": lambda: work(coordinator, tmp_path, "quantised"),
            "full": lambda: work(coordinator, tmp_path, "full", lora_base="full"),
        }
    )
    assert ended == {"quantised": Exit.DONE, "full": Exit.DONE}
    with coordinator.client() as http:
        members = [WorkerInfo.model_validate(each) for each in http.get("/v1/runs/tuned/workers").json()["items"]]
    facts = {each.name: (each.host["base"], each.host["precision"]) for each in members}
    assert facts == {"quantised": ("nf4", "bf16"), "full": ("full", "fp32")}
    digests = {each.state_digest for each in members}
    assert None not in digests
    assert len(digests) == 1, "both have the same adapters"

    exported(coordinator, "tuned", tmp_path / "merged", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, before in trained.state_dict().items():
        change = merged[name] - before.float()
        if "q_proj" in name or "v_proj" in name:
            assert 0 < torch.linalg.matrix_rank(change) <= 2, "the adapters, and no error of quantisation"
        else:
            assert not change.any()


def changed(directory: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def with_nan(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = torch.nan
    return weights


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda weights: {name.removeprefix("model."): each for name, each in weights.items()},
            r"has no tensor model\.embed_tokens\.weight: .* renames or merges .*; with base = full",
        ),
        (
            lambda weights: {name: each for name, each in weights.items() if name != "model.norm.weight"},
            r"has no tensor model\.norm\.weight: either config\.json describes another model",
        ),
        (
            lambda weights: weights | {"model.other": torch.zeros(3)},
            r"also have 1 tensors of the model that config\.json describes: model\.other",
        ),
        (
            lambda weights: weights | {"model.norm.weight": torch.zeros(3)},
            r"have in another shape .*: model\.norm\.weight \[3\] instead of \[16\]",
        ),
        (with_nan, r"tensor model\.layers\.1\.mlp\.down_proj\.weight has values that are not finite"),
    ],
)
def test_wrong_weights_are_refused_by_name(tmp_path: Path, change: Any, message: str) -> None:
    save_trained(tmp_path)
    changed(tmp_path, change)
    with pytest.raises(ModelError, match=message):
        build_model(spec(tmp_path), CPU, base="nf4")


@pytest.mark.parametrize("tied", [False, True])
def test_the_model_is_the_one_that_transformers_loads(tmp_path: Path, tied: bool) -> None:
    save_trained(tmp_path, tie_word_embeddings=tied, shard_size="20KB")
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=nf4, device_map={"": "cpu"})
    trained = Pretrained(str(tmp_path), None)
    assert_same_tensors(trained.model_in_4_bits(trained.config(), "eager", CPU), expected)


def test_a_gpt_2_whose_layers_are_transposed_is_loaded_as_well(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=256, n_positions=64)
    GPT2LMHeadModel(shape).bfloat16().save_pretrained(tmp_path)
    trained = Pretrained(str(tmp_path), None)
    config = trained.config()
    found = trained.model_in_4_bits(config, "eager", CPU)
    expected = trained.model(config, "eager")(TOKENS).logits
    assert_close_in_4_bits(found(TOKENS).logits.float(), expected)


def assert_same_tensors(found: nn.Module, expected: nn.Module) -> None:
    own, theirs = found.state_dict(), expected.state_dict()
    assert own.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(own[name], tensor), name
    theirs = dict(expected.named_buffers())
    for name, buffer in found.named_buffers():
        assert torch.equal(buffer, theirs[name]), name


def assert_close_in_4_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert 0 < float(((found - expected).norm() / expected.norm()).detach()) < 0.2


def test_what_does_not_go_with_4_bits_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a frozen model in 4 bits \(nf4\) needs --precision bf16, not fp16"):
        precision_on(CPU, "fp16", base="nf4")
    assert precision_on(CPU, base="nf4") == "bf16"
    whole = parse_spec('name = "r"\nmodel.preset = "tiny"\n[sync]\nrounds = 1\n')
    with pytest.raises(BoxError, match=r"--lora-base nf4 is for the frozen model of adapters, and the run r has no"):
        base_of(whole, "nf4")
    assert base_of(whole, None) == "full"
    assert [base_of(spec(tmp_path), wanted) for wanted in (None, "full")] == ["nf4", "full"]


def test_a_precision_that_a_run_in_4_bits_does_not_allow_ends_the_worker_with_the_reason(
    coordinator: InThread, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_trained(tmp_path / "trained")
    create(coordinator, tmp_path, "tuned", LORA.format(tmp_path / "trained"), rounds=1)
    assert work(coordinator, tmp_path, "a", precision="fp16") == Exit.REFUSED
    assert "needs --precision bf16, not fp16" in caplog.text
