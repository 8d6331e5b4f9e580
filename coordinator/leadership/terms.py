"""What a process does when it begins and ceases to lead: it builds a coordinator, serves it, and drops it again."""

import asyncio
import logging
import math
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool

from coordinator.leadership.election import Election
from coordinator.service import Coordinator
from coordinator.store.database import Fence, at_start
from coordinator.store.lease import Leader
from protocol.errors import OuterstepError

SETTLE_S = 0.02

logger = logging.getLogger(__name__)


class Terms:
    """Builds a coordinator for each term of the election, and closes it when the term is over.

    `build` opens the coordinator of a term, on another thread. `serve` makes the application around it. `on_end` is
    called when the process takes part in elections no longer.
    """

    def __init__(
        self,
        election: Election,
        build: Callable[[Fence], Coordinator],
        serve: Callable[[Coordinator], FastAPI],
        on_end: Callable[[], object],
    ) -> None:
        self.election = election
        self._failure: Exception | None = None  # why the last term has failed at its start
        self.refused_at = -math.inf  # when the leader was last out of reach, by the monotonic clock
        self._build, self._serve, self._on_end = build, serve, on_end
        self._app: FastAPI | None = None
        self._closing = threading.Event()
        self._changed = asyncio.Event()
        self.replaced = asyncio.Event()  # set when another coordinator leads; then there is a new one here

    @property
    def app(self) -> FastAPI | None:
        """The application, while this coordinator leads for sure; otherwise None."""
        return self._app if self.election.leads() else None

    @property
    def fault(self) -> str:
        """Why nobody leads, as far as this coordinator knows; empty if it does not know."""
        if self.election.fault:
            return f"the database: {self.election.fault}"
        if self._failure is not None:
            return str(self._failure)
        return f"the store: {self.election.store_fault}" if self.election.store_fault else ""

    @property
    def coordinator(self) -> Coordinator | None:
        """The coordinator of the current term; None between terms."""
        return None if self._app is None else self._app.state.coordinator

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Take part in elections within the block."""
        loop = asyncio.get_running_loop()

        def changed() -> None:
            loop.call_soon_threadsafe(self._changed.set)

        def replaced() -> None:
            loop.call_soon_threadsafe(self._replace)

        with self.election.errors.collecting():
            self.election.start(changed, replaced)
            task = asyncio.create_task(self._follow())
            try:
                yield
            finally:
                self.stop_waiting()
                self._closing.set()
                self._changed.set()
                await task
                await run_in_threadpool(self.election.stop)
                self._on_end()

    async def settled(self) -> None:
        """Wait until this coordinator leads or knows the leader. Raises OuterstepError with the reason if it should
        lead and cannot."""
        while self.app is None and self.leader is None:
            if self._failure is not None:
                error = at_start(self._failure)
                raise error if isinstance(error, OuterstepError) else OuterstepError(str(error))
            await asyncio.sleep(SETTLE_S)
        if self.app is None and self.unreachable:
            raise OuterstepError(self.unreachable)

    @property
    def role(self) -> str:
        """What this coordinator does, in words."""
        if self.leader is None:
            return "leads"
        return f"standby: it forwards requests to {self.leader.address}, which leads, and takes over from it"

    @property
    def leader(self) -> Leader | None:
        """Another coordinator that leads; None if there is none, or this one is about to lead."""
        leader = self.election.leader
        if leader is None or leader.is_vacant or leader.address is None or leader.holder == self.election.id:
            return None  # without an address: its term has been ended, and it may begin another one
        if leader.address == self.election.address and leader.token != self.election.renewed:
            return None  # an earlier process at this address, whose lease is about to expire
        return leader

    @property
    def unreachable(self) -> str:
        """Why requests cannot be forwarded to `leader`, as far as is known without trying; empty if they can."""
        if self.leader is None or self.leader.address != self.election.address:
            return ""
        return (
            f"the leader's address, {self.leader.address}, is this coordinator's own: give each coordinator another "
            "--advertise-url, the address where the others reach it"
        )

    def _replace(self) -> None:
        before, self.replaced = self.replaced, asyncio.Event()
        before.set()

    def stop_waiting(self) -> None:
        """Let the requests that wait end, because the process is about to stop."""
        self.election.withdraw()
        if self.coordinator is not None:
            self.coordinator.waiters.close()

    async def _follow(self) -> None:
        while not self._closing.is_set():
            await self._changed.wait()
            self._changed.clear()
            fence = self.election.fence
            if fence is not None and not self._closing.is_set():
                await self._term(fence)
                self._changed.set()  # the election may have changed in the meantime

    async def _term(self, fence: Fence) -> None:
        """Lead until the fence is lost or the process stops."""
        failed = True
        try:
            async with AsyncExitStack() as stack:
                service = await run_in_threadpool(self._build, fence)
                app = self._serve(service)
                await stack.enter_async_context(app.router.lifespan_context(app))  # closes the coordinator at its end
                stack.callback(service.waiters.close)
                self._app, self._failure, failed = app, None, False
                logger.info("the runs are restored: %s", ", ".join(run.name for run in service.runs()) or "none")
                while not fence.lost.is_set() and not self._closing.is_set():
                    await self._changed.wait()
                    self._changed.clear()
                self._app = None
                fence.end()
        except Exception as error:  # another coordinator may succeed, and this one tries again
            self._failure = error
            logger.exception("this coordinator cannot lead")
        finally:
            self._app = None
            await run_in_threadpool(self.election.finish, fence, rest=failed and not self._closing.is_set())
