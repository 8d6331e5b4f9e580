"""A TCP relay between workers and a server on this machine, on a thread of its own. What it does to the bytes on their
way is a subclass's: see `_carry`."""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self


class Relay:
    """Forwards connections to 127.0.0.1:`port`. `harm` counts what went wrong, or was made to."""

    def __init__(self, port: int, seed: int = 0) -> None:
        self._port, self._seed = port, seed
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay")
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

    def listen(self, address: str, worker: str) -> tuple[str, int]:
        """Take connections of `worker` at `address`; where."""
        rng = random.Random(f"{self._seed}/{worker}")

        async def serve() -> int:
            server = await asyncio.start_server(lambda r, w: self._begin(r, w, rng), address, 0)
            self._servers.append(server)
            return int(server.sockets[0].getsockname()[1])

        return address, self._run(serve())

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
        """Take the bytes of one way of one connection from `reader` to `writer`; return where the connection ends."""
        raise NotImplementedError

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _stop(self) -> None:
        for server in self._servers:
            server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
        task = asyncio.create_task(self._connection(reader, writer, rng))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
