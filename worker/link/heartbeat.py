"""The heartbeat: a thread that renews the lease three times per term and learns whether the run still wants this
worker."""

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from protocol.errors import OuterstepError
from protocol.messages import Directive, Metrics
from worker.errors import Stopped
from worker.link.membership import Membership

log = logging.getLogger(__name__)


class Heartbeat:
    """The thread that renews the lease, from `with` to its end. `run_ended` is set whenever the coordinator says
    `stop`; `failure` is what ended it early."""

    def __init__(self, membership: Membership, lease_s: float, metrics: Callable[[], Metrics]) -> None:
        self._done, self._wake = threading.Event(), threading.Event()
        # It goes on while the worker that was asked to stop finishes its step: the lease must last until it leaves.
        # And a lost answer must not cost the lease: there is time for another try.
        self._client = membership.client.until(self._done, silence_s=lease_s / 3)
        self._membership, self._metrics = membership, metrics
        self._interval_s = lease_s / 3
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self.run_ended = threading.Event()
        self._directive = Directive.CONTINUE
        self.failure: OuterstepError | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._wake.set()
        # A request may still be under way; nothing depends on it any more, and the thread is a daemon.
        self._thread.join(timeout=1)

    def beat_now(self) -> None:
        """Renew the lease soon: there is news in the metrics that the coordinator acts upon."""
        self._wake.set()

    def raise_failure(self) -> None:
        """Raise what ended it early, if anything did."""
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        while True:
            self._wake.wait(self._interval_s)
            if self._done.is_set():
                return
            self._wake.clear()
            try:
                self.beat()
            except Stopped:
                return
            except OuterstepError as error:
                # A refusal for good, of the rejoin for example. The training loop raises it at its next step.
                self.failure = error
                return

    def beat(self) -> None:
        """Renew the lease, and do what the answer says."""
        worker, metrics = self._membership.worker, self._metrics()
        reply = self._membership.act(lambda token: self._client.renew_lease(token, worker, metrics))
        self._interval_s = reply.lease_s / 3
        if reply.directive is not self._directive and reply.directive is not Directive.CONTINUE:
            log.info("the coordinator says %s: %s", reply.directive, reply.reason)
        self._directive = reply.directive
        if reply.directive is Directive.STOP:
            self.run_ended.set()
