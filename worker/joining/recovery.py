"""How a worker gets the run's outer state without holding up anyone: it replays deltas, loads a checkpoint, or seeds
the run.

As in a database (base backup and log), a worker replays the deltas since its own state, or loads the latest checkpoint
and replays the deltas since that, whichever is fewer bytes. A worker that missed a few rounds replays their deltas; one
that missed many loads the checkpoint; a newcomer's freshly built model often is state 0, so it replays as well. Every
delta names the state that it belongs to, every checkpoint its digests: nothing is taken on trust.

The run's first worker seeds it: its model is state 0.
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

    `held` is the number of the state that it is at, or may be at (None: none). If that is later than `target`, the run
    has dropped it, and a checkpoint of the same number would not show that it has gone: so an earlier one is loaded. If
    there is none, `state` is of no round afterwards, so that the next request for an assignment names none. Raises
    Resync if the coordinator's own data are inconsistent.
    """
    most = target if held is not None and held > target else None
    while True:
        try:
            checkpoint = _newest_checkpoint(client, most)
            if checkpoint is None:
                state.begin_changes()
                return
            if held is not None and held < target and _fewer_bytes_by_deltas(client, held, checkpoint):
                start, held = held, None  # what fails once would fail again
                try:
                    _replay(client, spec, state, start, target)
                    return
                except Resync as error:
                    log.info("cannot continue from the state held here (%s); loading a checkpoint", error)
            held = None
            _load_checkpoint(client, state, checkpoint)
            _replay(client, spec, state, checkpoint.round, target)
            return
        except Problem as problem:
            if problem.slug == "not-published":
                log.warning("the run was rolled back while this worker recovered: %s", problem.detail)
                return  # without a state: the next assignment names one
            if problem.slug == "file-lost":  # workers that hold the state continue, so there will be another checkpoint
                log.warning("%s; asking again in %.0f s", problem.detail, _LOST_S)
                client.pause(_LOST_S)
                continue
            # A newer checkpoint has replaced this one, or covers the deltas that were about to be fetched.
            if problem.slug not in ("gone", "not-found"):
                raise
            log.info("%s: asking for the latest checkpoint again", problem.detail)
            client.pause(1)


def _newest_checkpoint(client: Client, most: int | None) -> CheckpointDetail | None:
    """Return the newest checkpoint; the newest up to state `most`, if that is given. None if all are later."""
    if most is None:
        return client.checkpoint(None)
    rounds = [each.round for each in client.checkpoints() if each.round <= most]
    return client.checkpoint(max(rounds)) if rounds else None


def _fewer_bytes_by_deltas(client: Client, held: int, checkpoint: CheckpointDetail) -> bool:
    """Return True if the deltas from `held` to the checkpoint are smaller than the checkpoint. Those after it are
    needed either way."""
    missed = checkpoint.round - held
    if missed <= 0:
        return True
    if missed > MAX_LISTED:
        return False
    rounds = client.newest_rounds(checkpoint.round, missed)
    return len(rounds) == missed and sum(each.delta_bytes for each in rounds) < checkpoint.bytes


def _load_checkpoint(client: Client, state: OuterState, checkpoint: CheckpointDetail) -> None:
    """Fetch the fragments of the checkpoint that differ here."""
    state.begin_changes()

    def load(p: int) -> bool:
        described, n = checkpoint.fragments[p], len(state.theta[p])
        if state.is_intact(p) and state.fragment_digest(p).hex() == described.state_digest:
            return False
        limit_bytes = wire.max_payload_bytes("fp32", 2 * n)
        state.load(p, client.checkpoint_fragment(checkpoint.round, described, limit_bytes))
        if state.fragment_digest(p).hex() != described.state_digest:
            raise Resync(f"fragment {p} of checkpoint {checkpoint.round} does not match its digest")
        return True

    fetched = sum(_each_fragment(state, load, _LOADED))
    state.reach(checkpoint.round)
    log.info("loaded checkpoint %d: fetched %d of %d fragments", checkpoint.round, fetched, len(state.own))


def _replay(client: Client, spec: RunSpec, state: OuterState, start: int, target: int) -> None:
    """Apply the deltas from state `start` to `target`."""
    state.begin_changes()

    def replay(p: int) -> None:
        limit_bytes = wire.max_payload_bytes(spec.sync.download_codec, len(state.theta[p]))
        for round_number in range(start, target):
            state.step(p, client.delta(round_number, p, limit_bytes))

    _each_fragment(state, replay, _REPLAYED)
    state.reach(max(start, target))
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
    """Make the model state 0, here and on the coordinator: the model as it is, or as `initial` leaves it. With several
    `ranks`, each uploads the fragments that it owns. Raises what `initial` raises, and Problem `state-conflict` if
    another worker was asked to seed in the meantime."""
    state.begin_changes()
    if initial is not None:
        initial()
    state.take(fragments)
    ranks.together(lambda: _send(membership, spec, state))
    state.reach(0)


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
        state.release(p)
        membership.act(partial(client.seed, header=header, frames=frames))
