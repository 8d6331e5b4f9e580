"""What a worker lives through: lines that break in the middle of a body, disks that are full or that lose things, a
coordinator that goes back to a backup; and what an operator does to it."""

import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from torch import nn

from protocol.errors import Problem
from protocol.messages import Metrics
from protocol.spec.run import parse_spec
from tests.support.full_disk import SmallDisk, small_disk
from tests.support.http_server import Handler, serving
from tests.support.states import zeros_of_state_0
from tests.support.waiting import wait_until
from tests.worker import toy
from tests.worker.toy import MakeToy, Toy
from worker.diloco import DiLoCo
from worker.errors import RunEnded
from worker.link.client import Client, open_http
from worker.rounds.exchange import Exchange
from worker.state import state_dir

pytestmark = pytest.mark.slow


def test_a_proxy_that_cuts_bodies_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Small requests got through, so the log said in turns that the coordinator could not be reached and that it
    answered again."""
    header, zeros = zeros_of_state_0(1 << 20)
    frames = [bytes(frame) for frame in zeros]
    cut = 8

    class CutsBodies(Handler):
        def do_PUT(self) -> None:  # noqa: N802
            nonlocal cut
            if self.path.endswith("/lease"):
                self.rfile.read(int(self.headers["Content-Length"]))
                body = json.dumps({"directive": "continue", "reason": "", "lease_s": 60}).encode()
                self.answer(200, body)
            elif cut:
                cut -= 1
                self.rfile.read(1 << 16)
                self.close_connection = True
            else:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.created()

    with serving(CutsBodies) as url, open_http(url) as http:
        client = Client(http, "r", "t", sleep=lambda _: client.renew_lease("m", "w", Metrics()))
        client.seed("m", header, frames)
    lines = [record.getMessage() for record in caplog.records]
    (named,) = (line for line in lines if "answers other requests" in line)
    assert named.startswith("PUT /v1/runs/r/")
    assert "the connection was cut 3 times while 4.19 MB were sent" in named
    assert "A proxy in between may limit" in named
    assert sum("cannot be reached" in line for line in lines) == 2


def test_a_worker_says_now_and_then_whom_its_round_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    """It waited for a lost worker for minutes and had not said a word."""
    now = 0.0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal now
        now += 5.0
        waits = Problem("not-published", "round 0, fragment 0: waiting for 1 of 2 workers (two)")
        problem = waits if now < 130 else Problem("run-ended", "the run is stopped")
        return httpx.Response(problem.status, json=problem.document())

    http = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://c")
    client = Client(http, "r", "t", sleep=lambda _: None, clock=lambda: now)
    membership: Any = SimpleNamespace(client=client, act=lambda call: call("m"))
    state: Any = SimpleNamespace(theta=[torch.zeros(4)])
    spec = parse_spec('name = "r"\nmodel.preset = "tiny"\nsync.rounds = 1')
    exchange = Exchange(membership, spec, state, torch.device("cpu"))
    contribution: Any = SimpleNamespace(round=0, fragment=0)
    sent = threading.Event()
    sent.set()
    with caplog.at_level("INFO"), pytest.raises(RunEnded):
        exchange.await_delta(contribution, sent, threading.Event())
    assert caplog.messages == ["round 0, fragment 0: waiting for 1 of 2 workers (two)"] * 3  # after 5, 65 and 125 s


def train_on(disk: SmallDisk, run: Toy, while_full: Callable[[DiLoCo], None]) -> DiLoCo:
    """A worker whose disk is full from round 1 on; `while_full` is called whenever it looks for room."""
    workers: list[DiLoCo] = []

    def fill(diloco: DiLoCo) -> None:
        workers[:] = [diloco]
        if (diloco.round, diloco.inner_step) == (1, 1):
            disk.fill()

    class Waits(Client):
        def pause(self, seconds: float) -> None:
            if seconds == state_dir.LOOKS_S:
                while_full(workers[0])
            else:  # it waits for something else
                super().pause(seconds)

    return run.worker("a", state_dir=disk.root / "state", on_step=fill, client_class=Waits)


def test_a_worker_whose_own_disk_is_full_waits_for_room_and_says_so(
    toy_run: MakeToy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It said "no space left on device" and left."""
    phases: list[str | None] = []
    with small_disk(tmp_path / "disk") as disk, caplog.at_level("INFO"):
        run = toy_run()

        def look(diloco: DiLoCo) -> None:
            diloco.joined.heartbeat.beat()
            phases.append(run.told("a").metrics.phase)
            if len(phases) == 3:
                disk.make_room()

        train_on(disk, run, look)
        assert run.told("a").state_digest == run.final().state_digest
    assert phases == ["disk full"] * 3
    said = [each for each in caplog.messages if str(disk.root) in each]
    assert len(said) == 2, said
    assert re.search(rf"the disk of {disk.root}/state is full: \S+ needs [\d.]+ kB, [\d.]+ \S*B are free", said[0])
    assert said[1].startswith("there is room in")


def test_waiting_for_room_ends_with_the_run(toy_run: MakeToy, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        run = toy_run()

        def stop(diloco: DiLoCo) -> None:
            run.stop()
            diloco.joined.heartbeat.beat()

        assert train_on(disk, run, stop).round == 1
        assert list((disk.root / "state").glob("*.new")) == []


def test_a_run_that_goes_back_leaves_no_moments_of_the_dropped_states(toy_run: MakeToy) -> None:
    """Their gradients may have been far larger, and would keep the steps small for a hundred steps and more."""
    text = toy.spec(rounds=4, checkpoints="every_rounds = 1\nkeep = 9", inner="joiner_warmup_steps = 2")
    moments, scales, model = list[int](), list[float](), toy.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = toy_run(text)
    with run.coordinator.client() as admin, run.connect(model, optimizer) as diloco:
        for unit in diloco.units():
            toy.step(diloco, model, optimizer, unit)
            moments.append(int(optimizer.state[next(model.parameters())].get("step", 0)))
            scales.append(diloco.warmup_scale)
            if len(moments) == 10:
                assert diloco.round == 2
                order = {"to": 0, "from_round": 2}
                wait_until(lambda: admin.post("/v1/runs/toy/rollback", json=order).is_success)  # noqa: B023
                diloco.joined.heartbeat.beat()
                admin.patch("/v1/runs/toy", json={"state": "running"}).raise_for_status()
    assert run.final().state_digest == run.told("a").state_digest
    restarted = moments.index(0)
    assert restarted >= 10
    assert moments == [*range(1, restarted + 1), *range(len(moments) - restarted)]
    assert scales[:restarted] == [1.0] * restarted
    assert scales[restarted : restarted + 3] == [pytest.approx(1 / 3), pytest.approx(2 / 3), 1.0]


# --- how a worker comes to the run's state -------------------------------------------------------------------------


FRAGMENTS = 3


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
    ("codec", "joins_at", "model", "keep", "expected"),
    [
        # A checkpoint has 8 bytes per parameter, a round's deltas have 1 (int8) or 4 (fp32); the latest is checkpoint 3.
        ("int8", 4, toy.make_model, 9, {"deltas": 4 * FRAGMENTS}),
        ("int8", 4, another_model, 9, {"deltas": (FRAGMENTS + 1, 2 * FRAGMENTS), "checkpoint fragments": FRAGMENTS}),
        ("fp32", 4, toy.make_model, 9, {"deltas": 1 * FRAGMENTS, "checkpoint fragments": FRAGMENTS}),
        ("int8", 0, toy.make_model, 9, {}),
        ("int8", 0, another_model, 9, {"checkpoint fragments": FRAGMENTS}),
        # The deltas before the only checkpoint that is kept are deleted.
        ("int8", 5, toy.make_model, 1, {"deltas": 2 * FRAGMENTS, "checkpoint fragments": FRAGMENTS}),
    ],
)
def test_a_newcomer_fetches_the_fewer_bytes(
    toy_run: MakeToy, codec: str, joins_at: int, model: Callable[[], nn.Module], keep: int, expected: dict[str, Any]
) -> None:
    """A model built from the run's seed is state 0, so only deltas are missing; any other one is found out by the first
    of them; those that were under way then come as well, which is luck."""
    fetched, scales = list[str](), list[float]()

    class Noting(Client):
        def delta(self, round_number, p, limit_bytes, member_token=None, **options):
            payload = super().delta(round_number, p, limit_bytes, member_token, **options)
            if member_token is None:  # with it, it is the sync's
                fetched.append("deltas")
            return payload

        def checkpoint_fragment(self, state_round, fragment, limit_bytes):
            fetched.append("checkpoint fragments")
            return super().checkpoint_fragment(state_round, fragment, limit_bytes)

    def note(diloco: DiLoCo) -> None:
        scales.append(diloco.warmup_scale)

    checkpoints = f"every_rounds = 3\nkeep = {keep}"
    run = toy_run(toy.spec(rounds=joins_at + 1, upload=codec, download=codec, checkpoints=checkpoints))
    with pytest.raises(Gone):
        run.worker("a", on_step=partial(go_at, joins_at))
    run.coordinator.await_state("toy", joins_at)
    run.worker("b", client_class=Noting, on_step=note, model=model)
    assert run.final().state_digest == run.told("b").state_digest
    assert set(fetched) == expected.keys()
    for kind, number in expected.items():
        least, most = number if isinstance(number, tuple) else (number, number)
        assert least <= fetched.count(kind) <= most, kind
    assert scales[0] == (2 / 11 if joins_at else 1), "the inner optimizer of a newcomer warms up"


def flip(values: torch.Tensor) -> None:
    """Flip a bit of the exponent, as a cosmic ray does: the value becomes about 1e38 times as large, or as small."""
    values[:1].view(torch.int32).bitwise_xor_(1 << 30)


@pytest.mark.covers("reliability:divergence")
@pytest.mark.parametrize("where", ["theta", "momentum"])
def test_a_flipped_bit_is_found_and_healed(toy_run: MakeToy, where: str) -> None:
    """In the middle of round 1: the contribution is refused, the worker takes the run's state again and goes on. θ is
    what a pseudo-gradient is computed against, so it is checked before that; no average ever sees the damage."""

    def hit(diloco: DiLoCo) -> None:
        if (diloco.round, diloco.inner_step) == (1, 2) and not hits:
            hits.append(1)
            assert diloco.joined.state.reader is not None
            wait([diloco.joined.state.reader])  # its digests are taken beside the training
            flip(getattr(diloco.joined.state, where)[1])

    hits: list[int] = []
    run = toy_run()
    diloco = run.worker("a", on_step=hit)
    info = run.final()
    assert info.state_digest == run.told("a").state_digest
    assert (info.divergences, run.told("a").divergences) == (1, 1)
    assert [event["kind"] for event in run.events()].count("diverged") == 1
    assert all(float(theta.abs().max()) < 10 for theta in diloco.joined.state.theta)
    assert info.tokens == 3 * toy.STEPS * info.spec.unit_tokens, "the units of the refused work were trained on again"
