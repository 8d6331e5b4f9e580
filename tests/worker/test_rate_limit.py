"""Transfers keep to their rate limits, which leave the rest to the box's other traffic."""

from collections.abc import Iterator

import httpx
import pytest
from blake3 import blake3

from protocol import wire
from tests.support.states import zeros_of_state_0
from worker.line.line import AHEAD_S, RateLimit
from worker.link.client import Client
from worker.settings import WorkerSettings

HEADER, FRAMES = zeros_of_state_0(1 << 20)
BLOB = b"".join([wire.pack_header(HEADER), *FRAMES])  # 4 MiB
LIMIT_BYTES = len(BLOB) + wire.MAX_HEADER_BYTES
PIECE_BYTES = 1 << 15


class Time:
    """Advances whenever something waits for the stop signal, which it also is, and which is never set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def is_set(self) -> bool:
        return False

    def wait(self, timeout: float) -> bool:
        self.now += timeout
        return False


class Pieces(httpx.SyncByteStream):
    def __iter__(self) -> Iterator[bytes]:
        for at in range(0, len(BLOB), PIECE_BYTES):
            yield BLOB[at : at + PIECE_BYTES]


def client_at(time: Time, max_up: float | None = None, max_down: float | None = None) -> Client:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.method == "PUT":
            request.read()
            return httpx.Response(201, json={})
        headers = {"ETag": f'"{blake3(BLOB).hexdigest()}"', "Content-Length": str(len(BLOB))}
        return httpx.Response(200, headers=headers, stream=Pieces())

    http = httpx.Client(transport=httpx.MockTransport(handle), base_url="http://c")
    return Client(http, "r", "t", clock=time, max_up=max_up, max_down=max_down).until(time)


def test_transfers_take_as_long_as_the_rate_says() -> None:
    up, down = Time(), Time()
    client_at(up, max_up=8e6).seed("m", HEADER, FRAMES)
    client_at(down, max_down=16e6).delta(0, 0, LIMIT_BYTES)
    assert up.now == pytest.approx(len(BLOB) / 1e6, abs=AHEAD_S + PIECE_BYTES / 1e6)
    assert down.now == pytest.approx(len(BLOB) / 2e6, abs=AHEAD_S + PIECE_BYTES / 2e6)


def test_without_a_rate_nobody_waits() -> None:
    time = Time()
    client = client_at(time)
    client.seed("m", HEADER, FRAMES)
    client.delta(0, 0, LIMIT_BYTES)
    assert time.now == 0


def test_what_was_not_used_is_not_made_up_for() -> None:
    time = Time()
    pace = RateLimit(8e6, time)
    assert pace.delay_s(1_000_000) == 0
    assert pace.delay_s(1_000_000) == pytest.approx(1.0)
    time.now = 100.0
    assert pace.delay_s(1_000_000) == 0
    assert pace.delay_s(1_000_000) == pytest.approx(1.0 - AHEAD_S)


@pytest.mark.parametrize(("given", "rate"), [("8mbit", 8e6), ("2.5Gbit/s", 2.5e9), (9600.0, 9600.0)])
def test_rates_as_they_are_given(given: str | float, rate: float) -> None:
    assert WorkerSettings.model_validate({"url": "http://c", "run": "r", "token": "t", "max_up": given}).max_up == rate


@pytest.mark.parametrize("given", ["8", "fast", "0mbit", "-1mbit", 0.0, float("inf")])
def test_rates_that_are_none(given: str | float) -> None:
    with pytest.raises(ValueError, match="max_down"):
        WorkerSettings.model_validate({"url": "http://c", "run": "r", "token": "t", "max_down": given})
