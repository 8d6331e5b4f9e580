"""The client: what it retries and for how long, how it resumes, what it verifies. Against scripted answers."""

import logging
import random
import re
import ssl
import threading
from collections.abc import Callable, Iterator

import httpx
import msgpack
import pytest
from blake3 import blake3

from protocol import messages, wire
from protocol.digest import parse_content_digest
from protocol.errors import PROBLEMS, NoCoordinator, NotUnderstood, Problem, Remedy, UnexpectedAnswer
from protocol.fragments import Layout
from protocol.versions import OURS, RESPONSE_HEADERS
from tests.support.states import zeros_of_state_0
from tests.support.waiting import PATIENCE_S
from worker.errors import Stopped
from worker.line import transfer
from worker.line.line import DOWN_FAR_BYTES, UP_FAR_BYTES
from worker.line.retry import BACKOFF_CAP_S
from worker.link.client import Client
from worker.link.membership import Heartbeat, Membership

Answer = Callable[[httpx.Request], httpx.Response]
LIMIT = 1 << 20


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def problem(slug: str, detail: str = "why", **headers: str) -> httpx.Response:
    document = Problem(slug, detail)
    return httpx.Response(document.status, json=document.document(), headers=headers)


def make_client(answers: list[httpx.Response | Exception] | Answer) -> tuple[Client, Clock, list[httpx.Request]]:
    """A client whose requests meet `answers` in turn."""
    clock, seen = Clock(), []

    def handle(request: httpx.Request) -> httpx.Response:
        request.read()
        seen.append(request)
        if not isinstance(answers, list):
            return answers(request)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    http = httpx.Client(transport=httpx.MockTransport(handle), base_url="http://c")
    return Client(http, "r", "t", sleep=clock.sleep, rng=random.Random(1), clock=lambda: clock.now), clock, seen


LEASE = {"directive": "continue", "reason": "", "lease_s": 60}


def renew(client: Client) -> messages.LeaseReply:
    return client.renew_lease("m", "w", messages.Metrics())


def state_payload(elements: int = 3000) -> bytes:
    """A payload of raw fp32 zeros."""
    header, frames = zeros_of_state_0(elements)
    return wire.pack_header(header) + b"".join(frames)


# --- retries ------------------------------------------------------------------------------------------------------


def test_transient_faults_are_tried_again() -> None:
    client, clock, seen = make_client(
        [
            httpx.ConnectError("refused"),
            httpx.ReadTimeout("silence"),
            httpx.RemoteProtocolError("cut"),
            httpx.Response(502, text="<html>bad gateway"),
            httpx.Response(429, text="slow down"),
            *(problem(slug) for slug, row in PROBLEMS.items() if row.remedy is Remedy.RETRY),
            httpx.Response(200, text="{half a rep"),
            httpx.Response(200, json=LEASE),
        ]
    )
    assert renew(client).directive is messages.Directive.CONTINUE
    assert len(seen) == 15
    assert len(clock.slept) == 14
    assert seen[-1].headers["Authorization"] == "Bearer m"


def make_client_that_is_cut_off(seconds: float) -> tuple[Client, Clock, list[httpx.Request]]:
    """Nothing is answered for so long."""
    clock: Clock

    def handle(request: httpx.Request) -> httpx.Response:
        if clock.now < seconds:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json=LEASE)

    client, clock, seen = make_client(handle)
    return client, clock, seen


@pytest.mark.slow
def test_an_outage_of_any_length(caplog: pytest.LogCaptureFixture) -> None:
    """Three hours without a coordinator: waits stay below the cap, the log stays short, and the call succeeds in the end."""
    caplog.set_level(logging.INFO)
    client, clock, _ = make_client_that_is_cut_off(10_800)
    renew(client)
    assert max(clock.slept) <= BACKOFF_CAP_S
    assert len({round(wait, 6) for wait in clock.slept}) > len(clock.slept) / 2, "no jitter"
    lines = [record.getMessage() for record in caplog.records if record.name == "worker.line.retry"]
    assert lines[0].startswith("the coordinator at http://c cannot be reached: refused; retrying in ")
    assert lines[-1].startswith("the coordinator answers again after 108")
    assert len(lines) <= 10_800 / 60 + 2


def test_a_call_that_must_not_be_late_is_tried_again_in_time() -> None:
    """A lease of 6 s was lost after an outage, since the next heartbeat came up to 10 s after the coordinator was back."""
    client, clock, _ = make_client_that_is_cut_off(100)
    renew(client.until(threading.Event(), silence_s=2.0))
    assert max(clock.slept) <= 2.0


def distrusted() -> httpx.ConnectError:
    """What a request ends with where the certificate is not trusted."""
    cause = ssl.SSLCertVerificationError(1, "certificate verify failed (_ssl.c:1006)")
    cause.verify_code, cause.verify_message = 18, "self-signed certificate"
    error = httpx.ConnectError(str(cause))
    error.__cause__ = cause
    return error


def test_a_certificate_that_is_not_trusted_ends_a_worker_that_starts_and_none_that_works(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is tried again for ever, as any outage, once the coordinator has answered: a proxy that is set up anew, or a
    certificate that was renewed late, must not end those that train."""
    client, clock, _ = make_client([distrusted()])
    with pytest.raises(
        NoCoordinator, match="the certificate of http://c is not trusted: self-signed certificate; give"
    ):
        renew(client)
    assert clock.slept == []
    client, _, _ = make_client([httpx.Response(200, json=LEASE), distrusted(), httpx.Response(200, json=LEASE)])
    renew(client)
    renew(client)
    assert "cannot be reached: its certificate is not trusted: self-signed certificate; retrying" in caplog.text


def test_another_servers_page_ends_a_worker_that_starts_and_none_that_works() -> None:
    """Such as the page of a proxy whose coordinator is being restarted."""
    page = {"Content-Type": "text/html"}
    client, clock, _ = make_client([httpx.Response(200, text="<title>Hello</title>", headers=page)])
    with pytest.raises(NoCoordinator, match="a page called 'Hello'; check the URL"):
        renew(client)
    assert clock.slept == []
    answers = [httpx.Response(200, text="<title>Hello</title>", headers=page), httpx.Response(200, json=LEASE)]
    client, clock, _ = make_client([httpx.Response(200, json=LEASE), *answers])
    renew(client)
    renew(client)
    assert len(clock.slept) == 1


@pytest.mark.parametrize("slug", ["not-ready", "too-many-requests", "storage-full"])
def test_retry_after_is_honoured(slug: str) -> None:
    client, clock, _ = make_client([problem(slug, **{"Retry-After": "17"}), httpx.Response(200, json=LEASE)])
    renew(client)
    assert clock.slept == [17]


@pytest.mark.parametrize("slug", [slug for slug, row in PROBLEMS.items() if row.remedy is not Remedy.RETRY])
def test_refusals_are_raised_at_once(slug: str) -> None:
    client, clock, _ = make_client([problem(slug, "because")])
    with pytest.raises(Problem, match="because") as raised:
        renew(client)
    assert raised.value.slug == slug
    assert clock.slept == []


def test_stop_ends_the_waiting() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        client.stop.set()
        raise httpx.ConnectError("refused")

    http = httpx.Client(transport=httpx.MockTransport(refuse), base_url="http://c")
    client = Client(http, "r", "t")
    with pytest.raises(Stopped):
        renew(client)
    with pytest.raises(Stopped):
        renew(client)


def test_leaving_gives_up_soon_and_works_after_stop() -> None:
    client, _, seen = make_client([httpx.ConnectError("refused")] * 3)
    client.stop.set()
    with pytest.raises(httpx.ConnectError):
        client.leave("m", "w", messages.LeaveRequest())
    assert len(seen) == 3


def test_a_lost_answer_to_a_heartbeat_leaves_time_for_another_within_the_lease() -> None:
    """Found by the simulation: with the 60 s of silence that other requests have, one lost packet cost the lease."""
    beaten = threading.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        beaten.set()
        return httpx.Response(200, json=LEASE)

    client, _, seen = make_client(answer)
    membership = Membership(client, "w", messages.JoinRequest(tensors=[]), None)
    with Heartbeat(membership, 60.0, messages.Metrics) as heartbeat:
        heartbeat.beat_now()
        assert beaten.wait(PATIENCE_S)
    assert [request.extensions["timeout"]["read"] for request in seen] == [20.0]


@pytest.mark.covers("reliability:coordinator-outage")
def test_giving_up_the_lease_in_order_to_join_again_survives_an_outage() -> None:
    """Found by simulation seed 46: a worker that wanted to start over during an outage died of it."""
    client, clock, seen = make_client([*[httpx.ConnectError("refused")] * 20, httpx.Response(204)])
    client.give_up("m", "w")
    assert len(seen) == 21
    assert clock.now > 60


def test_a_worker_joins_again_as_often_as_its_lease_ends() -> None:
    """Found by simulation seed 56: three leases that ended during one call were taken for a coordinator at fault."""
    client, clock, _ = make_client(lambda request: problem("unauthorized"))
    granted: list[str] = []

    def join(worker: str, request: messages.JoinRequest) -> messages.JoinReply:
        assert request.member_token is not None
        granted.append(request.member_token)
        layout = Layout(tensors=[], fragments=[])
        return messages.JoinReply(worker=worker, member_token=granted[-1], epoch=len(granted), lease_s=1, layout=layout)

    client.join = join  # type: ignore[method-assign]
    membership = Membership(client, "w", messages.JoinRequest(tensors=[]), None)
    membership.join()

    def call(token: str) -> str:
        if len(granted) < 8:
            return client.renew_lease(token, "w", messages.Metrics()).reason
        return token

    assert membership.act(call) == granted[-1]
    assert sum(clock.slept) <= 30, "it pauses in between, and not for long"


# --- uploads ------------------------------------------------------------------------------------------------------

HEADER = wire.ContributionHeader(
    run="r",
    round=4,
    fragment=2,
    codec="fp32",
    elements=750_000,
    chunk_elements=wire.CHUNK_ELEMENTS,
    frame_bytes=[1 << 20, 1 << 20, 902_848],
    worker="w",
    base=bytes(32),
    tokens=1,
    inner_steps=1,
    loss=0.0,
    norm=0.0,
    units=[],
    carried=[],
    carried_share=1.0,
)


def test_an_upload_is_whole_and_announced_each_time() -> None:
    frames = [bytes([i]) * length for i, length in enumerate(HEADER.frame_bytes)]
    client, _, seen = make_client([httpx.WriteError("cut"), problem("digest-mismatch"), httpx.Response(201, json={})])
    client.contribute("m", HEADER, frames)
    body = b"".join([wire.pack_header(HEADER), *frames])
    assert len(seen) == 3
    for request in seen:
        assert request.method == "PUT"
        assert request.url.path == "/v1/runs/r/rounds/4/fragments/2/contributions/w"
        assert request.read() == body
        assert request.headers["Content-Length"] == str(len(body))
        assert "Transfer-Encoding" not in request.headers
        assert parse_content_digest(request.headers["Content-Digest"]) == blake3(body).digest()
        assert request.headers["Content-Type"] == wire.MEDIA_TYPE
    assert client.traffic.upload_bytes == 3 * len(body)


class Assembling:
    """Puts the parts of uploads together, as a coordinator does; `restart_at`: then it forgets what it has."""

    def __init__(self, restart_at: int = 0) -> None:
        self.restart_at = restart_at
        self.parts: dict[int, bytes] = {}
        self.requests = 0
        self._lock = threading.Lock()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body, place = request.read(), request.headers["Content-Range"]
        first, last, size = (int(digits) for digits in re.findall("[0-9]+", place))
        assert len(body) == last + 1 - first == int(request.headers["Content-Length"])
        assert parse_content_digest(request.headers["Content-Digest"]) == blake3(body).digest()
        with self._lock:
            self.requests += 1
            if self.requests == self.restart_at:
                self.parts.clear()
            self.parts[first] = body
            missing, at = [], 0
            for start, each in sorted(self.parts.items()):
                if at < start:
                    missing.append([at, start])
                at = start + len(each)
            if at < size:
                missing.append([at, size])
            if missing:
                return httpx.Response(202, json={"missing": missing})
            whole = b"".join(each for _, each in sorted(self.parts.items()))
            assert parse_content_digest(request.headers["Repr-Digest"]) == blake3(whole).digest()
            return httpx.Response(201, json={})


@pytest.mark.parametrize("restart_at", [0, 3, 11])
def test_an_upload_in_parts_of_which_those_are_sent_again_that_a_coordinator_has_lost(restart_at: int) -> None:
    frames = [random.Random(i).randbytes(length) for i, length in enumerate(HEADER.frame_bytes)]
    server = Assembling(restart_at)
    client, _, _ = far_client(server)
    client.contribute("m", HEADER, frames)
    body = b"".join([wire.pack_header(HEADER), *frames])
    assert b"".join(each for _, each in sorted(server.parts.items())) == body
    parts = -(-len(body) // UP_FAR_BYTES[1])
    if restart_at == 0:
        assert (server.requests, client.traffic.upload_bytes) == (parts, len(body))
    else:
        assert server.requests <= parts + 1 + 2 * restart_at


def test_a_part_that_is_refused_ends_the_upload() -> None:
    client, _, seen = far_client(lambda request: problem("round-closed"))
    with pytest.raises(Problem, match="why"):
        client.contribute("m", HEADER, [bytes(length) for length in HEADER.frame_bytes])
    assert 1 <= len(seen) <= 32


# --- downloads ----------------------------------------------------------------------------------------------------


class Broken(httpx.SyncByteStream):
    """A body that breaks off after `cut` bytes."""

    def __init__(self, data: bytes, cut: int) -> None:
        self._data, self._cut = data, cut

    def __iter__(self) -> Iterator[bytes]:
        yield self._data[: self._cut]
        if self._cut < len(self._data):
            raise httpx.ReadError("cut")


class BlobServer:
    """Serves one blob with ETag and Range, as RFC 9110 has it; answers break off after the lengths in `cuts`."""

    def __init__(self, data: bytes, cuts: list[int]) -> None:
        self.data, self.cuts = data, cuts
        self.ranges: list[str | None] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        etag = f'"{blake3(self.data).hexdigest()}"'
        self.ranges.append(request.headers.get("Range"))
        start = 0
        if "Range" in request.headers and request.headers.get("If-Range") == etag:
            start = int(request.headers["Range"].removeprefix("bytes=").split("-")[0])
        body = self.data[start:]
        cut = self.cuts.pop(0) if self.cuts else len(body)
        headers = {"ETag": etag, "Content-Length": str(len(body))}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(self.data) - 1}/{len(self.data)}"
        return httpx.Response(206 if start else 200, headers=headers, stream=Broken(body, cut))


def test_a_stalled_upload_is_sent_again() -> None:
    """`request-timeout` is not a 5xx, and so it ended the worker, though its words are to send it again."""
    client, _, seen = make_client([problem("request-timeout"), httpx.Response(201, json={})])
    client.contribute("m", HEADER, [bytes(length) for length in HEADER.frame_bytes])
    assert len(seen) == 2


def test_a_download_goes_on_where_it_broke_off() -> None:
    data = state_payload()
    server = BlobServer(data, [1000, 500])
    client, _, seen = make_client(server)
    payload = client.delta(0, 0, LIMIT)
    assert payload.total_bytes == len(data)
    assert server.ranges == [None, f"bytes=1000-{len(data) - 1}", f"bytes=1500-{len(data) - 1}"]
    assert client.traffic.download_bytes == len(data)
    assert seen[0].headers["Accept-Encoding"] == "identity"


def test_a_blob_that_changed_is_fetched_anew() -> None:
    server = BlobServer(state_payload(10), [30])
    clients: list[Client] = []

    def handle(request: httpx.Request) -> httpx.Response:
        if server.ranges:
            server.data = state_payload(20)
        return server(request)

    client, _, _ = make_client(handle)
    clients.append(client)
    assert client.delta(0, 0, LIMIT).header.elements == 20
    assert [each and each.split("-")[0] for each in server.ranges] == [None, "bytes=30"]


def test_damaged_bytes_are_fetched_anew() -> None:
    data = state_payload()
    etag = {"ETag": f'"{blake3(data).hexdigest()}"', "Content-Length": str(len(data))}
    damaged = bytearray(data)
    damaged[-1] ^= 1
    client, clock, _ = make_client(
        [
            httpx.Response(200, headers=etag, stream=Broken(bytes(damaged), len(data))),
            httpx.Response(200, headers=etag, stream=Broken(data, len(data))),
        ]
    )
    assert client.delta(0, 0, LIMIT).header.elements == 3000
    assert len(clock.slept) == 1


UNUSABLE: dict[str, tuple[httpx.Response, str]] = {
    "too large": (
        httpx.Response(200, headers={"ETag": '"x"', "Content-Length": str(1 << 50)}),
        "at most 1048576 are possible",
    ),
    # It was taken for a fault on the way, like a whole where a part was asked for.
    "a redirect": (httpx.Response(308, headers={"Location": "https://c/x"}), "redirects to https://c/x"),
    # `²` is a digit to Python, and no number: it ended as an unexpected fault.
    "a length that is no number": (
        httpx.Response(
            200, headers=[(b"ETag", b'"1"'), (b"Content-Length", "²".encode())], stream=httpx.ByteStream(b"x")
        ),
        "without ETag or Content-Length",
    ),
}


@pytest.mark.covers("security:bad-answers")
@pytest.mark.parametrize(("answer", "said"), UNUSABLE.values(), ids=UNUSABLE.keys())
def test_an_unusable_answer_is_refused_before_memory_is_taken_and_not_asked_for_again(
    answer: httpx.Response, said: str
) -> None:
    client, clock, _ = make_client([answer])
    with pytest.raises(UnexpectedAnswer, match=said):
        client.delta(0, 0, LIMIT)
    assert clock.slept == []


class PartServer:
    """Serves one blob and its parts; the first answer to each part breaks off in the middle, where `cuts` is set."""

    def __init__(self, data: bytes, *, cuts: bool = False, damages: int = 0, knows_ranges: bool = True) -> None:
        self.data, self.cuts, self.damages, self.knows_ranges = data, cuts, damages, knows_ranges
        self.ranges: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        digits = request.headers["Range"].removeprefix("bytes=").split("-")
        first, last = int(digits[0]), int(digits[1] or len(self.data) - 1)
        with self._lock:
            self.ranges.append((first, last + 1))
            damaged, self.damages = self.damages > 0, self.damages - 1
        headers = {"ETag": f'"{blake3(self.data).hexdigest()}"'}
        if self.knows_ranges:
            if first >= len(self.data):
                return problem("range-not-satisfiable", **{"Content-Range": f"bytes */{len(self.data)}"})
            last = min(last, len(self.data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(self.data)}"
        body = bytearray(self.data[first : last + 1] if self.knows_ranges else self.data)
        body[0] ^= damaged
        cut = len(body) // 2 if self.cuts and first % PART == 0 else len(body)
        headers["Content-Length"] = str(len(body))
        return httpx.Response(206 if self.knows_ranges else 200, headers=headers, stream=Broken(bytes(body), cut))


PART = DOWN_FAR_BYTES[0]
BIG = state_payload(40_000)  # 160 kB: two whole parts and a short one
SHARES = [(0, PART), (PART, 2 * PART), (2 * PART, len(BIG))]


def described(data: bytes) -> messages.CheckpointFragment:
    digest = blake3(data).hexdigest()
    return messages.CheckpointFragment(fragment=0, elements=1, bytes=len(data), digest=digest, state_digest=digest)


def far_client(server: Answer) -> tuple[Client, Clock, list[httpx.Request]]:
    """A client whose line rewards many connections."""
    client, clock, seen = make_client(server)
    for _ in range(8):
        client.line.answered(0.1)
    return client, clock, seen


def fetch(client: Client, data: bytes = BIG) -> wire.Payload:
    return client.checkpoint_fragment(7, described(data), 1 << 20)


def test_a_blob_comes_in_parts_that_resume_by_themselves() -> None:
    server = PartServer(BIG, cuts=True)
    client, _, seen = far_client(server)
    assert fetch(client).total_bytes == len(BIG)
    assert seen[0].url.path == "/v1/runs/r/checkpoints/7/fragments/0"
    resumed = [(start + (stop - start) // 2, stop) for start, stop in SHARES]
    assert sorted(server.ranges) == sorted(SHARES + resumed)
    assert client.traffic.download_bytes == len(BIG)


def test_a_damaged_part_is_found_by_the_digest_of_the_whole() -> None:
    server = PartServer(BIG, damages=1)
    client, clock, _ = far_client(server)
    fetch(client)
    assert len(clock.slept) == 1
    assert sorted(server.ranges) == sorted(2 * SHARES)


def test_parts_from_a_proxy_that_knows_no_ranges() -> None:
    client, _, _ = far_client(PartServer(BIG, knows_ranges=False))
    assert fetch(client).total_bytes == len(BIG)


def test_parts_of_a_delta_whose_size_is_not_known() -> None:
    """They are asked for by what it may be at most, before it is there."""
    server = PartServer(BIG)
    client, clock, seen = far_client(server)
    assert client.delta(0, 0, 4 * PART + wire.MAX_HEADER_BYTES).total_bytes == len(BIG)
    assert len(server.ranges) == 4
    assert {request.headers["Prefer"] for request in seen} == {"wait=1"}
    assert clock.slept == []


def test_parts_of_two_blobs_are_fetched_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a proxy keeps an old one."""
    # Both are wrong wherever BIG is zero; fresh memory would be right there by itself.
    monkeypatch.setattr(transfer, "memory", lambda size: memoryview(bytearray(b"\xff" * size)))
    server, other = PartServer(BIG), PartServer(b"\x11" * (len(BIG) + 4))
    turns = iter([other, *[server] * 10])
    lock = threading.Lock()

    def handle(request: httpx.Request) -> httpx.Response:
        with lock:
            return next(turns)(request)

    client, clock, _ = far_client(handle)
    assert client.delta(0, 0, len(BIG) + wire.MAX_HEADER_BYTES).header.elements == 40_000
    assert len(clock.slept) == 1


def test_a_part_that_asks_too_early_goes_on_where_another_has_begun() -> None:
    """The delta is published between the answers to the requests for two of its parts."""
    server, too_early = PartServer(BIG), [problem("not-published", **{"Retry-After": "1"})]

    def handle(request: httpx.Request) -> httpx.Response:
        return too_early.pop() if server.ranges and too_early else server(request)

    client, _, _ = far_client(handle)
    assert client.delta(0, 0, len(BIG) + wire.MAX_HEADER_BYTES).total_bytes == len(BIG)


def test_a_described_size_is_compared_with_the_limit() -> None:
    client, _, seen = make_client([])
    with pytest.raises(UnexpectedAnswer, match="at most 1048576 are possible"):
        client.checkpoint_fragment(7, described(state_payload(1 << 20)), LIMIT)
    assert seen == []


def test_valid_digest_of_an_invalid_payload() -> None:
    """Another download would bring the same bytes: the worker ended with the exit code for "retry"."""
    client, _, _ = make_client(BlobServer(b"OSTPgarbage that is no payload", []))
    with pytest.raises(NotUnderstood, match="^/v1/runs/r/rounds/0/fragments/0/delta: "):
        client.delta(0, 0, LIMIT)


def test_a_header_of_another_build_is_reported_by_its_field_and_both_versions() -> None:
    header = zeros_of_state_0(5)[0]
    fields = msgpack.packb(header.model_dump() | {"later": 1})
    server = BlobServer(wire.PREFIX.pack(wire.MAGIC, wire.VERSION, 0, len(fields)) + fields, [])

    def answer(request: httpx.Request) -> httpx.Response:
        response = server(request)
        response.headers.update(RESPONSE_HEADERS | {"Outerstep-Version": "0.1.7"})
        return response

    client, _, _ = make_client(answer)
    with pytest.raises(NotUnderstood, match=f"header field .*later: .*{OURS}.* Outerstep 0.1.7, protocol"):
        client.delta(0, 0, LIMIT)


def test_long_polls_ask_to_wait() -> None:
    client, _, seen = make_client([problem("not-published", "waiting for 1 of 2 workers")])
    with pytest.raises(Problem, match="waiting for 1 of 2"):
        client.delta(3, 1, LIMIT)
    assert seen[0].headers["Prefer"] == "wait=1"
    assert seen[0].url.path == "/v1/runs/r/rounds/3/fragments/1/delta"
