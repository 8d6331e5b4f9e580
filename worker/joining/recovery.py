"""How a worker comes to the run's outer state, stalling nobody: from its own state by the deltas since, or from a
checkpoint by the deltas since, whichever is fewer bytes.

As databases do it (base backup and log). A worker that missed a few rounds replays their deltas; one that missed
many takes the latest checkpoint; a newcomer's freshly built model often is state 0, and then it replays as well.
Nothing is taken on trust: every delta names the state that it belongs to, every checkpoint its digests.

Seeding: the run's first worker makes state 0 of its own model.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from protocol import wire
from protocol.errors import Problem
from protocol.messages import CheckpointDetail
from protocol.spec.run import RunSpec
from worker.codecs import pack_fragment
from worker.errors import Resync
from worker.link.client import MAX_LISTED, Client
from worker.link.membership import Membership
from worker.ranks import ALONE, Ranks
from worker.state.fragments import Fragments
from worker.state.outer_state import OuterState

_REPLAYED = 4  # fragments at a time
_LOST_S = 30.0
_LOADED = 2  # fragments of a checkpoint at a time: each is held in memory as a whole

T = TypeVar("T")

log = logging.getLogger(__name__)


def recover(client: Client, spec: RunSpec, state: OuterState, target: int, *, held: int | None) -> None:
    """Bring `state` to state `target`, or to a later checkpoint.

    `held` is the number of the state that it is at, or may be at (None: surely at none). Raises Resync where the
    coordinator's own data disagree.
    """
    while True:
        try:
            checkpoint = client.checkpoint()
            if held is not None and held < target and _fewer_bytes_by_deltas(client, held, checkpoint):
                start, held = held, None  # what fails once would fail again
                try:
                    _replay(client, spec, state, start, target)
                    return
                except Resync as error:
                    log.info("cannot go on from the state held here (%s); taking a checkpoint", error)
            held = None
            _load_checkpoint(client, state, checkpoint)
            _replay(client, spec, state, checkpoint.round, target)
            return
        except Problem as problem:
            if problem.slug == "not-published":
                log.warning("the run went back while this worker recovered: %s", problem.detail)
                return  # without a state: the coordinator says which one it is to be
            if problem.slug == "file-lost":  # the workers that hold the state go on, and so there will be another one
                log.warning("%s; asking again in %.0f s", problem.detail, _LOST_S)
                client.pause(_LOST_S)
                continue
            # A newer checkpoint has replaced this one, or covers the deltas that we were about to fetch.
            if problem.slug not in ("gone", "not-found"):
                raise
            log.info("%s: asking again for the latest checkpoint", problem.detail)
            client.pause(1)


def _fewer_bytes_by_deltas(client: Client, held: int, checkpoint: CheckpointDetail) -> bool:
    """Return True if the deltas from `held` to the checkpoint are smaller than it; those after it are needed either
    way."""
    missed = checkpoint.round - held
    if missed <= 0:
        return True
    if missed > MAX_LISTED:
        return False
    rounds = client.newest_rounds(checkpoint.round, missed)
    return len(rounds) == missed and sum(each.delta_bytes for each in rounds) < checkpoint.bytes


def _load_checkpoint(client: Client, state: OuterState, checkpoint: CheckpointDetail) -> None:
    """Fetch the fragments of the checkpoint that are not here yet."""
    state.round = None

    def load(p: int) -> bool:
        described, n = checkpoint.fragments[p], len(state.theta[p])
        if state.is_intact(p) and state.fragment_digest(p).hex() == described.state_digest:
            return False
        limit_bytes = wire.max_payload_bytes("fp32", 2 * n)
        state.load(p, client.checkpoint_fragment(checkpoint.round, described, limit_bytes))
        if state.fragment_digest(p).hex() != described.state_digest:
            raise Resync(f"fragment {p} of checkpoint {checkpoint.round} is not what the coordinator says it is")
        return True

    fetched = sum(_each_fragment(state, load, _LOADED))
    state.round = checkpoint.round
    log.info("took checkpoint %d: fetched %d of %d fragments", checkpoint.round, fetched, len(state.own))


def _replay(client: Client, spec: RunSpec, state: OuterState, start: int, target: int) -> None:
    """Apply the deltas from state `start` to `target`."""
    state.round = None

    def replay(p: int) -> None:
        limit_bytes = wire.max_payload_bytes(spec.sync.download_codec, len(state.theta[p]))
        for round_number in range(start, target):
            state.step(p, client.delta(round_number, p, limit_bytes))

    _each_fragment(state, replay, _REPLAYED)
    state.round = max(start, target)
    if target > start:
        log.info("replayed the deltas of %d rounds", target - start)


def _each_fragment(state: OuterState, act: Callable[[int], T], threads: int) -> list[T]:
    with ThreadPoolExecutor(threads, "recovery") as executor:
        return list(executor.map(act, state.own))


def seed(
    membership: Membership,
    spec: RunSpec,
    fragments: Fragments,
    state: OuterState,
    initial: Callable[[], None] | None = None,
    ranks: Ranks = ALONE,
) -> None:
    """Make the model state 0, here and on the coordinator: as it is, or as `initial` leaves it. Of several `ranks` each
    sends the fragments that it owns. Raises what `initial` raises, and Problem `state-conflict` where another worker
    was asked to in the meantime."""
    state.round = None
    if initial is not None:
        initial()
    state.take(fragments)
    ranks.together(lambda: _send(membership, spec, state))
    state.round = 0


def _send(membership: Membership, spec: RunSpec, state: OuterState) -> None:
    client = membership.client
    for p in state.own:
        vector = torch.cat([state.theta[p], state.momentum[p]])
        frames = pack_fragment(vector, "fp32", zstd=spec.sync.zstd)
        header = wire.StateHeader(
            run=client.run,
            round=0,
            fragment=p,
            codec="fp32",
            elements=len(vector),
            chunk_elements=wire.CHUNK_ELEMENTS,
            frame_bytes=[len(frame) for frame in frames],
        )
        membership.act(partial(client.seed, header=header, frames=frames))
