"""Leaving in the middle of things: what was done is handed in, in bounded time, and nothing is trained on twice."""

import logging
import os
import signal
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from queue import SimpleQueue

import httpx
import pytest

from outerstep.common.exit_codes import Exit
from protocol.messages import RoundDetail
from tests.support.http_server import Handler, serving
from tests.support.states import zeros_of_state_0
from tests.support.waiting import PATIENCE_S, wait_until
from tests.worker import toy
from tests.worker.toy import Toy, coordinator_thread
from worker import process
from worker.diloco import DiLoCo
from worker.errors import Stopped
from worker.line.transfer import SEND_BYTES
from worker.link.client import Client, open_http
from worker.process import GracePeriod


def contributors(run: Toy, number: int) -> list[list[str]]:
    with run.coordinator.client() as http:
        detail = RoundDetail.model_validate(http.get(f"/v1/runs/toy/rounds/{number}").json())
    return [fragment.contributors for fragment in detail.fragments]


class StopsWhileUploading(Client):
    """Is asked to stop in the middle of its first upload for round 1."""

    def contribute(self, member_token, header, frames, **options):
        if header.round == 1:
            self.stop.set()
        super().contribute(member_token, header, frames, **options)


@pytest.mark.slow
def test_uploads_under_way_are_finished_and_no_delta_is_waited_for(tmp_path: Path) -> None:
    """The delta needs the other worker, which does not contribute before this one has left."""
    gone = threading.Event()

    def hold(diloco: DiLoCo) -> None:
        if (diloco.round, diloco.inner_step) == (1, 1):
            assert gone.wait(PATIENCE_S)

    def run_a() -> None:
        run.worker("a", client_class=StopsWhileUploading)
        gone.set()

    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(rounds=2, min_workers=2), tmp_path)
        a = threading.Thread(target=run_a)
        a.start()
        run.worker("b", on_step=hold)
        a.join()
        assert run.told("a").state == "left"
        assert contributors(run, 1) == [["a", "b"]] * 3
        assert run.told("b").state_digest == run.final().state_digest


def test_what_an_exception_leaves_behind_is_not_handed_in(tmp_path: Path) -> None:
    class Broken(Exception):
        pass

    def fail(diloco: DiLoCo) -> None:
        raise Broken

    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(), tmp_path)
        with pytest.raises(Broken):
            run.worker("a", on_step=fail)
        assert (run.told("a").state, run.told("a").contributions) == ("left", 0)


def test_a_coordinator_that_is_gone_holds_nobody_longer_than_the_grace() -> None:
    now = 0.0

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectTimeout("silence")

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    http = httpx.Client(transport=httpx.MockTransport(refuse), base_url="http://c")
    client = Client(http, "toy", "t", sleep=sleep, clock=lambda: now)
    grace = GracePeriod(client.stop, client.clock)
    assert not grace.is_set()
    client.stop.set()
    with pytest.raises(Stopped):
        client.until(grace).run_detail()
    assert process.HAND_IN_S <= now < process.HAND_IN_S + 10
    with pytest.raises(Stopped):
        client.run_detail()


def test_an_upload_ends_between_two_pieces() -> None:
    sent: list[int] = []

    class Transport(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            assert isinstance(request.stream, httpx.SyncByteStream)
            for piece in request.stream:
                sent.append(len(piece))
                if len(piece) == SEND_BYTES:
                    client.stop.set()
            return httpx.Response(201)

    client = Client(httpx.Client(transport=Transport(), base_url="http://c"), "toy", "t")
    with pytest.raises(Stopped, match="in the middle of a transfer"):
        client.seed("m", *zeros_of_state_0(2 << 20))
    assert sent[1:] == [SEND_BYTES], "after the header"


def test_whatever_hangs_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """An inner step that takes minutes, or a request that nobody answers."""
    monkeypatch.setattr(process, "LEAVE_WITHIN_S", 0.01)
    ended: SimpleQueue[int] = SimpleQueue()
    stop = threading.Event()
    with process.stop_on_signals(stop, partial(ended.put, Exit.DONE)):
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended.get(timeout=PATIENCE_S) == Exit.DONE
        assert stop.is_set()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "a second signal ends it at once"


def test_a_wait_for_an_answer_ends_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """Ctrl-C did nothing for the 5 s that a long poll may take, and said nothing either."""
    released = threading.Event()

    class Silent(Handler, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            assert released.wait(PATIENCE_S)

    caplog.set_level(logging.INFO)
    stop = threading.Event()
    with serving(Silent) as url, open_http(url) as http:
        try:
            with process.stop_on_signals(stop), pytest.raises(Stopped, match="while it waited"):
                Client(http, "r", "t", stop=stop).run_detail()
            assert not released.is_set()
            wait_until(lambda: "asked to stop: handing in" in caplog.text)
        finally:
            released.set()
