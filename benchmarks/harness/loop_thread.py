"""An event loop on a thread of its own, with the servers that run on it."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self


class LoopThread:
    """An event loop that runs within a `with` block. Its end closes the servers and cancels their connections."""

    def __init__(self) -> None:
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

    def _listen(
        self, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]], **where: Any
    ) -> int:
        """Serve connections, each in a task of its own; `where` is as for `asyncio.start_server`. Return the port."""

        # Given a coroutine, Python 3.11 makes the task itself, and complains when it is cancelled.
        def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = asyncio.create_task(serve(reader, writer))
            self._connections.add(connection)
            connection.add_done_callback(self._connections.discard)

        started = asyncio.run_coroutine_threadsafe(asyncio.start_server(begin, **where), self._loop)
        self._servers.append(started.result(30))
        return int(self._servers[-1].sockets[0].getsockname()[1])
