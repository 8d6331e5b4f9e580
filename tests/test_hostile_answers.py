"""What clients make of answers that are bombs, endless, or larger than any of their kind: a refusal, in bounded memory.

Every server here is a real one, over a real socket. It may be anybody's: no token protects a client from it.
"""

import gzip
import json
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import httpx
import pytest
import torch

from outerstep import rest
from outerstep.common.answers import LIMITS, MESSAGE, limit_of, read_message
from outerstep.doctor.line import greet
from protocol import messages, wire
from protocol.errors import BeyondLimits, NoCoordinator, OuterstepError, UnexpectedAnswer
from protocol.fragments import Layout, Slice, TensorSpec
from protocol.spec.sections import OuterSpec
from tests.support.http_server import Handler, serving
from worker.codecs import unpack_payload
from worker.data.fetching.remote_files import HttpFiles
from worker.errors import DataError, Resync
from worker.link.client import Client, open_http
from worker.link.membership import Membership
from worker.state.outer_state import OuterState

MOST_MEMORY = 24 << 20
PIECE = b" " * (1 << 16)


BOMB = gzip.compress(bytes(64 << 20), 1)


@contextmanager
def hostile(status: int, kind: str) -> Iterator[str]:
    """Serve the same bad answer to every request; the URL."""

    class Hostile(Handler):
        def flood(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            if kind == "gzip":
                self.send_header("Content-Encoding", "gzip")
                self.send_header("Content-Length", str(len(BOMB)))
            if kind == "announced":
                self.send_header("Content-Length", str(1 << 50))
            self.end_headers()
            try:
                if kind == "gzip":
                    self.wfile.write(BOMB)
                while kind != "gzip":
                    self.wfile.write(PIECE)
            except OSError:  # the client has had enough
                pass

        do_GET = do_PUT = do_DELETE = flood  # noqa: N815

    with serving(Hostile) as url:
        yield url


@contextmanager
def bounded() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


def operator(ask: Callable[[rest.Client], object]) -> Callable[[str], None]:
    def asked(url: str) -> None:
        with rest.connect(url, "t", trust_env=False) as client:
            ask(client)

    return asked


def worker(ask: Callable[[Client], object]) -> Callable[[str], None]:
    def asked(url: str) -> None:
        with open_http(url) as http:
            ask(Client(http, "r", "t"))

    return asked


ASKING: dict[str, Callable[[str], None]] = {
    "operator's run": operator(lambda client: client.run("r")),
    "operator's list": operator(lambda client: list(client.workers("r"))),
    "operator's wait": operator(lambda client: client.wait_for_event("r", 0, patience_s=30)),
    "worker's run": worker(lambda client: client.run_detail()),
    "worker's spec": worker(lambda client: client.spec_text()),
    "worker's delta": worker(lambda client: client.delta(0, 0, 1 << 20)),
}
of_every_kind = pytest.mark.parametrize("kind", ["gzip", "announced", "endless"])


@pytest.mark.slow
@pytest.mark.covers("security:answer-bombs")
@of_every_kind
@pytest.mark.parametrize("who", ASKING)
def test_a_success_beyond_all_bounds_is_refused_in_bounded_memory(who: str, kind: str) -> None:
    with hostile(200, kind) as url, bounded(), pytest.raises(UnexpectedAnswer) as refused:
        ASKING[who](url)
    said = str(refused.value)
    assert "/v1/runs/r" in said
    if who != "worker's delta":
        assert isinstance(refused.value, BeyondLimits | NoCoordinator)
        assert ("gzip" in said) if kind == "gzip" else ("bytes are expected" in said)


@pytest.mark.slow
@pytest.mark.covers("security:answer-bombs")
@of_every_kind
@pytest.mark.parametrize("who", ["operator's run", "worker's delta"])
def test_a_refusal_beyond_all_bounds_is_read_as_far_as_it_is_shown(who: str, kind: str) -> None:
    with hostile(401, kind) as url, bounded(), pytest.raises(UnexpectedAnswer, match="answered 401"):
        ASKING[who](url)


@pytest.mark.slow
@of_every_kind
def test_the_doctor_finds_no_coordinator_there(kind: str) -> None:
    with hostile(200, kind) as url, open_http(url) as http, bounded(), pytest.raises(NoCoordinator):
        greet(rest.Client(http))


@pytest.mark.slow
@pytest.mark.covers("security:hostile-data-server")
@of_every_kind
def test_a_token_set_s_server_is_held_to_what_an_index_can_be(kind: str) -> None:
    with hostile(200, kind) as url:
        files = HttpFiles(url)
        with bounded(), pytest.raises(DataError, match=f"{url}/index.json"):
            files.whole("index.json", 1 << 20)
        if kind == "gzip":
            with bounded(), pytest.raises(DataError, match="gzip"):
                next(files.read("training-00000.bin", 0, 100))
        else:
            with bounded():  # whatever follows, a shard is as long as its index says
                assert sum(map(len, files.read("training-00000.bin", 70_000, 170_000))) == 100_000


def test_a_listing_that_does_not_end_is_refused() -> None:
    for items in ([], [{"id": 1, "at": 0.0, "kind": "k", "message": "m", "data": {}}]):
        body = json.dumps({"items": items, "next": "7"}).encode()
        transport = httpx.MockTransport(lambda _, body=body: httpx.Response(200, content=body))
        client = rest.Client(httpx.Client(base_url="http://c", transport=transport))
        with pytest.raises(UnexpectedAnswer, match="endless list"):
            list(client.events("r"))


def test_a_million_faults_are_not_told_one_by_one() -> None:
    """pydantic takes a kilobyte for each."""
    ones = b",".join([b"1"] * 400_000)
    page = partial(httpx.Response, 200, request=httpx.Request("GET", "http://c/v1/x"))
    with bounded(), pytest.raises(UnexpectedAnswer, match="the message Page"):
        read_message(messages.Page[messages.Event], page(content=b'{"items": [' + ones + b"]}"))
    with bounded(), pytest.raises(BeyondLimits, match=str(MESSAGE.most_values)):
        read_message(messages.RunDetail, page(content=b'{"name": [' + ones + b"]}"))


def test_the_largest_answers_are_within_their_limits() -> None:
    assert limit_of(messages.Page[messages.Event]) == LIMITS[messages.Page]
    verdict = messages.Verdict(factor=0.123456789, reason="its norm is 2.1 times the usual", ratio=2.1, cosine=0.5)
    fragment = messages.FragmentInfo(
        fragment=0,
        state=messages.FragmentState.PUBLISHED,
        reason="published",
        contributors=[f"worker-{index:04}" for index in range(1000)],
        verdicts={f"worker-{index:04}": verdict for index in range(1000)},
        closes_in_s=None,
        delta_bytes=1 << 20,
        delta_digest="0" * 64,
    )
    text = fragment.model_dump_json().encode()
    limit = limit_of(messages.RoundDetail)
    assert 100 * len(text) < limit.most_bytes
    assert 100 * sum(map(text.count, (b",", b"[", b"{"))) < limit.most_values


def test_a_worker_that_works_outlasts_an_answer_that_is_too_large() -> None:
    """A hotel's login page in between is an outage: what it answers says nothing of the coordinator."""
    lease = {"directive": "continue", "reason": "", "lease_s": 60}
    answers = [lease, {**lease, "reason": "x" * (2 << 20)}, lease]
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=answers.pop(0)))
    slept: list[float] = []
    with httpx.Client(transport=transport, base_url="http://c") as http:
        client = Client(http, "r", "t", sleep=slept.append)
        for _ in range(2):
            assert client.renew_lease("m", "w", messages.Metrics()).lease_s == 60
    assert len(slept) == 1


@pytest.mark.covers("security:answer-bombs")
def test_a_payload_of_another_size_is_refused_unread() -> None:
    """A few kilobytes of zstd would be eight gigabytes of zeros."""
    header = wire.StateHeader(
        run="r",
        round=0,
        fragment=0,
        codec="fp32",
        elements=wire.MAX_ELEMENTS,
        chunk_elements=wire.MAX_CHUNK_ELEMENTS,
        frame_bytes=[9] * (wire.MAX_ELEMENTS // wire.MAX_CHUNK_ELEMENTS),
    )
    head = wire.pack_header(header)

    def read_at(offset: int, length: int) -> bytes:
        assert offset < len(head), "a frame was read"
        return head[offset : offset + length]

    payload = wire.Payload(read_at, len(head) + sum(header.frame_bytes))
    layout = Layout(tensors=[TensorSpec(name="a", shape=[4])], fragments=[[Slice(tensor=0, start=0, stop=4)]])
    with pytest.raises(Resync, match="the layout says 8"):
        OuterState(layout, OuterSpec(), pin_memory=False).load(0, payload)
    with pytest.raises(UnexpectedAnswer, match="2147483648 elements .* 8"):
        unpack_payload(payload, torch.device("cpu"), 8)


def test_the_layout_of_another_model_is_refused() -> None:
    """A worker takes memory for the layout that it is given when it joins."""
    ours, theirs = ([TensorSpec(name="a", shape=[n])] for n in (4, 1 << 40))
    layout = Layout(tensors=theirs, fragments=[[Slice(tensor=0, start=0, stop=1 << 40)]])
    reply = messages.JoinReply(worker="w", member_token="m", epoch=1, lease_s=60, layout=layout)
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=reply.model_dump_json()))
    with httpx.Client(transport=transport, base_url="http://c") as http:
        membership = Membership(Client(http, "r", "t"), "w", messages.JoinRequest(tensors=ours), None)
        with pytest.raises(UnexpectedAnswer, match="does not match this worker's model"):
            membership.join()


@pytest.mark.covers("security:answer-bombs")
def test_a_layout_names_only_what_its_tensors_have() -> None:
    """Memory is taken for a layout before anything is fetched."""
    good = Layout(tensors=[TensorSpec(name="a", shape=[4])], fragments=[])
    for part in (
        {"tensor": 0, "start": 0, "stop": 5},
        {"tensor": 0, "start": 3, "stop": 3},
        {"tensor": -1, "start": 0, "stop": 4},
        {"tensor": 1, "start": 0, "stop": 4},
    ):
        with pytest.raises(ValueError, match="outside the tensors"):
            Layout.model_validate({**good.model_dump(), "fragments": [[part]]})


def test_a_part_that_goes_on_for_ever_is_given_up() -> None:
    """Over ranges, as on a far line: the length announced is right, and chunks follow without end."""
    sent, stop = 0, threading.Event()

    def forever() -> Iterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            yield PIECE

    def handle(request: httpx.Request) -> httpx.Response:
        first, last = (
            int(each or (4 << 20) - 1) for each in request.headers["Range"].removeprefix("bytes=").split("-")
        )
        headers = {"ETag": '"1"', "Content-Range": f"bytes {first}-{last}/{4 << 20}"}
        return httpx.Response(206, headers=headers | {"Content-Length": str(last + 1 - first)}, content=forever())

    with httpx.Client(transport=httpx.MockTransport(handle), base_url="http://c") as http:
        client = Client(http, "r", "t", stop=stop, sleep=lambda _: stop.set())
        part = messages.CheckpointFragment(
            fragment=0, elements=1, bytes=4 << 20, digest="0" * 64, state_digest="0" * 64
        )
        for _ in range(8):
            client.line.answered(0.1)
        with pytest.raises(OuterstepError):
            client.checkpoint_fragment(0, part, 8 << 20)
    assert sent < 200
