"""A TCP relay between workers and a server on this machine, on a thread of its own. What it does to the bytes on their
way is a subclass's: see `_carry`."""

import asyncio
import random
from collections import Counter
from functools import partial

from benchmarks.harness.loop_thread import LoopThread


class Relay(LoopThread):
    """Forwards connections to 127.0.0.1:`port`. `harm` counts what went wrong, or was made to."""

    def __init__(self, port: int, seed: int = 0) -> None:
        super().__init__()
        self._port, self._seed = port, seed
        self.harm: Counter[str] = Counter()

    def listen(self, address: str, worker: str) -> tuple[str, int]:
        """Take connections of `worker` at `address`; where."""
        rng = random.Random(f"{self._seed}/{worker}")
        serve = partial(self._connection, rng=rng)
        return address, self._listen(serve, host=address, port=0)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
        """Take the bytes of one way of one connection from `reader` to `writer`; return where the connection ends."""
        raise NotImplementedError

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
