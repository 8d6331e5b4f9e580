"""This worker's place in the run: it joins, and joins again whenever its lease has ended."""

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from protocol.errors import Problem
from protocol.messages import JoinReply, JoinRequest, LeaveRequest, Metrics
from worker.client import Client
from worker.state_dir import StateDir

T = TypeVar("T")

log = logging.getLogger(__name__)

# A coordinator that refuses the token it has just given is at fault; asking for ever would only load it.
_ATTEMPTS = 3


class Membership:
    """Holds the member token. Thread-safe: of several threads that learn of a lost lease, one joins again."""

    def __init__(self, client: Client, worker: str, request: JoinRequest, files: StateDir | None) -> None:
        self._client = client
        self.worker = worker
        self._request = request
        self._files = files
        self._lock = threading.Lock()
        self._token = ""
        self.epoch = 0  # changes whenever the worker has joined again

    def join(self) -> JoinReply:
        """Join or rejoin. Raises Problem where the coordinator refuses for good."""
        with self._lock:
            return self._join(self._files.member_token() if self._files else None)

    def act(self, call: Callable[[str], T]) -> T:
        """`call(member_token)`; where the lease has ended, join again and call again."""
        for _ in range(_ATTEMPTS):
            token = self._token
            try:
                return call(token)
            except Problem as problem:
                if problem.slug != "unauthorized":
                    raise
                refusal = problem
            with self._lock:
                if self._token == token:
                    log.warning("this worker's lease has ended (%s); joining again", refusal.detail)
                    self._join(token)
        raise refusal

    def start_over(self) -> None:
        """Leave and join again: whatever units this worker still holds return to the pool."""
        with self._lock:
            try:
                self._client.leave(self._token, self.worker, LeaveRequest())
            except Problem as problem:
                if problem.slug != "unauthorized":  # the lease ended by itself; the units are back already
                    raise
            self._join(None)

    def leave(self, state_round: int | None, state_digest: bytes | None, metrics: Metrics) -> None:
        request = LeaveRequest(
            state_round=state_round, state_digest=state_digest.hex() if state_digest else None, metrics=metrics
        )
        self._client.leave(self._token, self.worker, request)

    def _join(self, previous: str | None) -> JoinReply:
        reply = self._client.join(self.worker, self._request.model_copy(update={"previous": previous}))
        self._token, self.epoch = reply.member_token, reply.epoch
        if self._files:
            self._files.keep_member_token(reply.member_token)
        return reply
