"""The attacks, each as an endless coroutine that ignores the responses. They come from ADDRESSES, local addresses that
nothing else uses.

`python -m benchmarks.siege.attacks` performs one attack and prints the result as a line of JSON. It runs at low
priority, so that the attackers' own work does not slow down the coordinator and the workers on the same machine.
"""

import argparse
import asyncio
import itertools
import json
import os
import resource
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field

ADDRESSES = [f"127.0.0.{number}" for number in range(2, 18)]
MIB = 1 << 20
HEADERS = b"".join(b"X-%d: %s\r\n" % (number, b"a" * 1000) for number in range(1000))  # about 1 MB
FAR_ROUND = 500_000  # never reached by the run
PAUSE_S = 0.01  # before a rejected connection is opened again


@dataclass
class Target:
    """The attacked coordinator, and the results: responses by status, bytes that it accepted."""

    port: int
    run: str
    worker_token: str
    viewer_token: str
    exchanged_tokens: "itertools.cycle[str]"  # worker tokens, all exchanged for one join token
    answered: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0
    addresses: "itertools.cycle[str]" = field(default_factory=lambda: itertools.cycle(ADDRESSES))

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, local_addr=(next(self.addresses), 0))

    async def send(self, writer: asyncio.StreamWriter, content: bytes) -> None:
        writer.write(content)
        await writer.drain()
        self.sent_bytes += len(content)

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Read one response with a length, and count it."""
        head = await reader.readuntil(b"\r\n\r\n")
        self.answered[head.split()[1].decode()] += 1
        lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if lengths:
            await reader.readexactly(int(lengths[0]))


async def repeat(target: Target, attack: Callable[[Target], Coroutine[None, None, None]]) -> None:
    """Repeat the attack, with a new connection each time."""
    while True:
        try:
            await attack(target)
        except (OSError, asyncio.IncompleteReadError):
            target.answered["cut"] += 1
        await asyncio.sleep(PAUSE_S)


def request(method: str, path: str, token: str, *lines: str) -> bytes:
    head = [f"{method} {path} HTTP/1.1", "Host: coordinator", f"Authorization: Bearer {token}", *lines]
    return "\r\n".join([*head, "", ""]).encode()


async def headers(target: Target) -> None:
    """40 MB of headers, without a token."""
    reader, writer = await target.open()
    try:
        await target.send(writer, b"GET /healthz HTTP/1.1\r\n")
        for _ in range(40):
            await target.send(writer, HEADERS)
        await target.send(writer, b"\r\n")
        await target.read(reader)
    finally:
        writer.close()


def join_of(target: Target, size: int) -> bytes:
    """Return the head of a join with a body of `size` bytes."""
    path = f"/v1/runs/{target.run}/workers/hostile"
    return request("PUT", path, target.worker_token, "Content-Type: application/json", f"Content-Length: {size}")


async def join(target: Target) -> None:
    """A join of a million small objects, 8 MB, with a worker token."""
    content = b'{"tensors":[' + b"{},   " * 1_300_000 + b"{}]}"
    reader, writer = await target.open()
    try:
        await target.send(writer, join_of(target, len(content)) + content)
        await target.read(reader)
    finally:
        writer.close()


async def half_a_join(target: Target) -> None:
    """A join of 16 MB; only half of it is sent."""
    reader, writer = await target.open()
    try:
        await target.send(writer, join_of(target, 16 * MIB))
        for _ in range(8):
            await target.send(writer, b" " * MIB)
        await target.read(reader)
    finally:
        writer.close()


async def reader(target: Target) -> None:
    """The longest listing, as fast as responses arrive, with a viewer token."""
    answers, writer = await target.open()
    asked = request("GET", f"/v1/runs/{target.run}/rounds?limit=1000", target.viewer_token)
    try:
        while True:
            await target.send(writer, asked)
            await target.read(answers)
    finally:
        writer.close()


async def stream(target: Target) -> None:
    """A stream of events, with a viewer token."""
    await _stream(target, target.viewer_token)


async def exchanged_stream(target: Target) -> None:
    """A stream of events, with one of many tokens that were exchanged for one join token."""
    await _stream(target, next(target.exchanged_tokens))


async def poll(target: Target) -> None:
    """Long polls for a delta that is never published, with a viewer token."""
    await _ask(
        target, f"/v1/runs/{target.run}/rounds/{FAR_ROUND}/fragments/0/delta", target.viewer_token, "Prefer: wait=60"
    )


async def scrape(target: Target) -> None:
    """The metrics, as fast as responses arrive, with a viewer token."""
    await _ask(target, "/metrics", target.viewer_token)


async def line_check(target: Target) -> None:
    """Line checks down, as fast as responses arrive, with one of many exchanged tokens."""
    await _ask(target, f"/v1/line-check?bytes={8 * MIB}", next(target.exchanged_tokens))


async def _ask(target: Target, path: str, token: str, *lines: str) -> None:
    answers, writer = await target.open()
    try:
        while True:
            await target.send(writer, request("GET", path, token, *lines))
            await target.read(answers)
    finally:
        writer.close()


async def _stream(target: Target, token: str) -> None:
    answers, writer = await target.open()
    path = f"/v1/runs/{target.run}/events"
    try:
        await target.send(writer, request("GET", path, token, "Accept: text/event-stream"))
        head = await answers.readuntil(b"\r\n\r\n")
        target.answered[head.split()[1].decode()] += 1
        while await answers.read(1 << 16):
            pass
    finally:
        writer.close()


async def idle(target: Target) -> None:
    """A connection on which nothing is sent."""
    answers, writer = await target.open()
    try:
        head = await answers.read(100)
        target.answered[head.split()[1].decode() if head else "closed"] += 1
    finally:
        writer.close()


@dataclass(frozen=True)
class Row:
    """An attack and how many of it run at once; `quick`: with --quick."""

    attack: Callable[[Target], Coroutine[None, None, None]]
    at_once: int
    quick: int


ROWS = {
    "40 MB of headers": Row(headers, 1, 1),
    "240 MB of headers": Row(headers, 6, 2),
    "join of a million objects": Row(join, 1, 1),
    "100 half-sent joins": Row(half_a_join, 100, 5),
    "4 readers of 1,000 rounds": Row(reader, 4, 2),
    "500 streams of events": Row(stream, 500, 30),
    "480 streams of 40 exchanged tokens": Row(exchanged_stream, 480, 30),
    "500 long polls of one viewer": Row(poll, 500, 50),
    "20 scrapers of metrics": Row(scrape, 20, 4),
    "20 line checks": Row(line_check, 20, 4),
    "1,100 idle connections": Row(idle, 1100, 400),
}


async def attack_for(target: Target, row: Row, at_once: int, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*(repeat(target, row.attack) for _ in range(at_once)))


def result(target: Target) -> str:
    return json.dumps({"answered": dict(target.answered), "sent_bytes": target.sent_bytes})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("at_once", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("port", type=int)
    for name in ("run", "worker_token", "viewer_token"):
        parser.add_argument(name)
    parser.add_argument("exchanged_tokens", nargs="+")
    given = parser.parse_args()
    os.nice(19)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    target = Target(
        given.port, given.run, given.worker_token, given.viewer_token, itertools.cycle(given.exchanged_tokens)
    )
    asyncio.run(attack_for(target, ROWS[given.row], given.at_once, given.seconds))
    print(result(target), flush=True)


if __name__ == "__main__":
    main()
