"""What a worker lives through: lines that break in the middle of a body, disks that are full or that lose things, a
coordinator that goes back to a backup; and what an operator does to it."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from protocol import wire
from protocol.digest import content_digest, digest
from protocol.errors import Problem
from protocol.messages import Metrics
from protocol.spec.run import parse_spec
from tests.support.full_disk import small_disk
from tests.support.http_server import Handler, serving
from tests.support.states import zeros_of_state_0
from tests.support.waiting import wait_until
from tests.worker import toy
from tests.worker.toy import Toy, coordinator_thread
from worker.diloco import DiLoCo
from worker.errors import RunEnded
from worker.link.client import Client, open_http
from worker.rounds.exchange import Exchange
from worker.state import state_dir

pytestmark = pytest.mark.slow


def test_uploads_that_break_off_in_the_middle_are_sent_again() -> None:
    """Over a real socket: the other end hangs up after a part of the body, twice, and then takes it."""
    header, zeros = zeros_of_state_0(2 << 20)
    frames = [bytes([i]) * len(frame) for i, frame in enumerate(zeros)]
    arrived: list[tuple[bytes, str]] = []
    attempts: list[int] = []

    class HangsUp(Handler, BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            length = int(self.headers["Content-Length"])
            attempts.append(length)
            if len(attempts) < 3:
                self.rfile.read(len(attempts) * 1_500_000)
                self.close_connection = True  # with the rest of the body unread: a reset
                return
            arrived.append((self.rfile.read(length), self.headers["Content-Digest"]))
            self.created()

    with serving(HangsUp) as url, open_http(url) as http:
        client = Client(http, "r", "t", sleep=lambda _: None)
        client.seed("m", header, frames)
    body = b"".join([wire.pack_header(header), *frames])
    assert arrived == [(body, content_digest(digest(body)))]
    assert attempts == [len(body)] * 3


def test_a_proxy_that_cuts_bodies_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Small requests got through, so the log said in turns that the coordinator could not be reached and that it
    answered again."""
    header, zeros = zeros_of_state_0(1 << 20)
    frames = [bytes(frame) for frame in zeros]
    cut = 8

    class CutsBodies(Handler, BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            nonlocal cut
            if self.path.endswith("/lease"):
                self.rfile.read(int(self.headers["Content-Length"]))
                body = json.dumps({"directive": "continue", "reason": "", "lease_s": 60}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
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


def test_a_full_disk_is_waited_for_however_long_it_takes() -> None:
    """507 for ten hours: the worker asks when the coordinator wishes, and its work is kept and taken in the end."""
    now = 0.0
    bodies: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(request.read())
        if now < 36_000:
            full = Problem("storage-full", "the coordinator's disk is full", retry_after_s=10)
            return httpx.Response(full.status, json=full.document(), headers={"Retry-After": "10"})
        return httpx.Response(201)

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    http = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://c")
    client = Client(http, "r", "t", sleep=sleep, clock=lambda: now)
    client.seed("m", *zeros_of_state_0(100))
    assert now == 36_000
    assert len(set(bodies)) == 1


def test_a_worker_whose_own_disk_is_full_waits_for_room_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It said "no space left on device" and left."""
    phases: list[str | None] = []
    with small_disk(tmp_path / "disk") as disk, coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(rounds=3), tmp_path)
        workers: list[DiLoCo] = []

        def fill(diloco: DiLoCo) -> None:
            workers[:] = [diloco]
            if (diloco.round, diloco.inner_step) == (1, 1):
                disk.fill()

        class Waits(Client):
            def pause(self, seconds: float) -> None:
                if seconds != state_dir.LOOKS_S:  # it waits for something else
                    super().pause(seconds)
                    return
                workers[0].joined.heartbeat.beat()
                phases.append(run.told("a").metrics.phase)
                if len(phases) == 3:
                    disk.make_room()

        with caplog.at_level("INFO"):
            run.worker("a", state_dir=disk.root / "state", on_step=fill, client_class=Waits)
        assert run.told("a").state_digest == run.final().state_digest
    assert phases == ["disk full"] * 3
    said = [each for each in caplog.messages if str(disk.root) in each]
    assert len(said) == 2, said
    assert re.search(rf"the disk of {disk.root}/state is full: \S+ needs [\d.]+ kB, [\d.]+ \S*B are free", said[0])
    assert said[1].startswith("there is room in")


def test_waiting_for_room_ends_with_the_run(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk, coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(rounds=3), tmp_path)

        class Waits(Client):
            def pause(self, seconds: float) -> None:
                if seconds != state_dir.LOOKS_S:  # it waits for something else
                    super().pause(seconds)
                    return
                with run.coordinator.client() as http:
                    http.patch("/v1/runs/toy", json={"state": "stopped"}).raise_for_status()
                workers[0].joined.heartbeat.beat()

        workers: list[DiLoCo] = []

        def fill(diloco: DiLoCo) -> None:
            workers[:] = [diloco]
            if (diloco.round, diloco.inner_step) == (1, 1):
                disk.fill()

        run.worker("a", state_dir=disk.root / "state", on_step=fill, client_class=Waits)
        assert workers[0].round == 1
        assert sorted(each.name for each in (disk.root / "state").glob("*.new")) == []


def test_a_run_that_goes_back_leaves_no_moments_of_the_dropped_states(tmp_path: Path) -> None:
    """Their gradients may have been far larger, and would keep the steps small for a hundred steps and more."""
    text = toy.spec(rounds=4, checkpoints="every_rounds = 1\nkeep = 9", inner="joiner_warmup_steps = 2")
    moments, scales, model = list[int](), list[float](), toy.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, text, tmp_path)
        with coordinator.client() as admin, run.connect(model, optimizer) as diloco:
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
