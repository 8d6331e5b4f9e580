"""Training that goes on while fragments travel, against the real coordinator: nothing waits, nothing is lost, nothing
counts twice, and all replicas are identical."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protocol.errors import CodecError
from protocol.messages import EpochInfo
from protocol.spec.run import RunSpec, parse_spec
from protocol.spec.sections import SyncSpec
from tests.support.waiting import wait_until
from tests.worker import toy
from tests.worker.toy import MakeToy, Toy
from worker.diloco import DiLoCo
from worker.link.client import Client, open_http
from worker.rounds.schedule import schedule

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_h")]

STEPS = 6
FRAGMENTS = 3
ROUNDS = 4
SCHEDULES = {
    "eager": 'overlap = "eager"',
    "together": "overlap = 2",
    "spread": 'offsets = "spread"\noverlap = 2',
    "longer than the offsets": 'offsets = "spread"\noverlap = 4',
    "spread, no overlap": 'offsets = "spread"',
    "mixed, no overlap": "alpha = 0.5",
    "no wait": 'wait = "never"',
}
EVERY = pytest.mark.parametrize("sync", SCHEDULES.values(), ids=SCHEDULES.keys())


def spec(sync: str, **options: Any) -> str:
    return toy.spec(rounds=options.pop("rounds", ROUNDS), steps=STEPS, sync=sync, **options)


def epoch(run: Toy) -> EpochInfo:
    (item,) = run.get("/units")["items"]
    return EpochInfo.model_validate(item)


@pytest.mark.parametrize(
    ("sync", "upload", "download"),
    [
        *(("", *codecs) for codecs in (("fp32", "fp32"), ("int8", "int8"), ("ternary", "int4"))),
        *((sync, "int8", "int8") for sync in SCHEDULES.values()),
        *((SCHEDULES[name], "ternary", "int8") for name in ("eager", "spread")),
    ],
)
def test_replicas_are_identical_and_every_unit_is_in_the_model(
    toy_run: MakeToy, sync: str, upload: str, download: str
) -> None:
    steps = Counter[str]()
    run = toy_run(spec(sync, min_workers=3, upload=upload, download=download))
    done = run.workers(
        ["a", "b", "c"], **{name: {"on_step": lambda diloco: steps.update([diloco.name])} for name in "abc"}
    )
    info = run.final()
    assert info.state_digest is not None
    assert [run.told(name).state_digest for name in "abc"] == [info.state_digest] * 3
    if not sync:
        for one, *others in zip(*(done[name].model.parameters() for name in "abc"), strict=True):
            assert all(torch.equal(one, other) for other in others)
    assert (epoch(run).consumed, epoch(run).assigned) == (steps.total(), {})
    assert info.tokens == steps.total() * done["a"].spec.unit_tokens
    if "never" in sync:  # these steps take no time
        assert 3 * ROUNDS * STEPS < steps.total() <= 3 * (4 * (ROUNDS - 1) + 1) * STEPS
    else:
        assert steps == dict.fromkeys("abc", ROUNDS * STEPS)
    assert info.divergences == 0
    assert sum(run.told(name).tokens for name in "abc") == info.tokens


def merged_at(sync: SyncSpec, round_number: int, p: int) -> tuple[int, int]:
    """The round and the inner step after which a fragment is merged."""
    last, first = round_number + 1 == sync.rounds, round_number == 0
    # Steps that were trained while deltas travelled are part of the last round's H; one step is left in any case.
    steps = 1 if last and sync.wait == "never" else STEPS
    merged = schedule(sync, FRAGMENTS, steps, last=last, first=first).merged[p]
    return round_number, min(merged, sync.most_steps_of(STEPS))


@pytest.mark.covers("reliability:overlap")
@EVERY
def test_the_training_goes_on_until_the_delta_is_needed(toy_run: MakeToy, sync: str) -> None:
    text = spec(sync)
    begun = [(0, 1)]

    class Reversed(Client):
        """A delta comes no sooner than when it is merged: whoever waits for it before that waits for ever."""

        def delta(self, round_number, p, limit_bytes, member_token=None, **options):
            needed = merged_at(parse_spec(text).sync, round_number, p)
            wait_until(lambda: begun[-1] >= needed)
            return super().delta(round_number, p, limit_bytes, member_token, **options)

    run = toy_run(text)
    # Called when a step is done, and so the next one begins.
    run.worker("a", client_class=Reversed, on_step=lambda diloco: begun.append((diloco.round, diloco.inner_step + 1)))
    assert run.final().state_digest == run.told("a").state_digest


@pytest.mark.covers("reliability:overlap")
@pytest.mark.parametrize(
    ("sync", "steps"),
    [
        *((SCHEDULES[name], STEPS) for name in ("eager", "together", "spread", "longer than the offsets")),
        # In the first round two fragments are sent after step 1, and only one of them is merged at once (seed 60007).
        ('offsets = "spread"\noverlap = 1', 3),
    ],
)
def test_alone_and_with_a_plain_outer_step_it_is_plain_training(toy_run: MakeToy, sync: str, steps: int) -> None:
    """One worker, fp32, outer learning rate 1 and no momentum: the mean is its own work, so nothing may be lost of what
    was trained while it travelled, and nothing may count twice."""
    text = toy.spec(rounds=ROUNDS, steps=steps, sync=sync, upload="fp32", download="fp32", momentum=0.0)
    text = text.replace("[outer]", "[outer]\nlearning_rate = 1.0")
    done = toy_run(text).worker("a")
    model, optimizer = toy.model_and_optimizer()
    for unit in range(ROUNDS * steps):
        x, y = toy.batch(unit)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, plain in zip(done.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


class Ones(nn.Module):
    """Plain gradient descent with learning rate 1 adds 1 to every value in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(FRAGMENTS * 256))

    def forward(self) -> torch.Tensor:
        return -self.values.sum()


def ones(
    run: Toy,
    on_step: Callable[[DiLoCo, torch.Tensor], None],
    client_class: Callable[..., Client] = Client,
    state_dir: Path | None = None,
    name: str = "a",
) -> list[int]:
    """Train `Ones` to the end of the run. Return the units trained on."""
    model, units = Ones(), list[int]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with open_http(run.coordinator.url) as http:
        client = client_class(http, "toy", run.token)
        with DiLoCo(model, optimizer, client=client, run=client.run_detail(), name=name, state_dir=state_dir) as diloco:
            for unit in diloco.units():
                units.append(unit)
                model().backward()
                optimizer.step()
                optimizer.zero_grad()
                on_step(diloco, model.values.detach())
    return units


class Forgetful(Client):
    """An earlier process of this worker, whose disk is gone, has contributed to fragment 0: of fewer units."""

    def contribute(self, member_token, header, frames, **options):
        if (header.round, header.fragment) == (0, 0):
            (start, _), *_ = header.units
            fewer = {"units": [[start, start + 1]], "tokens": header.tokens // 4}
            super().contribute(member_token, header.model_copy(update=fewer), frames)
        super().contribute(member_token, header, frames, **options)


def test_what_an_earlier_process_contributed_stands_and_nothing_beside_it_is_carried(toy_run: MakeToy) -> None:
    """Found beside simulation seed 50756: the new process took the other's contribution for its own, so whatever it had
    trained since its own was sent went into the next one, though the other one may have had it."""
    text = spec("overlap = 2", rounds=2, upload="fp32", download="fp32", momentum=0.0)
    merged = list[float]()

    def note(diloco: DiLoCo, values: torch.Tensor) -> None:
        if (diloco.round, diloco.inner_step) == (1, 0):
            merged.extend(values.tolist())

    ones(toy_run(text.replace("[outer]", "[outer]\nlearning_rate = 1.0")), note, Forgetful)
    assert merged == pytest.approx([4.0] * 768), "what is in the mean, and not the 2 steps since then"


@pytest.mark.parametrize("sync", [SCHEDULES["eager"], SCHEDULES["spread"]], ids=["eager", "spread"])
def test_training_that_diverged_is_not_sent(toy_run: MakeToy, sync: str) -> None:
    def spoil(diloco: DiLoCo) -> None:
        if (diloco.round, diloco.inner_step) == (1, 1):  # and so the second step's parameters
            next(iter(diloco.model.parameters())).register_hook(lambda gradient: gradient * float("nan"))

    run = toy_run(spec(sync))
    with pytest.raises(CodecError, match="the training has diverged"):
        run.worker("a", on_step=spoil)
    assert run.told("a").state == "left"
    assert run.info().round <= 2, "nobody else could have brought what round 2 waits for"


# --- alpha ---------------------------------------------------------------------------------------------------------


START = torch.linspace(-1, 1, FRAGMENTS * 256)
# The mean of the parameters after each step, by round, of a worker that nobody disturbs: 5 % of the way to 3 each.
ALONE = [
    [pytest.approx(3 - 3 * 0.95 ** (STEPS * r + step), abs=1e-4) for step in range(1, STEPS + 1)] for r in range(3)
]


class Bowl(nn.Module):
    """The loss is half the squared distance to `bottom`: the gradient is the distance."""

    def __init__(self, bottom: float) -> None:
        super().__init__()
        self.values = nn.Parameter(START.clone())
        self.bottom = bottom

    def forward(self) -> Tensor:
        return 0.5 * (self.values - self.bottom).square().sum()


def mixed_spec(sync: str, upload: str = "fp32") -> str:
    return toy.spec(rounds=ROUNDS, steps=STEPS, upload=upload, download="fp32", sync=sync).replace(
        "[outer]", "[outer]\nlearning_rate = 0.6"
    )


def expected(run: RunSpec) -> tuple[Tensor, list[list[float]]]:
    """θ_global of the end, and the mean of the local parameters after each inner step, by round."""
    local, theta = START.double().clone(), START.double().clone()
    momentum, alpha = torch.zeros_like(theta), float(run.sync.alpha)
    pieces = [slice(256 * p, 256 * p + 256) for p in range(FRAGMENTS)]
    deltas: dict[int, Tensor] = {}
    path: list[list[float]] = []
    for round_ in range(ROUNDS):
        due = schedule(run.sync, FRAGMENTS, STEPS, last=round_ + 1 == ROUNDS, first=round_ == 0)
        path.append([])
        for step in range(STEPS + 1):
            if step:
                local -= 0.05 * (local - 3.0)
            for p, piece in enumerate(pieces):
                if due.sent[p] == step:
                    deltas[p] = theta[piece] - local[piece]
            for p, piece in enumerate(pieces):
                if due.merged[p] == step:
                    momentum[piece] = run.outer.momentum * momentum[piece] + deltas[p]
                    theta[piece] -= run.outer.learning_rate * (run.outer.momentum * momentum[piece] + deltas.pop(p))
                    local[piece] = alpha * local[piece] + (1 - alpha) * theta[piece]
            path[-1].append(float(local.mean()))
    return theta, path


def trained(toy_run: MakeToy, text: str) -> tuple[Sequence[Tensor], list[list[float]]]:
    model = Bowl(3.0)
    path: list[list[float]] = [[] for _ in range(ROUNDS)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = toy_run(text)
    with run.connect(model, optimizer) as diloco:
        for unit in diloco.units():
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
            path[unit // STEPS].append(float(model.values.detach().mean()))
    assert run.final().state_digest == run.told("a").state_digest
    return diloco.joined.state.theta, path


@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("sync", ["", 'offsets = "spread"', "overlap = 2", 'overlap = "eager"'])
def test_it_is_the_papers_rule(toy_run: MakeToy, sync: str, alpha: float) -> None:
    """Without an overlap it was refused, though there are local parameters to mix then as well; and 1 was."""
    text = mixed_spec(f"{sync}\nalpha = {alpha}")
    theta, path = trained(toy_run, text)
    expected_theta, expected_path = expected(parse_spec(text))
    torch.testing.assert_close(torch.cat(list(theta)).double(), expected_theta, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(path[:-1], expected_path[:-1], strict=True):
        assert ours == pytest.approx(theirs[1:], abs=1e-5)


def test_what_the_codec_left_out_counts_once(toy_run: MakeToy) -> None:
    """It is carried, and it is in the local parameters too: with alpha = 1 they stay all the same."""
    _, path = trained(toy_run, mixed_spec("alpha = 1.0", upload="ternary"))
    assert path[:-1] == ALONE
