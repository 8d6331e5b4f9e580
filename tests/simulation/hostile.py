"""A hostile worker: it speaks the protocol as it is written, and lies in what it says.

It trains nothing. Each round it draws what to do: contributions that are scaled, flipped, zeros or noise; a weight of
several rounds, units of rounds that it has held back, with nothing said of carrying them, or rounds as carried that it
has contributed to; and at any time a pace that no machine has, and held-out losses that nobody asked for. In half of the
seeds it also accuses an honest worker whenever it is asked what the state would be without the others' contributions.
What the run's outer state is, it is told by the simulation.
"""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import httpx
import numpy as np

from harness.member import F32, Member
from protocol.messages import Action, Assignment, DataSummary
from protocol.wire import MAX_UNIT_RANGES
from tests.simulation.network import Line
from tests.simulation.worker_node import ELEMENTS, SHARED_DATA, Toy
from worker.link.client import TIMEOUT
from worker.state.parameters import tensor_specs

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

PACE = 1e300  # inner steps per second
LOSS = 1e9

Values = Callable[[random.Random, F32], F32]

# What is sent in place of the honest values, which are 1 where a unit was trained on.
VALUES: dict[str, Values] = {
    "honest": lambda rng, honest: honest,
    "scaled": lambda rng, honest: honest * np.float32(10.0 ** rng.randint(-6, 6)),
    "flipped": lambda rng, honest: -honest,
    "zeros": lambda rng, honest: np.zeros_like(honest),
    "noise": lambda rng, honest: _noise(rng, len(honest)) * np.float32(10.0 ** rng.randint(-3, 6)),
}
WEIGHTS = (1, 1, 2, 5)  # times what it has
LATE = (0, 0, 1, 3)  # rounds of which it says to carry work


def _noise(rng: random.Random, elements: int) -> F32:
    return np.random.RandomState(rng.randrange(1 << 32)).standard_normal(elements).astype(np.float32)


class Hostile:
    """One hostile worker, from the time at which state 0 is there to the end of the run."""

    def __init__(self, simulation: "Simulation", name: str, token: Callable[[], str]) -> None:
        self.name, self.counts = name, dict[str, int]()
        self._sim, self._token = simulation, token
        self._rng = random.Random(f"{simulation.seed} {name}")
        self._accuses = self._rng.random() < 0.5
        weather, line_rng = lambda: simulation.weather, random.Random(f"{simulation.seed} {name}'s line")
        self._line = Line(simulation.scheduler, line_rng, simulation.node, weather, simulation.ledger)
        self._member: Member | None = None
        self._held: list[list[int]] = []  # units of rounds that it has not contributed to
        self._played = -1

    def live(self) -> None:
        """Play every round; whatever is refused or lost, it goes on."""
        sleep, ledger = self._sim.scheduler.sleep, self._sim.ledger
        with httpx.Client(base_url="http://sim", transport=self._line, timeout=TIMEOUT, trust_env=False) as http:
            while not ledger.finished:
                sleep(self._rng.uniform(0.2, 2.0))
                if (0, 0) not in ledger.states:
                    continue
                try:
                    self._act(self._member or self._join(http))
                except httpx.HTTPStatusError as error:
                    self._count(f"was answered {error.response.status_code}")
                    if error.response.status_code == 401:
                        self._member = None
                    if error.response.status_code == 409:
                        self._held = []
                except httpx.TransportError:
                    self._count("lost its line")

    def _join(self, http: httpx.Client) -> Member:
        data = DataSummary(units=5) if self._sim.private else SHARED_DATA
        member = Member(http, "sim", self.name, tensor_specs(Toy(self._sim.fragments)), data)
        member.join(self._token())
        self._member = member
        return member

    def _act(self, member: Member) -> None:
        member.http.put(member.path("/lease"), json={"inner_steps_per_second": PACE}).raise_for_status()
        body = {"state_round": self._sim.ledger.round, "carried": self._held}
        reply = member.http.put(member.path("/assignment"), json=body).raise_for_status()
        assignment = Assignment.model_validate(reply.json())
        if assignment.action is Action.RECOVER:  # the state has changed: it says that it has dropped it
            member.http.put(member.path("/assignment"), json=body | {"state_round": None}).raise_for_status()
        if assignment.action is Action.FINISH:
            member.http.delete(member.path()).raise_for_status()
            self._member, self._held = None, []
        if assignment.action is not Action.TRAIN:
            return
        self._evaluate(member, assignment)
        if assignment.round != self._played:
            self._played = assignment.round
            self._play(member, assignment)

    def _evaluate(self, member: Member, assignment: Assignment) -> None:
        """Measure as honest workers do, to be believed, and accuse one; or claim what nobody asked for."""
        loss = self._sim.ledger.loss(assignment.round) or LOSS
        path, redone = f"/v1/runs/sim/rounds/{assignment.round}/evaluation", {"redone": assignment.redone}
        told = {"loss": loss if assignment.evaluate else LOSS, "tokens": 1}
        reply = member.http.put(path, params=redone, json=told)
        others = [] if reply.is_error else [each for each in reply.json()["without"] if each != self.name]
        if others and self._accuses:
            victim = self._rng.choice(others)
            without = {each: loss - (each == victim) for each in [*others, self.name]}
            report = {"loss": loss, "without": without}
            accusation = {"reached": report, "start": report}
            heard = member.http.put(f"{path}/without", params=redone, json=accusation)
            self._count("accused" if heard.is_success else "accused in vain")

    def _play(self, member: Member, assignment: Assignment) -> None:
        """Hold the round's units back, or contribute."""
        rng, ledger = self._rng, self._sim.ledger
        if rng.random() < 0.2 and len(self._held) < MAX_UNIT_RANGES // 2:
            self._count("held units back")
            self._held += assignment.units
            return
        kind, late = rng.choice(sorted(VALUES)), rng.choice(LATE)
        carried = list(range(max(assignment.round - late, 0), assignment.round))
        units = [*self._held, *assignment.units] if rng.random() < 0.5 else assignment.units
        named = [unit for start, stop in units for unit in range(start, stop)]
        weight = len(named) * rng.choice(WEIGHTS) * member.spec.unit_tokens
        honest = np.zeros(ELEMENTS, np.float32)
        honest[np.array(named) % ELEMENTS] = 1.0
        for p in range(len(member.theta)):
            member.theta[p], member.momentum[p] = ledger.states[assignment.round, p]
            values = VALUES[kind](rng, honest)
            reply = member.contribute(
                assignment, p, values, units=units, tokens=weight, carried=carried, loss=LOSS, norm=1.0
            )
            if reply.is_error:  # as it weighs too much: what it may have it takes
                self._count("was refused")
                weight = sum(stop - start for start, stop in assignment.units) * member.spec.unit_tokens
                reply = member.contribute(assignment, p, values, tokens=weight, loss=LOSS, norm=1.0)
            if reply.is_success:
                self._count(f"contributed {kind}")
        self._held = []

    def _count(self, what: str) -> None:
        self.counts[f"hostile {what}"] = self.counts.get(f"hostile {what}", 0) + 1
