"""Low-rank adapters: what is trained and sent, what is compared, and the exports."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.coordinator import InThread
from outerstep.common.exit_codes import Exit
from protocol.messages import Scope
from protocol.spec.run import RunSpec, parse_spec
from tests.support.trained import save_trained
from tests.worker.runs import create, exported, join, shown, state, train, work
from worker.diloco import DiLoCo
from worker.errors import ModelError
from worker.models.building import build_model, has_initial_parameters, logits_of
from worker.state.parameters import frozen_summary, tensor_specs

CPU = torch.device("cpu")
TOKENS = torch.arange(20)[None]
TRAINED = {f"model.layers.{layer}.self_attn.{name}.weight" for layer in range(2) for name in ("q_proj", "v_proj")}


def spec(directory: Path, lora: str = 'target_modules = ["q_proj", "v_proj"]', seed: int = 0) -> RunSpec:
    return parse_spec(
        f'name = "r"\nseed = {seed}\n[model]\npretrained = "{directory}"\n[model.lora]\nrank = 2\n{lora}\n'
        "[sync]\nrounds = 1\n"
    )


peft = pytest.importorskip("peft", reason="needs: pip install 'outerstep[peft]'")


def test_only_adapters_are_trained_and_at_first_they_add_nothing(tmp_path: Path) -> None:
    trained = save_trained(tmp_path)
    run = spec(tmp_path)
    model = build_model(run, CPU)
    assert has_initial_parameters(model, run.model)
    assert sum(tensor.elements for tensor in tensor_specs(model)) == 4 * 2 * (16 + 16)
    frozen = frozen_summary(model)
    assert frozen is not None
    assert frozen.elements == sum(parameter.numel() for parameter in trained.parameters())
    torch.testing.assert_close(logits_of(model, TOKENS), logits_of(trained.float(), TOKENS))


def test_the_seed_makes_the_adapters(tmp_path: Path) -> None:
    save_trained(tmp_path)
    one, same, other = (
        [parameter for parameter in build_model(spec(tmp_path, seed=seed), CPU).parameters() if parameter.requires_grad]
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_settings_reach_peft(tmp_path: Path) -> None:
    save_trained(tmp_path)
    model: Any = build_model(spec(tmp_path, "alpha = 8\ndropout = 0.25"), CPU)
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (2, 8, 0.25)
    assert config.base_model_name_or_path == str(tmp_path)
    adapted = {name.split(".lora_")[0].split(".")[-1] for name, each in model.named_parameters() if each.requires_grad}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_modules_that_are_not_there_are_named(tmp_path: Path) -> None:
    save_trained(tmp_path)
    with pytest.raises(ModelError, match="model.lora: peft rejects it: .*w_pack"):
        build_model(spec(tmp_path, 'target_modules = ["w_pack"]'), CPU)


def lora(directory: Path) -> str:
    return f'pretrained = "{directory}", lora.rank = 2, lora.target_modules = ["q_proj", "v_proj"]'


@pytest.mark.slow
def test_a_run_trains_adapters_and_exports_them(coordinator: InThread, tmp_path: Path) -> None:
    trained = save_trained(tmp_path / "trained")
    before = {name: tensor.float() for name, tensor in trained.state_dict().items()}
    train(coordinator, tmp_path, "tuned", lora(tmp_path / "trained"), rounds=3)
    run = shown(coordinator, "tuned")
    assert run.elements == 256
    assert run.frozen is not None
    assert run.upload_bytes < 3 * 1500, "of 256 elements, and not of 13,392"

    adapted = exported(coordinator, "tuned", tmp_path / "adapters")
    merged = exported(coordinator, "tuned", tmp_path / "merged", merge=True)
    written = {path.name for path in (tmp_path / "adapters").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "spec.toml"} <= written
    assert "model.safetensors" not in written

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float32)
    by_peft = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    by_transformers: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    expected = logits_of(adapted, TOKENS)
    assert not torch.equal(expected, logits_of(trained.float(), TOKENS))
    torch.testing.assert_close(logits_of(by_peft, TOKENS), expected)
    torch.testing.assert_close(logits_of(by_transformers, TOKENS), expected)
    torch.testing.assert_close(logits_of(merged, TOKENS), expected)
    changed = {name for name, tensor in by_transformers.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == TRAINED
    prompt = torch.tensor([[97, 108, 108]])
    generated = [
        each.generate(input_ids=prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)
        for each in (by_peft, by_transformers)
    ]
    assert torch.equal(*generated)
    assert generated[0].shape == (1, 11)


@pytest.mark.slow
def test_adapters_go_on_from_those_of_another_run(coordinator: InThread, tmp_path: Path) -> None:
    save_trained(tmp_path / "trained")
    train(coordinator, tmp_path, "first", lora(tmp_path / "trained"))
    train(coordinator, tmp_path, "second", lora(tmp_path / "trained") + ', run = "first"')
    start, end = state(coordinator, "second", 0), state(coordinator, "first")
    assert all(torch.equal(tensor, end[name]) for name, tensor in start.items())


@pytest.mark.slow
def test_another_base_is_refused(coordinator: InThread, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The directory has the same name on both machines, and weights of another training in it."""
    save_trained(tmp_path / "trained")
    create(coordinator, tmp_path, "tuned", lora(tmp_path / "trained"), rounds=1, min_workers=2)
    join(coordinator, "tuned")
    save_trained(tmp_path / "trained", seed=8)
    assert work(coordinator, tmp_path, "tuned", "b") == Exit.REFUSED
    assert "this worker's frozen parameters" in caplog.text
    assert "load the same weights everywhere" in caplog.text
    with pytest.raises(ModelError, match="are not those of the run tuned"):
        exported(coordinator, "tuned", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_whole_model_has_nothing_to_merge(coordinator: InThread, tmp_path: Path) -> None:
    create(coordinator, tmp_path, "whole", 'preset = "tiny"', rounds=1)
    with pytest.raises(ModelError, match="has no adapters to merge"):
        exported(coordinator, "whole", tmp_path / "out", merge=True)


@pytest.mark.slow
def test_adapters_do_not_go_on_from_those_on_another_base(
    coordinator: InThread, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They would fit by their shape, and make a model of it that nobody has trained."""
    save_trained(tmp_path / "trained")
    train(coordinator, tmp_path, "first", lora(tmp_path / "trained"))
    save_trained(tmp_path / "other", seed=8)
    create(coordinator, tmp_path, "second", lora(tmp_path / "other") + ', run = "first"')
    assert work(coordinator, tmp_path, "second") == Exit.REFUSED
    assert "model.run = 'first': the frozen parameters here" in caplog.text
    assert shown(coordinator, "second").state == "seeding"


@pytest.mark.parametrize(
    ("library", "base", "message"),
    [
        ("peft", "full", r"model.lora needs peft, .* pip install 'outerstep\[peft\]'"),
        ("bitsandbytes", "nf4", r"nf4\) needs bitsandbytes, .* pip install 'outerstep\[qlora\]'"),
    ],
)
def test_without_a_library_that_is_said_before_a_weight_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: str, base: Any, message: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModelError, match=message):
        build_model(spec(tmp_path / "not fetched yet"), CPU, base=base)


@pytest.mark.slow
def test_peft_loads_the_adapters_of_a_script(
    coordinator: InThread, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The spec says nothing about the model. The export had names such as lora_A.default.weight, which peft ignores."""
    save_trained(tmp_path / "trained")
    coordinator.create_run(
        'name = "script"\n[data]\nsource = "custom"\n[sync]\nwait = "always"\nrounds = 1\ninner_steps = 2\n'
        "fragment_elements = 4096\n"
    )
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float32)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(base, config)
    optimizer = torch.optim.SGD([each for each in adapted.parameters() if each.requires_grad], lr=1.0)
    token = coordinator.token(Scope.WORKER)
    with DiLoCo.connect(adapted, optimizer, run="script", url=coordinator.url, token=token, state_dir=None) as diloco:
        while not diloco.finished:
            logits_of(adapted, TOKENS).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    exported(coordinator, "script", tmp_path / "adapters")
    assert "copy the adapter_config.json" in caplog.text
    config.save_pretrained(tmp_path / "adapters")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float32)
    untrained = logits_of(again, TOKENS)
    loaded = peft.PeftModel.from_pretrained(again, tmp_path / "adapters")
    assert not torch.equal(logits_of(loaded, TOKENS), untrained)
    torch.testing.assert_close(logits_of(loaded, TOKENS), logits_of(adapted, TOKENS))
