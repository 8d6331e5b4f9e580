"""The inner optimizers: which parameter goes where, a function of the user's own, several for one inner step, and a resume
that is exact for each of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.optim.adamw import AdamW8bit
from schedulefree import AdamWScheduleFree
from torch import Tensor, nn
from torch.optim import Optimizer

from protocol.messages import EvaluationReport
from protocol.spec.run import parse_spec
from protocol.spec.sections import InnerSpec
from tests.worker import toy
from tests.worker.toy import Killed, MakeToy, MortalClient, Toy, coordinator_thread
from worker.diloco import DiLoCo
from worker.errors import ModelError
from worker.inner.compact import Held
from worker.inner.optimizers import build_inner_optimizers
from worker.inner.schedules import Schedule
from worker.inner.step import clip_gradients
from worker.link.client import open_http
from worker.models.building import build_model

CPU = torch.device("cpu")
OWN = f"{__name__}:sgd_for_each"
EIGHT_BIT = f"{__name__}:eight_bit"
NAMES = ["adamw", "muon", "sgd", OWN, EIGHT_BIT]
SPREAD = 'offsets = "spread"\noverlap = 2'


def inner(name: str, **settings: Any) -> InnerSpec:
    return InnerSpec(optimizer=name, **settings)


def sgd_for_each(model: nn.Module, inner: InnerSpec) -> list[Optimizer]:
    """One optimizer for each parameter, the first of them faster."""
    rates = [inner.learning_rate * (10 if index == 0 else 1) for index, _ in enumerate(model.parameters())]
    return [
        torch.optim.SGD([each], lr=rate, momentum=inner.momentum)
        for each, rate in zip(model.parameters(), rates, strict=True)
    ]


def eight_bit(model: nn.Module, inner: InnerSpec) -> list[Optimizer]:
    """bitsandbytes' AdamW, whose moments are bytes."""
    return [AdamW8bit(model.parameters(), lr=inner.learning_rate, min_8bit_size=1)]


# --- which parameter goes where -----------------------------------------------------------------------------------


def names_of(model: nn.Module, optimizer: Optimizer) -> set[str]:
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in given}


@pytest.mark.parametrize("tied", [False, True])
def test_muon_has_the_hidden_matrices_and_adamw_all_else(tied: bool) -> None:
    spec = parse_spec(f"""
name = "r"
[model.config]
model_type = "llama"
vocab_size = 300
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 2
num_attention_heads = 2
attention_bias = true
tie_word_embeddings = {str(tied).lower()}
[inner]
optimizer = "muon"
learning_rate = 0.01
[sync]
rounds = 1
""")
    model = build_model(spec, CPU)
    muon, adamw = build_inner_optimizers(model, spec.inner)
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    blocks = [f"model.layers.{layer}." for layer in range(2)]
    projections = [f"self_attn.{each}_proj" for each in "qkvo"] + [
        f"mlp.{each}_proj" for each in ("gate", "up", "down")
    ]
    assert names_of(model, muon) == {block + each + ".weight" for block in blocks for each in projections}
    rest = names_of(model, adamw)
    assert rest == {name for name, _ in model.named_parameters()} - names_of(model, muon)
    assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"} < rest
    assert ("lm_head.weight" in rest) != tied
    assert [group["lr"] for each in (muon, adamw) for group in each.param_groups] == [0.01, 0.01]


def test_a_model_of_your_own_has_its_last_linear_for_a_head(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    model = toy.make_model()
    muon, adamw = build_inner_optimizers(model, inner("muon", muon_learning_rate=0.5, learning_rate=0.25))
    assert names_of(model, muon) == {"0.weight"}
    assert names_of(model, adamw) == {"0.bias", "2.weight"}
    assert (muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"]) == (0.5, 0.25)
    assert caplog.messages == ["Muon trains 1 matrices of 640 parameters in all, AdamW the other 64"]


def test_muon_and_adamw_take_steps_of_one_length() -> None:
    """So that they can share a learning rate: the root mean square is about 0.2 times the rate."""
    model = nn.Sequential(nn.Linear(64, 192, bias=False), nn.Linear(192, 64, bias=False), nn.Linear(64, 64, bias=False))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    muon, _ = build_inner_optimizers(model, inner("muon", learning_rate=0.01, weight_decay=0.0))
    muon.step()
    for old, parameter in list(zip(before, model.parameters(), strict=True))[:2]:
        assert float((parameter.detach() - old).square().mean().sqrt()) == pytest.approx(0.01 * 0.2, rel=0.25)


def test_frozen_parameters_are_in_no_optimizer() -> None:
    for name in ("adamw", "muon", "sgd"):
        model = toy.make_model()
        model[0].bias.requires_grad_(False)  # type: ignore[index]
        optimizers = build_inner_optimizers(model, inner(name))
        assert set().union(*(names_of(model, each) for each in optimizers)) == {"0.weight", "2.weight"}


def test_only_hidden_matrices_are_muon_s_alone() -> None:
    model = toy.make_model()
    model[0].bias.requires_grad_(False)  # type: ignore[index]
    model[2].weight.requires_grad_(False)  # type: ignore[index]
    (muon,) = build_inner_optimizers(model, inner("muon"))
    assert names_of(model, muon) == {"0.weight"}


def test_a_model_without_hidden_matrices_has_nothing_for_muon() -> None:
    with pytest.raises(ModelError, match='inner.optimizer = "muon": Linear has no trainable matrix between'):
        build_inner_optimizers(nn.Linear(3, 4), inner("muon"))


def test_an_old_torch_has_no_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ModelError, match=r"needs torch 2.9 or newer"):
        build_inner_optimizers(toy.make_model(), inner("muon"))


# --- a function of the user's own ---------------------------------------------------------------------------------


def nothing(model: nn.Module, inner: InnerSpec) -> None: ...


def without_the_head(model: nn.Module, inner: InnerSpec) -> Optimizer:
    return torch.optim.SGD(list(model.parameters())[:-1], lr=1.0)


def twice(model: nn.Module, inner: InnerSpec) -> list[Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=1.0), torch.optim.SGD(model.parameters(), lr=1.0)]


def alone(model: nn.Module, inner: InnerSpec) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=inner.learning_rate)


def test_it_gets_the_model_and_the_settings() -> None:
    model = toy.make_model()
    optimizers = build_inner_optimizers(model, inner(OWN, learning_rate=0.5))
    assert [each.param_groups[0]["lr"] for each in optimizers] == [5.0, 0.5, 0.5]
    (one,) = build_inner_optimizers(model, inner(f"{__name__}:alone", learning_rate=0.5))
    assert names_of(model, one) == {"0.weight", "0.bias", "2.weight"}


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (f"{__name__}:nothing", "returned NoneType, not a torch.optim.Optimizer or a list of them"),
        (f"{__name__}:without_the_head", r"2.weight is in 0 groups"),
        (f"{__name__}:twice", "0.weight is in 2 groups"),
        (f"{__name__}:missing", "has no attribute 'missing'"),
        ("no_such_module:f", "No module named 'no_such_module'"),
    ],
)
def test_what_it_may_not_be_or_return(function: str, told: str) -> None:
    with pytest.raises(ModelError, match=f"inner.optimizer = '{function}'.*{told}"):
        build_inner_optimizers(toy.make_model(), inner(function))


# --- one inner step -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clip_norm", "after"), [(1.0, 1.0), (100.0, 8.0), ("none", 8.0)])
def test_gradients_are_clipped_to_the_norm_or_not_at_all(clip_norm: float | str, after: float) -> None:
    parameter = nn.Parameter(torch.zeros(64))
    parameter.grad = torch.ones(64)
    clip_gradients([parameter], inner("sgd", clip_norm=clip_norm))
    assert float(parameter.grad.norm()) == pytest.approx(after, rel=1e-5)


# --- several for one inner step -----------------------------------------------------------------------------------


def step(diloco: DiLoCo, optimizers: list[Optimizer], unit: int) -> None:
    x, y = (each.to(next(diloco.model.parameters()).dtype) for each in toy.batch(unit))
    loss = nn.functional.mse_loss(diloco.model(x), y)
    loss.backward()
    diloco.report_loss(loss)
    for optimizer in optimizers:
        optimizer.step()
    diloco.model.zero_grad()


def trained(
    toy_run: MakeToy, inner: str, loop: Callable[[DiLoCo, list[Optimizer]], None], sync: str = "", **options: Any
) -> None:
    """A toy run of three rounds by one worker, whose loop is this."""
    run, model = toy_run(toy.spec(sync=sync, inner=inner, source="python-stdlib")), toy.make_model()
    optimizers = build_inner_optimizers(model, run.info().spec.inner)
    with run.connect(model, optimizers, **options) as diloco:
        loop(diloco, optimizers)
    assert run.final().state_digest == run.told("a").state_digest


SKIPPED = {"the first optimizer's": (0,), "the last one's": (1,)}


@pytest.mark.slow
@pytest.mark.parametrize("skipped", SKIPPED)
def test_two_optimizers_are_one_inner_step(toy_run: MakeToy, skipped: str) -> None:
    """The last one's step ends it. A GradScaler skips each of them for itself: the unit is spent, and the inner step counts
    unless it is the last one that is skipped."""
    seen = []

    def loop(diloco: DiLoCo, optimizers: list[Optimizer]) -> None:
        assert len(optimizers) == 2
        for unit in diloco.units():
            seen.append((diloco.global_step, unit))
            left_out = SKIPPED[skipped] if unit == 5 else ()
            step(diloco, [each for index, each in enumerate(optimizers) if index not in left_out], unit)

    trained(toy_run, 'optimizer = "muon"', loop)
    counted = 1 not in SKIPPED[skipped]
    assert [unit for _, unit in seen] == list(range(3 * toy.STEPS))
    assert [at for at, _ in seen] == [0, 1, 2, 3, 4, 5, *((6, 7) if counted else (5, 6)), 8, 9, 10, 11]


@pytest.mark.slow
def test_the_wrong_order_is_told_in_the_first_inner_step(toy_run: MakeToy) -> None:
    """The sync would come between the two, and the second would step on the next round's parameters."""

    def loop(diloco: DiLoCo, optimizers: list[Optimizer]) -> None:
        for unit in diloco.units():
            assert unit == 0
            step(diloco, optimizers[::-1], unit)

    with pytest.raises(RuntimeError, match="steps after the last one of the sequence that DiLoCo was given"):
        trained(toy_run, 'optimizer = "muon"', loop)


# --- resuming -----------------------------------------------------------------------------------------------------


def work(run: Toy, state_dir: Path, dies_at: int | None = None, held: Held | None = None) -> list[Tensor]:
    """As `outerstep worker` does it, but killed after so many inner steps. With `held`, parameters are in bf16. The
    parameters at the end."""
    model, spec = toy.make_model(), run.info().spec
    if held is not None:
        model = model.to(torch.bfloat16)
    optimizers = build_inner_optimizers(model, spec.inner, held)
    rates, steps = Schedule(spec, optimizers), 0
    with open_http(run.coordinator.url) as http:
        client = MortalClient(http, "toy", run.token, dies=lambda what, number: False)
        with DiLoCo(model, optimizers, client=client, run=client.run_detail(), name="a", state_dir=state_dir) as diloco:
            for unit in diloco.units():
                if diloco.inner_step == 0:
                    torch.manual_seed(diloco.data_seed)
                rates.set(diloco.global_step, diloco.warmup_scale)
                step(diloco, optimizers, unit)
                steps += 1
                if steps == dies_at:
                    client.die()
    return [each.detach() for each in model.parameters()]


def ends_of(
    tmp_path: Path, inner: str, sync: str, held: Held | None = None, codec: str = "int8"
) -> list[tuple[str | None, list[Tensor]]]:
    """The final digest and the parameters of an undisturbed run, and of one whose worker is killed in a round, twice."""
    ends = []
    for dies_at in ([], [9, 3]):
        directory = tmp_path / str(len(dies_at))
        with coordinator_thread(directory / "coordinator") as coordinator:
            text = toy.spec(steps=6, sync=sync, upload=codec, download=codec, inner=inner, source="python-stdlib")
            run = Toy(coordinator, text, directory)
            for death in dies_at:
                with pytest.raises(Killed):
                    work(run, directory / "a", death, held)
            parameters = work(run, directory / "a", held=held)
            ends.append((run.final().state_digest, parameters))
    return ends


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sync", "held"),
    [
        *(pytest.param(name, "", None, id=f"{name}-classic") for name in ("adamw", OWN, EIGHT_BIT)),
        *(
            pytest.param(name, SPREAD, None, id=f"{name}-spread", marks=() if name == "muon" else pytest.mark.nightly)
            for name in NAMES
        ),
        # Parameters in bf16 that are rounded stochastically, and moments in 8 bits.
        pytest.param("adamw", "", "8bit", id="little memory-classic"),
        pytest.param("muon", SPREAD, "8bit", id="little memory-spread"),
    ],
)
def test_a_resume_is_exact(tmp_path: Path, name: str, sync: str, held: Held | None) -> None:
    """Killed in the middle of the second round, before its last fragment is sent, and there again, the run ends in the
    same bits, whatever state the optimizers have."""
    inner = f'optimizer = "{name}"\nlearning_rate = 0.02\nwarmup_steps = 3'
    (undisturbed, _), (resumed, _) = ends_of(tmp_path, inner, sync, held)
    assert undisturbed == resumed


@pytest.mark.slow
def test_a_snapshot_of_other_optimizers_is_told(toy_run: MakeToy, tmp_path: Path) -> None:
    """A script that was changed between two starts."""
    run = toy_run(toy.spec(inner='optimizer = "muon"', source="python-stdlib"))
    with pytest.raises(Killed):
        work(run, tmp_path / "a", toy.STEPS + 1)
    with pytest.raises(ModelError, match="not those of the .* 1 of them, and 2 in"):
        run.worker("a", state_dir=tmp_path / "a")


# --- points beside the parameters ---------------------------------------------------------------------------------


def schedule_free(model: nn.Module, inner: InnerSpec) -> list[Optimizer]:
    optimizer = AdamWScheduleFree(model.parameters(), lr=inner.learning_rate, betas=(0.9, 0.95))
    optimizer.train()
    return [optimizer]


FREE = f"{__name__}:schedule_free"
FREE_SPEC = f'optimizer = "{FREE}"\nlearning_rate = 0.02\nschedule = "constant"\nwarmup_steps = 0'


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["", SPREAD], ids=["classic", "spread"])
def test_the_point_of_a_schedule_free_optimizer_goes_where_the_parameters_go(toy_run: MakeToy, sync: str) -> None:
    """Between two inner steps nothing but a sync moves them, and it moves both by the same; an evaluation, which puts
    the run's parameters into the model for a while, moves neither. At the end they are one."""
    offsets = []

    def loop(diloco: DiLoCo, optimizers: list[Optimizer]) -> None:
        (optimizer,) = optimizers
        parameter = next(diloco.model.parameters())
        for unit in diloco.units():
            z = optimizer.state[parameter].get("z")
            if z is not None:
                offsets.append(float((z - parameter.detach() - told[0]).abs().max()))
            step(diloco, optimizers, unit)
        assert all(torch.equal(optimizer.state[each]["z"], each) for each in diloco.model.parameters())

    told = [torch.zeros(())]
    real = AdamWScheduleFree.step

    def noted(self: Any, *arguments: Any, **options: Any) -> Any:
        """The offset right after the inner step, before the sync, which is in a hook after it."""
        loss = real(self, *arguments, **options)
        parameter = self.param_groups[0]["params"][0]
        told[0] = (self.state[parameter]["z"] - parameter).detach().clone()
        return loss

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(AdamWScheduleFree, "step", noted)
        evaluate = lambda: EvaluationReport(loss=1.0, tokens=1, bytes=None)  # noqa: E731
        trained(toy_run, FREE_SPEC, loop, sync, evaluate=evaluate)
    assert len(offsets) == 3 * toy.STEPS - 1
    assert max(offsets) < 1e-6
    assert float(told[0].abs().max()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["", SPREAD], ids=["classic", "spread"])
def test_a_schedule_free_optimizer_resumes_where_it_was_but_for_rounding(tmp_path: Path, sync: str) -> None:
    (_, undisturbed), (_, resumed) = ends_of(tmp_path, FREE_SPEC, sync, codec="fp32")
    for one, other in zip(undisturbed, resumed, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)
