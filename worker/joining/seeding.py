"""Seeding: the run's first worker makes state 0 of its own model."""

from collections.abc import Callable
from functools import partial

import torch

from protocol import wire
from protocol.spec.run import RunSpec
from worker.codecs import pack_fragment
from worker.link.membership import Membership
from worker.ranks import ALONE, Ranks
from worker.state.fragments import Fragments
from worker.state.outer_state import OuterState


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
