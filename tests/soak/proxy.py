"""A TCP proxy that does harm: it delays, cuts connections in the middle of a body, stalls, and flips bits.

After how many bytes of a connection comes from one seed; what it does then is what it has done least so far. Bits are
flipped inside long bodies only, which carry tensors and a digest: control messages have TLS for that, in any real run.
"""

import asyncio
import random
import threading
from collections import Counter
from typing import Self

from tests.support.waiting import PATIENCE_S

PIECE_BYTES = 1 << 14
ANYWHERE = ("cut", "stall")
FAULTS = (*ANYWHERE, "corrupt")


class Proxy:
    """Forwards connections to 127.0.0.1:`port` within a `with` block, whose end cancels them, on an event loop in a thread
    of its own. `harm` counts what was done, or went wrong."""

    def __init__(self, port: int, seed: int, *, mean_bytes: int, delay_s: float) -> None:
        self._port, self._seed = port, seed
        self._mean_bytes, self._delay_s = mean_bytes, delay_s
        self.harm: Counter[str] = Counter()
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._turn, name=type(self).__name__)
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _turn(self) -> None:
        with self._runner:  # as it ends, it cancels all tasks and awaits them
            self._loop.run_forever()
            for server in self._servers:
                server.close()

    def listen(self, address: str, worker: str) -> tuple[str, int]:
        """Take connections of `worker` at `address`; where."""
        rng = random.Random(f"{self._seed}/{worker}")

        # Given a coroutine, Python 3.11 makes the task itself, and complains when it is cancelled.
        def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = asyncio.create_task(self._connection(reader, writer, rng))
            self._connections.add(connection)
            connection.add_done_callback(self._connections.discard)

        started = asyncio.run_coroutine_threadsafe(asyncio.start_server(begin, host=address, port=0), self._loop)
        self._servers.append(started.result(PATIENCE_S))
        return address, int(self._servers[-1].sockets[0].getsockname()[1])

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
        """Until the end, or until a fault that ends the connection."""
        left = rng.expovariate(1 / self._mean_bytes)
        while piece := await reader.read(PIECE_BYTES):
            await asyncio.sleep(self._delay_s * rng.random())
            left -= len(piece)
            if left < 0:
                left = rng.expovariate(1 / self._mean_bytes)
                in_body = len(piece) >= PIECE_BYTES // 2 and b"\r\n\r\n" not in piece
                fault = min(FAULTS if in_body else ANYWHERE, key=lambda each: self.harm[each])
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

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
        try:
            await self._relay(reader, writer, rng)
        except OSError:
            self.harm["coordinator away"] += 1  # it was killed; the worker sees a connection that breaks
        finally:
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        ways = [
            asyncio.create_task(self._carry(reader, far_writer, rng)),
            asyncio.create_task(self._carry(far_reader, writer, rng)),
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
