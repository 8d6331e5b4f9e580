"""A TCP proxy that does harm: it delays, cuts connections in the middle of a body, stalls, and flips bits.

What it does to which connection, and after how many bytes, comes from one seed. Bits are flipped inside long bodies
only, which carry tensors and a digest: control messages have TLS for that, in any real run.
"""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

PIECE_BYTES = 1 << 14
FAULTS = ("cut", "stall", "corrupt")


class Proxy:
    """Forwards connections to 127.0.0.1:`port`, on a thread of its own. `harm` counts what was done."""

    def __init__(self, port: int, seed: int, *, mean_bytes: int, delay_s: float) -> None:
        self._port, self._seed = port, seed
        self._mean_bytes, self._delay_s = mean_bytes, delay_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.harm: Counter[str] = Counter()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def listen(self, address: str, worker: str) -> str:
        """Take connections of `worker` at `address`; the URL."""
        rng = random.Random(f"{self._seed}/{worker}")

        async def serve() -> int:
            server = await asyncio.start_server(lambda r, w: self._connection(r, w, rng), address, 0)
            self._servers.append(server)
            return int(server.sockets[0].getsockname()[1])

        return f"http://{address}:{self._run(serve())}"

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _stop(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._relay(reader, writer, rng)
        except OSError:
            self.harm["coordinator away"] += 1  # it was killed; the worker sees a connection that breaks
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        ways = [
            asyncio.create_task(self._one_way(reader, far_writer, rng)),
            asyncio.create_task(self._one_way(far_reader, writer, rng)),
        ]
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in done:
                way.result()
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            far_writer.transport.abort()

    async def _one_way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
        """Until the end, or until a fault that ends the connection."""
        left = rng.expovariate(1 / self._mean_bytes)
        while piece := await reader.read(PIECE_BYTES):
            await asyncio.sleep(self._delay_s * rng.random())
            left -= len(piece)
            if left < 0:
                left = rng.expovariate(1 / self._mean_bytes)
                fault = rng.choice(FAULTS)
                if fault == "corrupt" and (len(piece) < PIECE_BYTES // 2 or b"\r\n\r\n" in piece):
                    fault = "stall"  # no long body here
                self.harm[fault] += 1
                if fault == "cut":
                    writer.write(piece[: len(piece) // 2])
                    return
                if fault == "stall":
                    await asyncio.sleep(rng.uniform(0.5, 4))
                else:
                    piece = bytes([piece[0] ^ 1 << rng.randrange(8)]) + piece[1:]
            writer.write(piece)
            await writer.drain()
