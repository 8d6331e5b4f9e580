"""Which settings of a worker fit: `outerstep plan --memory`, and `outerstep worker --fit auto`."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outerstep.cli import app
from outerstep.common.quantities import bytes_text
from protocol.spec.run import RunSpec, parse_spec
from tests.support.trained import save_trained
from worker import fit
from worker.accounts.machine import host_free_bytes
from worker.box import set_up
from worker.errors import BoxError
from worker.fit import CHOICE, check_memory, fitted, keep_choice, need_here
from worker.memory import IN_USE, ROOM, Settings, Sizes, disk_bytes, need_of, needs
from worker.models.building import build_model, sizes_of
from worker.settings import BoxSettings
from worker.state.state_dir import SNAPSHOT

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

# Peak memory above an idle process that `python -m benchmarks.memory` measured on a CPU, in GB.
MEASURED = {
    134_105_856: {
        "": 2.55,
        "--optimizer-state 8bit": 1.82,
        "--param-dtype bf16": 1.44,
        "--param-dtype bf16 --optimizer-state 8bit": 1.21,
    },
    348_000_000: {"": 6.33, "--param-dtype bf16 --optimizer-state 8bit": 2.67},
}


def plan(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize("parameters", MEASURED)
def test_predictions_are_within_a_tenth_of_what_was_measured(parameters: int) -> None:
    found = {each.settings.options: each.device for each in needs(Sizes(parameters), on_gpu=False)}
    for options, measured in MEASURED[parameters].items():
        assert found[options] == pytest.approx(measured * 1e9, rel=0.1)


def test_the_first_setting_that_fits_is_named() -> None:
    answers = [
        ("24gb", "64gb", ""),
        ("18gb", "64gb", "--optimizer-state 8bit"),
        ("13gb", "64gb", "--param-dtype bf16"),
        ("10gb", "64gb", "--param-dtype bf16 --optimizer-state 8bit"),
        ("4gb", "64gb", "--param-dtype bf16 --optimizer-state 8bit --offload"),
        ("24gb", "16gb", "--param-dtype bf16 --optimizer-state 8bit --offload"),  # the outer state does not fit
        ("2gb", "64gb", None),
    ]
    for memory, host, options in answers:
        code, output = plan("--params", "1.2e9", "--memory", memory, "--host-memory", host, "--format", "json")
        found = json.loads(output)
        assert (code, found["options"]) == (0, options)
        assert [each["fits"] for each in found["settings"]].count(True) == (
            0 if options is None else 5 - [each["options"] for each in found["settings"]].index(options)
        )


def test_a_model_that_does_not_fit_gets_another_way() -> None:
    code, output = plan("--params", "14e9", "--memory", "24gb", "--host-memory", "64gb")
    assert code == 0
    assert "Nothing fits. The least is 35 GB and 70.5 GB of host memory" in output
    assert 'base = "nf4"' in output


def test_a_cpu_has_one_memory_and_the_outer_state_in_files() -> None:
    _, output = plan("--params", "134e6", "--memory", "4gb")
    assert "The worker's defaults fit." in output
    assert "the outer state and the work to send are in files" in output
    assert "The worker's state directory takes up to 6.97 GB of disk." in output
    assert all(each.outer_state == 0 for each in needs(Sizes(134_000_000), on_gpu=False))


# --- --fit auto -----------------------------------------------------------------------------------------------------


def spec(model: str = 'preset = "tiny", vocab_size = 300', inner: str = "") -> RunSpec:
    return parse_spec(f'name = "r"\nmodel = {{ {model} }}\n[sync]\nrounds = 1\n[inner]\n{inner}')


def free(monkeypatch: pytest.MonkeyPatch, memory: float | None, host: float | None) -> None:
    monkeypatch.setattr(fit, "free_memory", lambda device: (memory, host))


def options_of(settings: BoxSettings) -> tuple[Any, ...]:
    return settings.param_dtype, settings.optimizer_state, settings.offload, settings.activation_checkpointing


@pytest.mark.parametrize(
    ("memory", "host", "expected"),
    [
        (24, 64, ("fp32", None, False, False)),
        (18, 64, ("fp32", "8bit", False, True)),
        (13, 64, ("bf16", None, False, True)),
        (10, 64, ("bf16", "8bit", False, True)),
        (4, 64, ("bf16", "8bit", True, True)),
    ],
)
def test_the_first_settings_that_fit_are_chosen_and_said(
    memory: float, host: float, expected: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """1.2 billion parameters on a GPU."""
    monkeypatch.setattr(fit, "sizes_of", lambda *_: Sizes(1_200_000_000))
    free(monkeypatch, memory * 1e9, host * 1e9)
    with caplog.at_level(logging.INFO):
        found = fitted(spec(), BoxSettings(fit="auto"), CUDA)
    assert options_of(found) == expected
    assert found.fit is None
    said = [each for each in caplog.messages if each.startswith("--fit auto: 1.2 G parameters to train: ")]
    assert len(said) == 1
    assert f"GB are free on cuda, {host} GB in host memory" in said[0]
    assert ("--offload" in said[0]) == found.offload


def test_what_was_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "sizes_of", lambda *_: Sizes(1_200_000_000))
    free(monkeypatch, 24e9, 64e9)
    cases: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
        ({"param_dtype": "bf16"}, ("bf16", None, False, True)),
        ({"optimizer_state": "8bit"}, ("fp32", "8bit", False, True)),
        ({"offload": True}, ("bf16", "8bit", True, True)),
        ({"activation_checkpointing": True}, ("fp32", None, False, True)),
    ]
    for given, expected in cases:
        assert options_of(fitted(spec(), BoxSettings(fit="auto", **given), CUDA)) == expected
    free(monkeypatch, 13e9, 64e9)
    with pytest.raises(BoxError, match="nothing fits for 1.2 G .* 13 GB are free on cuda, 64 GB in host memory"):
        fitted(spec(), BoxSettings(fit="auto", param_dtype="fp32"), CUDA)
    with pytest.raises(BoxError, match="nothing fits .* the least would need 19.2 GB"):
        fitted(spec(inner='optimizer = "mine:adam"'), BoxSettings(fit="auto", param_dtype="fp32"), CUDA)


def test_a_restart_keeps_the_choice_that_its_snapshot_was_made_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another program has taken memory since, or freed some: with other moments, the worker would refuse to start."""

    def chosen(**given: Any) -> tuple[Any, ...]:
        found = fitted(spec(), BoxSettings(fit="auto", **given), CUDA, state_dir=tmp_path)
        assert found.fit is None
        keep_choice(tmp_path, found)
        return options_of(found)

    monkeypatch.setattr(fit, "sizes_of", lambda *_: Sizes(1_200_000_000))
    free(monkeypatch, 18e9, 64e9)
    assert chosen() == ("fp32", "8bit", False, True)
    free(monkeypatch, 13e9, 64e9)
    assert chosen() == ("bf16", None, False, True), "there is no snapshot yet"
    (tmp_path / SNAPSHOT).touch()
    for memory in (24e9, 4e9):
        free(monkeypatch, memory, 64e9)
        with caplog.at_level(logging.INFO):
            assert chosen() == ("bf16", None, False, True)
        assert "as when this worker was started first" in caplog.messages[-1]
    assert chosen(param_dtype="bf16") == ("bf16", None, False, True)
    free(monkeypatch, 18e9, 64e9)
    assert chosen(optimizer_state="8bit") == ("fp32", "8bit", False, True), "what is given counts"
    (tmp_path / CHOICE).write_text("{}")
    assert chosen() == ("fp32", "8bit", False, True)
    assert "chooses again" in caplog.text


def test_the_sizes_are_those_of_the_model_that_is_built(tmp_path: Path) -> None:
    for run in (spec(), spec('config = { model_type = "gpt2", n_layer = 2, n_embd = 32, n_head = 2 }')):
        model = build_model(run, CPU)
        assert sizes_of(run) == Sizes(sum(each.numel() for each in model.parameters()))
    save_trained(tmp_path, hidden_size=64, intermediate_size=128)
    run = spec(f'pretrained = "{tmp_path}", lora = {{ rank = 2 }}')
    model, sizes = build_model(run, CPU), sizes_of(run)
    for kept, trained in ((sizes.trained, True), (sizes.frozen, False)):
        assert kept == sum(each.numel() for each in model.parameters() if each.requires_grad is trained)
    pytest.importorskip("bitsandbytes", reason="needs: pip install 'outerstep[qlora]'")
    held = build_model(run, CPU, base="nf4")
    assert sizes.in_4_bits == pytest.approx(
        sum(each.nbytes for each in held.parameters() if not each.requires_grad), rel=0.1
    )


def test_a_frozen_model_that_is_too_large_is_held_in_4_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    run = spec('pretrained = "/models/llama", lora = { rank = 8 }')
    monkeypatch.setattr(fit, "sizes_of", lambda *_: Sizes(20_000_000, 8_000_000_000, 5_500_000_000))
    for memory, base, parameters in ((48e9, "full", "fp32"), (24e9, "full", "bf16"), (12e9, "nf4", "fp32")):
        free(monkeypatch, memory, 64e9)
        found = fitted(run, BoxSettings(fit="auto"), CUDA)
        assert (found.lora_base, found.param_dtype, found.offload) == (base, parameters, False)
    free(monkeypatch, 48e9, 64e9)
    asked = spec('pretrained = "/models/llama", lora = { rank = 8, base = "nf4" }')
    assert fitted(asked, BoxSettings(fit="auto"), CUDA).lora_base == "nf4", "as the run's spec says"
    assert fitted(asked, BoxSettings(fit="auto", lora_base="full"), CUDA).lora_base == "full"
    free(monkeypatch, 12e9, 64e9)
    monkeypatch.setattr(fit, "_has_bitsandbytes", lambda: False)
    with pytest.raises(BoxError, match="nothing fits for 20 M parameters to train and 8 G frozen"):
        fitted(run, BoxSettings(fit="auto"), CUDA)


def test_options_that_exclude_each_other_are_not_reported_as_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 64e9, None)
    for given in ({"offload": True}, {"param_dtype": "bf16", "precision": "fp32"}):
        with pytest.raises(BoxError, match="cannot choose on cpu: no combination") as raised:
            fitted(spec(), BoxSettings.model_validate({"fit": "auto", **given}), CPU)
        assert "fits" not in str(raised.value)


def test_a_box_is_set_up_with_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with room for the leanest settings only."""
    run = spec()
    least = needs(sizes_of(run), on_gpu=False)[-1]
    free(monkeypatch, least.device / ROOM + 1000, None)
    box = set_up(run, BoxSettings(fit="auto", device="cpu"), CPU)
    assert options_of(box.settings) == ("bf16", "8bit", False, True)
    assert {each.dtype for each in box.model.parameters()} == {torch.bfloat16}


# --- what is checked before the model is loaded ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "processes", "shards", "device", "host"),
    [
        (Settings("fp32", "fp32"), 1, 1, 16e9, 12e9),
        (Settings("bf16", "8bit"), 1, 1, 6e9, 12e9),
        (Settings("bf16", "8bit", offload=True), 1, 1, 2e9, 2e9 + 2e9 + 4 * IN_USE),
        (Settings("fp32", "fp32"), 4, 4, 4e9, 16e9),  # each process assembles the model, in fp32
    ],
)
def test_what_must_fit(
    settings: Settings, processes: int, shards: int, device: float, host: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A billion parameters."""
    need = need_of(Sizes(10**9), settings, on_gpu=True)

    def check() -> str:
        return check_memory(need, CUDA, processes, shards, in_host_memory=processes > 1)

    for memory, host_memory in ((device - 1, host), (device, host - 1)):
        free(monkeypatch, memory, host_memory)
        with pytest.raises(BoxError, match="the model does not fit into memory: .*--fit auto"):
            check()
    for room in ((device, host), (None, None)):
        free(monkeypatch, *room)
        assert f"{bytes_text(device)} on cuda ({bytes_text(room[0])} free)" in check()


def test_frozen_parameters_have_no_gradients() -> None:
    need = need_of(Sizes(10**6, 10**9), Settings("fp32", "fp32"), on_gpu=True)
    assert need.device == 4 * (10**9 + 10**6) + 12 * 10**6
    need = need_of(Sizes(10**6, 10**9, 6 * 10**8), Settings("fp32", "fp32", lora_base="nf4"), on_gpu=True)
    assert need.parameters == 4 * 10**6 + 6 * 10**8, "in 4 bits, but for the embeddings"


def test_what_cannot_be_known_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 1000, None)
    assert need_here(spec('factory = "mine:model"'), BoxSettings(), CPU) is None
    least = need_here(spec(inner='optimizer = "mine:adam"'), BoxSettings(), CPU)
    assert least is not None
    assert least.moments == 0
    with pytest.raises(BoxError, match="the model does not fit into memory"):
        set_up(spec(), BoxSettings(device="cpu"), CPU)


def test_the_state_on_the_disk() -> None:
    """16 bytes of two outer states, 12 of a snapshot with AdamW, 12 of the next one. In files: 24 of three outer states,
    4 of the pseudo-gradient, and two snapshots."""
    assert disk_bytes(10**8, 8, in_files=False) == 40 * 10**8
    assert disk_bytes(10**8, 2, in_files=True) == 40 * 10**8


def test_a_container_may_have_less_memory_than_its_host(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 2000 kB\nMemAvailable: 1000 kB\n")
    assert host_free_bytes(meminfo, tmp_path) == 1024_000
    for name, content in {"memory.max": "max", "memory.current": "600", "memory.stat": "inactive_file 100\n"}.items():
        (tmp_path / name).write_text(content)
    assert host_free_bytes(meminfo, tmp_path) == 1024_000
    (tmp_path / "memory.max").write_text("900\n")
    assert host_free_bytes(meminfo, tmp_path) == 400


# --- outerstep plan -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--memory", "24gb"], "--memory needs --params"),
        (["--params", "1e9", "--host-memory", "64gb"], "--host-memory needs --memory"),
        (["--params", "1e9", "--memory", "24"], "not a number of bytes such as 24gb"),
        (["--params", "1e9", "--memory", "24gb", "--up", "10mbit"], "leave out --up"),
        (["--params", "1e9", "--memory", "24gb", "--epochs", "2"], "leave out --epochs"),
    ],
)
def test_what_is_missing_or_too_much_is_said(arguments: list[str], told: str) -> None:
    code, output = plan(*arguments)
    assert code != 0
    assert told in " ".join(output.split())
