"""This worker's place in the run: it joins, and joins again whenever its lease has ended."""

import logging
import secrets
import threading
from collections.abc import Callable
from typing import TypeVar

from protocol.errors import Problem, UnexpectedAnswer
from protocol.fragments import first_difference
from protocol.messages import DataSummary, JoinReply, JoinRequest, LeaveRequest, Metrics, RoundReport
from worker.link.client import Client
from worker.state.state_dir import MemberTokens, StateDir

T = TypeVar("T")

log = logging.getLogger(__name__)

# At most, between joining again and again: a coordinator that refuses the tokens it has just given is not to be loaded.
_PAUSE_S = 10


class Membership:
    """Holds the member token. Thread-safe: of several threads that learn of a lost lease, one joins again."""

    def __init__(self, client: Client, worker: str, request: JoinRequest, files: StateDir | None) -> None:
        self.client = client
        self.worker = worker
        self._request = request
        self._files = files
        self._lock = threading.Lock()
        self._token = ""
        self.epoch = 0  # changes whenever the worker has joined again
        self.rows: int | None = None  # of the data set that a script's loader draws the run's units from

    def describe(self, data: DataSummary) -> None:
        """Join with this training set, which the coordinator compares between workers."""
        self._request = self._request.model_copy(update={"data": data})

    def has_rows(self, rows: int, *, joined: bool) -> None:
        """Have the length of the data set that the run's units are drawn from, the first one's if there are several,
        compared between workers: at once if this one has `joined`. Raises Problem `data-mismatch` if it differs."""
        if self.rows is None:
            self.rows = rows
            if joined:
                self.act(lambda token: self.client.assignment(token, self.worker, None, rows=rows))

    def join(self) -> JoinReply:
        """Join or rejoin. Raises Problem where the coordinator refuses for good."""
        with self._lock:
            tokens = self._files.member_tokens() if self._files else MemberTokens(None, None)
            return self._join(tokens.current, tokens.proposed)

    def act(self, call: Callable[[str], T]) -> T:
        """Return `call(member_token)`; where the lease has ended, join again and call again.

        As often as it takes: a call may hang for longer than a lease lasts, time and again.
        """
        refusals = 0
        while True:
            token = self._token
            try:
                return call(token)
            except Problem as problem:
                if problem.slug != "unauthorized":
                    raise
                reason = problem.detail
            if refusals:
                self.client.pause(min(refusals, _PAUSE_S))
            refusals += 1
            with self._lock:
                if self._token == token:
                    log.warning("this worker's lease has ended (%s); joining again", reason)
                    self._renew(token)

    def start_over(self) -> None:
        """Leave and join again: whatever units this worker still holds return to the pool."""
        with self._lock:
            try:
                self.client.give_up(self._token, self.worker)
            except Problem as problem:
                if problem.slug != "unauthorized":  # the lease ended by itself; the units are back already
                    raise
            self._join(None)

    def leave(
        self,
        state_round: int | None,
        state_digest: bytes | None,
        metrics: Metrics,
        report: RoundReport | None = None,
    ) -> None:
        hexadecimal = state_digest.hex() if state_digest else None
        request = LeaveRequest(state_round=state_round, state_digest=hexadecimal, metrics=metrics, report=report)
        self.client.leave(self._token, self.worker, request)

    def _renew(self, ended: str) -> None:
        """Get another token than the one whose lease has `ended`."""
        self._join(ended)

    def _join(self, previous: str | None, proposed: str | None = None) -> JoinReply:
        """Propose a token, so that the join can be repeated by this process, or by the next one after a kill -9."""
        proposed = proposed or f"ost_{secrets.token_urlsafe(32)}"
        if self._files:
            self._files.save_member_tokens(MemberTokens(previous, proposed))
        request = self._request.model_copy(update={"previous": previous, "member_token": proposed})
        reply = self.client.join(self.worker, request)
        if difference := first_difference(reply.layout.tensors, request.tensors):  # memory is taken for the layout
            raise UnexpectedAnswer(f"the coordinator's layout is not of this worker's model: {difference}")
        self._token, self.epoch = reply.member_token, reply.epoch
        if self._files:
            self._files.save_member_tokens(MemberTokens(reply.member_token, None))
        return reply
