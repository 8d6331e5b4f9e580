"""The membership of a worker of several processes: rank 0 holds the lease, and all act with its member token."""

from protocol.messages import JoinReply, JoinRequest
from worker.link.client import Client
from worker.link.membership import Membership
from worker.ranks import Ranks
from worker.state.state_dir import StateDir

_TOKEN = "member-token"
_PAUSE_S = 0.2  # between looks at the store


class SharedMembership(Membership):
    """Rank 0 joins, and puts each new member token where all `ranks` find it; the others wait for it there. Its
    heartbeat alone finds out within a third of a lease that this has ended, so they never wait for long.

    To be made by all processes at once.
    """

    def __init__(self, client: Client, worker: str, request: JoinRequest, files: StateDir | None, ranks: Ranks) -> None:
        super().__init__(client, worker, request, files)
        self._ranks, self._store = ranks, ranks.store()

    def join(self) -> JoinReply:
        reply = self._ranks.by_first(super().join)
        self._token = reply.member_token
        return reply

    def start_over(self) -> None:
        self._ranks.by_first(super().start_over)

    def _renew(self, ended: str) -> None:
        if self._ranks.is_first:
            super()._renew(ended)
            return
        while (token := self._store.get(_TOKEN).decode()) == ended:
            self.client.pause(_PAUSE_S)
        self._token = token

    def _join(self, previous: str | None, proposed: str | None = None) -> JoinReply:
        reply = super()._join(previous, proposed)
        self._store.set(_TOKEN, reply.member_token)
        return reply
