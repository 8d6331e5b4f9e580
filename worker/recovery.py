"""How a worker comes to the run's outer state: its own state and the deltas since, or a checkpoint and the deltas
since.

As databases do it (base backup and log): a worker that missed k rounds replays k deltas; where those are gone, it
takes the latest checkpoint. Nobody else has to wait for it.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from protocol import wire
from protocol.errors import Problem
from protocol.spec import RunSpec
from worker.client import Client
from worker.errors import Resync
from worker.outer_state import OuterState

_PARALLEL = 4

log = logging.getLogger(__name__)


def recover(client: Client, spec: RunSpec, state: OuterState, target: int) -> None:
    """Bring `state` to state `target` (or to a later checkpoint). Raises Resync where the coordinator's own data
    disagree."""
    if state.round is not None and state.round <= target:
        try:
            _replay(client, spec, state, target)
            return
        except (Problem, Resync) as error:
            if isinstance(error, Problem) and error.slug != "gone":
                raise
            log.info("cannot go on from the state held here (%s); taking a checkpoint", error)
    while True:
        try:
            _load_checkpoint(client, state)
            if state.round is not None and state.round < target:
                _replay(client, spec, state, target)
            return
        except Problem as problem:
            if problem.slug != "gone":
                raise
            client.pause(1)  # a newer checkpoint replaced this one in the meantime


def _load_checkpoint(client: Client, state: OuterState) -> None:
    checkpoint = client.checkpoint()
    state.round = None

    def load(p: int) -> None:
        elements = 2 * len(state.theta[p])
        payload = client.checkpoint_fragment(checkpoint.round, p, wire.max_payload_bytes("fp32", elements))
        state.load(p, payload)
        if state.digests[p].hex() != checkpoint.fragments[p].state_digest:
            raise Resync(f"fragment {p} of checkpoint {checkpoint.round} is not what the coordinator says it is")

    _each_fragment(state, load)
    state.round = checkpoint.round
    log.info("took checkpoint %d", checkpoint.round)


def _replay(client: Client, spec: RunSpec, state: OuterState, target: int) -> None:
    """Apply the deltas from `state.round` to `target`."""
    assert state.round is not None
    first, state.round = state.round, None

    def replay(p: int) -> None:
        limit_bytes = wire.max_payload_bytes(spec.sync.download_codec, len(state.theta[p]))
        for round_number in range(first, target):
            state.step(p, client.delta(round_number, p, limit_bytes))

    _each_fragment(state, replay)
    state.round = target
    if target > first:
        log.info("replayed the deltas of %d rounds", target - first)


def _each_fragment(state: OuterState, act: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(_PARALLEL, "recovery") as pool:
        for _ in pool.map(act, range(len(state))):
            pass
