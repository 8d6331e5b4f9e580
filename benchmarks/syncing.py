"""A worker that syncs without training: it contributes the same noise in every round."""

from functools import partial

import torch
from torch import nn

from protocol.fragments import TensorSpec
from protocol.messages import Action, Assignment, JoinRequest
from worker.joining.recovery import seed
from worker.link.client import Client
from worker.link.membership import Membership
from worker.rounds.exchange import Exchange
from worker.rounds.in_flight import InFlight
from worker.state.fragments import Fragments
from worker.state.outer_state import OuterState
from worker.state.work import Contribution


def noise(elements: int, rank: int) -> torch.Tensor:
    """Draw float32[elements], as hard to compress as a pseudo-gradient."""
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank)) * 1e-3


class Flat(nn.Module):
    """A model that is one vector of zeros, float32[elements], so that its state 0 compresses to nothing."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(elements))


class SyncingWorker:
    """A member of the client's run of a `Flat` model. It has joined the run, and state 0 is there."""

    def __init__(self, client: Client, rank: int, elements: int) -> None:
        detail = client.run_detail()
        client.store.offer(detail.direct)
        self.client, self.delta = client, noise(elements, rank)
        request = JoinRequest(tensors=[TensorSpec(name="w", shape=[elements])])
        self.membership = Membership(client, f"worker-{rank:03}", request, None)
        self._layout = self.membership.join().layout
        self.state = OuterState(self._layout, detail.spec.outer, pin_memory=False)
        self._exchange = Exchange(self.membership, detail.spec, self.state, torch.device("cpu"))
        # Zeros are compressed, whatever the run says of contributions.
        zeros = detail.spec.model_copy(update={"sync": detail.spec.sync.model_copy(update={"zstd": True})})
        while (asked := self._ask(None)).action is not Action.RECOVER:
            if asked.action is Action.SEED:
                seed(self.membership, zeros, Fragments(Flat(elements), self._layout), self.state)
        for p in range(len(self.state)):  # state 0 is known to everybody here
            self.state.set(p, torch.zeros(self._layout.elements[p]), None)
        self.state.reach(0)

    def _ask(self, state_round: int | None) -> Assignment:
        return self.membership.act(
            partial(self.client.assignment, worker=self.membership.worker, state_round=state_round)
        )

    def work(self, round_: int) -> list[Contribution]:
        """Wait for the round, and return what to contribute to each fragment."""
        while (asked := self._ask(round_)).action is not Action.TRAIN:
            pass  # a long poll
        # As `DiLoCo` does it: the digests while it asks for units, and again with the pseudo-gradients.
        assert all(self.state.fragment_digest(p) and self.state.is_intact(p) for p in range(len(self.state)))
        deltas = enumerate(self.delta.split(self._layout.elements))
        return [Contribution(round_, p, asked.units, 1, 1, 1.0, 1.0, each) for p, each in deltas]

    def sync(self, work: list[Contribution]) -> None:
        """Do what `outerstep worker` does between the inner steps of two rounds: encode, upload (durable before it is
        acknowledged), wait for the delta, download, decode, outer step."""
        flight = InFlight(self._exchange, work[0].round)
        for each in work:
            flight.send_made(each)
        flight.end()
