"""Seeding: the run's first worker makes state 0 of its own model."""

from collections.abc import Callable
from functools import partial

import torch

from protocol import wire
from protocol.spec.run import RunSpec
from worker.codecs import pack_fragment
from worker.link.membership import Membership
from worker.state.fragments import Fragments
from worker.state.outer_state import OuterState


def seed(
    membership: Membership,
    spec: RunSpec,
    fragments: Fragments,
    state: OuterState,
    initial: Callable[[], None] | None = None,
) -> None:
    """Make the model state 0, here and on the coordinator: as it is, or as `initial` leaves it. Raises what that
    raises, and Problem `state-conflict` where another worker was asked to in the meantime."""
    state.round, client = None, membership.client
    if initial is not None:
        initial()
    for p in range(len(state)):
        state.set(p, fragments.gather(p), None)
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
    state.round = 0
