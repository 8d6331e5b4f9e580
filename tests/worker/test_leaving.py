"""Leaving in the middle of things: what was done is handed in, in bounded time, and nothing is trained on twice. And the
end of a run: told by the heartbeat, its workers train no further, and have its last state."""

import logging
import os
import signal
import threading
from functools import partial
from queue import SimpleQueue

import httpx
import pytest

from outerstep.common.exit_codes import Exit
from tests.support.http_server import Handler, serving
from tests.support.states import zeros_of_state_0
from tests.support.waiting import PATIENCE_S, wait_until
from tests.worker import toy
from tests.worker.toy import MakeToy
from worker import process
from worker.diloco import DiLoCo
from worker.errors import Stopped
from worker.line.line import PIECE_BYTES
from worker.link.client import Client, open_http
from worker.link.membership import Heartbeat
from worker.process import GracePeriod

pytestmark = pytest.mark.slow


class StopsWhileUploading(Client):
    """Is asked to stop in the middle of its first upload for round 1."""

    def contribute(self, member_token, header, frames, **options):
        if header.round == 1:
            self.stop.set()
        super().contribute(member_token, header, frames, **options)


def test_uploads_under_way_are_finished_and_no_delta_is_waited_for(toy_run: MakeToy) -> None:
    """The delta needs the other worker, which does not contribute before this one has left."""
    gone = threading.Event()

    def hold(diloco: DiLoCo) -> None:
        if (diloco.round, diloco.inner_step) == (1, 1):
            assert gone.wait(PATIENCE_S)

    def run_a() -> None:
        run.worker("a", client_class=StopsWhileUploading)
        gone.set()

    run = toy_run(toy.spec(rounds=2, min_workers=2))
    a = threading.Thread(target=run_a)
    a.start()
    run.worker("b", on_step=hold)
    a.join()
    assert run.told("a").state == "left"
    assert [each.contributors for each in run.round(1).fragments] == [["a", "b"]] * 3
    assert run.told("b").state_digest == run.final().state_digest


def test_what_an_exception_leaves_behind_is_not_handed_in(toy_run: MakeToy) -> None:
    class Broken(Exception):
        pass

    def fail(diloco: DiLoCo) -> None:
        raise Broken

    run = toy_run()
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
                if len(piece) == PIECE_BYTES[0]:
                    client.stop.set()
            return httpx.Response(201)

    client = Client(httpx.Client(transport=Transport(), base_url="http://c"), "toy", "t")
    with pytest.raises(Stopped, match="in the middle of a transfer"):
        client.seed("m", *zeros_of_state_0(2 << 20))
    assert sent[1:] == [PIECE_BYTES[0]], "after the header"


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

    class Silent(Handler):
        def do_GET(self) -> None:  # noqa: N802
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


# --- the end of a run ----------------------------------------------------------------------------------------------


def test_a_stopped_run_ends_its_workers(toy_run: MakeToy) -> None:
    """The heartbeat brings the news in the middle of a round."""

    def stop(diloco: DiLoCo) -> None:
        if (diloco.round, diloco.inner_step) == (1, 1):
            run.stop()
            diloco.joined.heartbeat.beat()

    run = toy_run()
    diloco = run.worker("a", on_step=stop)
    assert diloco.finished
    assert diloco.inner_step == 0


def test_a_stopped_run_ends_a_worker_that_waits_for_a_delta(toy_run: MakeToy) -> None:
    """It was told `run-ended` by the delta that it asked for, and died of it where no heartbeat had come before."""
    contributed, stopped = threading.Event(), threading.Event()

    class Contributes(Client):
        def delta(self, round_number, p, limit_bytes, member_token=None, *, early=bool, **options):
            wait_until(lambda: not early())  # it has contributed
            contributed.set()
            return super().delta(round_number, p, limit_bytes, member_token, early=early, **options)

    def stop(diloco: DiLoCo) -> None:
        assert contributed.wait(PATIENCE_S)
        if not stopped.is_set():
            run.stop()
            stopped.set()

    run = toy_run(toy.spec(min_workers=2))
    done = run.workers(["a", "b"], a={"client_class": Contributes}, b={"on_step": stop})
    assert all(diloco.finished for diloco in done.values())
    assert run.told("a").state == "left"


@pytest.mark.usefixtures("one_h")
@pytest.mark.parametrize("sync", ["", 'wait = "never"'])
def test_a_worker_that_the_run_finished_without_trains_no_further_and_takes_its_last_state(
    toy_run: MakeToy, sync: str
) -> None:
    """The lease said `continue`, so it went on with a round whose work nobody took any more, for as long as that takes
    it."""
    steps: list[int] = []
    begun = threading.Event()

    def wait(diloco: DiLoCo) -> None:
        assert diloco.round == 0 or begun.wait(PATIENCE_S)

    def slow(diloco: DiLoCo) -> None:
        if diloco.round == 1:
            steps.append(diloco.inner_step)
            begun.set()
            wait_until(lambda: run.info().state == "finished")
            diloco.joined.heartbeat.beat()

    members = "grace_factor = 0\ngrace_min_s = 0"
    run = toy_run(toy.spec(rounds=2, min_workers=2, members=members, sync=sync))
    done = run.workers(["a", "b", "c"], a={"on_step": wait}, b={"on_step": wait}, c={"on_step": slow})
    assert steps == [0], "it was told before the first inner step of the round, and looked after that"
    assert done["c"].finished
    digests = {run.told(name).state_digest for name in ("a", "b", "c")}
    assert digests == {run.final().state_digest}


def test_a_worker_that_is_told_of_the_end_takes_its_last_outer_step(toy_run: MakeToy) -> None:
    """The news comes before the deltas of the last round have."""

    class Told(Client):
        def delta(self, round_number, p, limit_bytes, member_token=None, *, early=bool, **options):
            wait_until(lambda: not early())  # it has contributed
            if round_number == 1:
                wait_until(lambda: run.info().state == "finished")
                heartbeats[0].beat()
                assert heartbeats[0].run_ended.is_set()
            return super().delta(round_number, p, limit_bytes, member_token, early=early, **options)

    heartbeats: list[Heartbeat] = []

    def note(diloco: DiLoCo) -> None:
        heartbeats.append(diloco.joined.heartbeat)

    run = toy_run(toy.spec(rounds=2))
    diloco = run.worker("a", client_class=Told, on_step=note)
    assert diloco.joined.state.round == 2
    assert run.told("a").state_digest == run.final().state_digest
    assert "diverged" not in [event["kind"] for event in run.events()]
