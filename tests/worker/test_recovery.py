"""How a worker comes to the run's state: by deltas or by a checkpoint, whichever is fewer bytes; and when its own state
is wrong."""

import threading
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.worker import toy
from tests.worker.toy import Toy, coordinator_thread
from worker.diloco import DiLoCo
from worker.link.client import Client

pytestmark = pytest.mark.slow

FRAGMENTS = 3


class CountingClient(Client):
    """Counts what it fetches, on several threads; `counts` has the numbers by kind."""

    def __init__(self, *arguments, counts: dict[str, int], **options) -> None:
        super().__init__(*arguments, **options)
        self._counts, self._counting = counts, threading.Lock()

    def _count(self, kind: str) -> None:
        with self._counting:
            self._counts[kind] = self._counts.get(kind, 0) + 1

    def delta(self, round_number, p, limit_bytes, member_token=None, **options):
        payload = super().delta(round_number, p, limit_bytes, member_token, **options)
        if member_token is None:  # with it, it is the sync's
            self._count("deltas")
        return payload

    def checkpoint_fragment(self, state_round, fragment, limit_bytes):
        self._count("checkpoint fragments")
        return super().checkpoint_fragment(state_round, fragment, limit_bytes)


class Gone(Exception):
    """Ends a worker without handing anything in."""


def go_at(round_number: int, diloco: DiLoCo) -> None:
    if diloco.round == round_number:
        raise Gone


def another_model() -> nn.Module:
    """The same shapes, other values."""
    model = toy.make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model


@pytest.mark.parametrize(
    ("codec", "joins_at", "model", "fetched"),
    [
        # A checkpoint has 8 bytes per parameter, a round's deltas have 1 (int8) or 4 (fp32); the latest is checkpoint 3.
        ("int8", 4, toy.make_model, {"deltas": 4 * FRAGMENTS}),
        ("int8", 4, another_model, {"deltas": (FRAGMENTS + 1, 2 * FRAGMENTS), "checkpoint fragments": FRAGMENTS}),
        ("fp32", 4, toy.make_model, {"deltas": 1 * FRAGMENTS, "checkpoint fragments": FRAGMENTS}),
        ("int8", 0, toy.make_model, {}),
        ("int8", 0, another_model, {"checkpoint fragments": FRAGMENTS}),
    ],
)
def test_a_newcomer_fetches_the_fewer_bytes(
    tmp_path: Path, codec: str, joins_at: int, model: Callable[[], nn.Module], fetched: dict
) -> None:
    """A model built from the run's seed is state 0, so only deltas are missing; any other one is found out by the first
    of them; those that were under way then come as well, which is luck."""
    counts: dict[str, int] = {}
    scales: list[float] = []

    def note(diloco: DiLoCo) -> None:
        scales.append(diloco.warmup_scale)

    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        text = toy.spec(rounds=joins_at + 1, upload=codec, download=codec, checkpoints="every_rounds = 3\nkeep = 9")
        run = Toy(coordinator, text, tmp_path)
        with pytest.raises(Gone):
            run.worker("a", on_step=partial(go_at, joins_at))
        coordinator.await_state("toy", joins_at)
        client = partial(CountingClient, counts=counts)
        run.worker("b", client_class=client, on_step=note, model=model)
        assert run.final().state_digest == run.told("b").state_digest
    assert counts.keys() == fetched.keys()
    for kind, expected in fetched.items():
        least, most = expected if isinstance(expected, tuple) else (expected, expected)
        assert least <= counts[kind] <= most, kind
    assert scales[0] == (2 / 11 if joins_at else 1), "the inner optimizer of a newcomer warms up"


def flip(values: torch.Tensor) -> None:
    """Flip a bit of the exponent, as a cosmic ray does: the value becomes about 1e38 times as large, or as small."""
    values[:1].view(torch.int32).bitwise_xor_(1 << 30)


@pytest.mark.covers("reliability:divergence")
@pytest.mark.parametrize("where", ["theta", "momentum"])
def test_a_flipped_bit_is_found_and_healed(tmp_path: Path, where: str) -> None:
    """In the middle of round 1: the contribution is refused, the worker takes the run's state again and goes on. θ is
    what a pseudo-gradient is computed against, so it is checked before that; no average ever sees the damage."""

    def hit(diloco: DiLoCo) -> None:
        if (diloco.round, diloco.inner_step) == (1, 2) and not hits:
            hits.append(1)
            assert diloco.joined.state.reader is not None
            wait([diloco.joined.state.reader])  # its digests are taken beside the training
            flip(getattr(diloco.joined.state, where)[1])

    hits: list[int] = []
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(), tmp_path)
        diloco = run.worker("a", on_step=hit)
        info = run.final()
        assert info.state_digest == run.told("a").state_digest
        assert (info.divergences, run.told("a").divergences) == (1, 1)
        with coordinator.client() as http:
            events = [event["kind"] for event in http.get("/v1/runs/toy/events?limit=1000").json()["items"]]
        assert events.count("diverged") == 1
    assert all(float(theta.abs().max()) < 10 for theta in diloco.joined.state.theta)
    assert info.tokens == 3 * toy.STEPS * info.spec.unit_tokens, "the units of the refused work were trained on again"
