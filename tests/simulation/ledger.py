"""The invariants, checked after every step against a book that the simulation keeps for itself.

I1  a published delta never changes
I2  every acknowledged contribution is in exactly one delta, and the delta is their weighted mean in worker-id order
I3  every replica equals the coordinator's state of the same round, bit for bit (and both equal a third, kept here)
I4  restarting the coordinator changes nothing, nor does a takeover
I5  while enough workers are alive and connected, rounds go on closing
I6  every unit is consumed exactly once, by work that was really trained on it, once in every fragment
I7  only the newest member token of a live lease is good for anything, and the lease of a silent worker ends (checked
    in simulation.py)
I8  the schedule goes on by the most that a contributor has trained of a round, and the run ends where the schedule does
I9  nobody weighs more than one assigned round, nor, where each has an H of its own, four times half of the others
I10 the outer state stays within its bounds
I11 no honest worker is quarantined or left out of a round that is done again, and each measures the state that it names
I12 a round is held no longer than the grace by workers that make no progress (checked in simulation.py)

A round that is done again has a second life: one published delta of it is replaced, without the workers that the event
names. What followed from the old one is forgotten here as there, and all of these hold in each life. A replica may have
the dropped state until it knows.

With a hostile worker in the run I6 is not read from the contributions' bytes: what honest work is late comes less a mean
that is not made of units alone. And what is left out of a delta is nobody's violation. Nor is it one of I11 if there is
such late work beside a hostile worker.
"""

import json
import math
import sqlite3
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from blake3 import blake3

from coordinator.aggregation.state_file import BOUND
from coordinator.run.live_run import LiveRun
from coordinator.run.step_rates import first_steps
from coordinator.store import sqlite
from coordinator.store.blobs import RunNames, round_of
from protocol.codecs import CODECS
from protocol.digest import parse_content_digest
from protocol.outer_step import reached
from protocol.spec.run import UNITS_PER_WORKER
from protocol.spec.sections import OuterSpec, SyncSpec
from protocol.wire import Payload
from tests.simulation.cluster import Cluster
from tests.simulation.coordinator_node import CoordinatorNode
from tests.simulation.error_feedback import ErrorFeedback
from tests.simulation.violation import demand
from tests.simulation.worker_node import ELEMENTS, HeldOut, WorkerNode
from tests.simulation.world.scheduler import Group
from tests.simulation.world.store import Answer

NAMES = RunNames("sim")
HOSTILE = "hostile"  # the worker that is
Key = tuple[int, int]  # round, fragment


@dataclass
class Kept:
    """A contribution that the coordinator committed."""

    digest: bytes
    tokens: int
    payload: Payload


@dataclass
class Ledger:
    """What was seen so far. It outlives every process."""

    node: CoordinatorNode | Cluster
    workers: dict[str, WorkerNode]
    outer: OuterSpec
    sync: SyncSpec
    unit_tokens: int
    held_out: HeldOut
    private: bool = False  # each worker has units of its own
    hostile: bool = False  # not all workers are honest
    contributions: dict[Key, dict[str, Kept]] = field(default_factory=dict)
    acknowledged: dict[tuple[int, int, str], bytes] = field(default_factory=dict)
    fixed: dict[Key, dict[str, int]] = field(default_factory=dict)
    deltas: dict[Key, bytes] = field(default_factory=dict)
    states: dict[Key, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # θ and u before the round
    means: dict[Key, np.ndarray] = field(default_factory=dict)  # the delta's values
    left_out: dict[Key, np.ndarray] = field(default_factory=dict)  # of the delta, by its codec
    digests: dict[Key, bytes] = field(default_factory=dict)
    tokens: dict[str, tuple[str, int]] = field(default_factory=dict)
    # (first unit of the pool, fragment) -> how often each unit of the pool was contributed
    counts: dict[Key, np.ndarray] = field(default_factory=dict)
    error_feedback: ErrorFeedback = field(default_factory=ErrorFeedback)
    free: dict[int, set[int]] = field(default_factory=dict)  # by pool: the units in it
    units: dict[int, int] = field(default_factory=dict)  # by pool: how many were ever assigned
    passed_over: set[int] = field(default_factory=set)  # units that lay in a pool while new ones of it were assigned
    # round -> worker -> the units that it was assigned for the round and has contributed to it
    trained: dict[int, dict[str, int]] = field(default_factory=dict)
    counted: dict[Key, dict[str, float]] = field(default_factory=dict)  # by delta: who is in it, and by which factor
    excluded: dict[int, set[str]] = field(default_factory=dict)  # by round that was done again: without whom
    dropped: set[tuple[int, int, bytes]] = field(default_factory=set)  # states: round, fragment, digest
    forgotten: set[tuple[int, int, str]] = field(default_factory=set)  # contributions to rounds that opened anew
    redone: int = 0
    round: int = 0
    step: int = 0
    finished: bool = False
    checks: int = 0
    _last_row: int = 0
    _last_event: int = 0
    _database: sqlite3.Connection | None = None
    _opened: Path | None = None
    _seen: dict[str, Any] = field(default_factory=dict)
    _before: dict[str, Any] | None = None

    # --- what the network sees ------------------------------------------------------------------------------------

    def arrived(self, request: httpx.Request) -> bool:
        """Whether the request's token is good: no member token, or the newest of a live lease."""
        secret = request.headers.get("authorization", "").removeprefix("Bearer ")
        if secret not in self.tokens:
            return True
        worker, epoch = self.tokens[secret]
        row = self._all("SELECT epoch, state FROM workers WHERE name = ?", worker)[0]
        return bool(row["epoch"] == epoch and row["state"] == "live")

    def served(self, request: httpx.Request, body: bytes, answer: Answer, good: bool) -> None:
        status, path = answer[0], request.url.path
        demand(status != 500, "unexpected", f"{request.method} {path} answered {answer[2][:300]!r}")
        demand(
            good or status >= 400 or request.method == "GET", "I7", f"{request.method} {path} took a stale member token"
        )
        parts = path.split("/")
        if status >= 300 or request.method not in ("PUT", "POST") or parts[-1] == "grant":
            return
        if "contributions" in parts:
            if status == 202:  # of a part, which promises nothing
                return
            key = (int(parts[5]), int(parts[7]), parts[9])
            if parts[-1] == "commit":
                self.acknowledged[key] = bytes.fromhex(json.loads(body)["digest"])
            else:
                whole = parse_content_digest(request.headers.get("Repr-Digest", ""))
                self.acknowledged[key] = whole or blake3(body).digest()
            kept = self._row(key)
            if kept is None and key in self.forgotten:  # between its commit and its answer
                del self.acknowledged[key]
                return
            demand(kept is not None, "I2", f"{key} was acknowledged, and has no row")
        elif len(parts) == 6 and parts[4] == "workers":
            told = json.loads(request.content)["data"]
            demand(told is None or not self.private or "digest" not in told, "private", f"{path} told {told}")
            reply = json.loads(answer[2])
            self.tokens[reply["member_token"]] = (reply["worker"], reply["epoch"])

    def _row(self, key: tuple[int, int, str]) -> sqlite3.Row | None:
        rows = self._all("SELECT digest FROM contributions WHERE round = ? AND fragment = ? AND worker = ?", *key)
        return rows[0] if rows else None

    # --- after every commit: between two steps a unit may leave the pool and return -------------------------------

    def committed(self) -> None:
        for first, rows in self._by_pool(self._all("SELECT start, stop, state FROM unit_ranges")).items():
            units = max(row["stop"] for row in rows) - first
            free = {unit for row in rows if row["state"] == "free" for unit in range(row["start"], row["stop"])}
            if units > self.units.get(first, 0):
                self.passed_over |= free & self.free.get(first, set())
            self.units[first], self.free[first] = units, free

    # --- after every step -----------------------------------------------------------------------------------------

    def check(self, ran: Group | None) -> None:
        """Check the database if it was written to, and the worker whose process has `ran`: no other one has changed."""
        if self.node.dirty and not self.node.in_start:
            self.node.dirty = False
            self.checks += 1
            self._check_database()
        for worker in self.workers.values():
            if worker.group is not ran:
                continue
            state = worker.held()
            if state is not None:
                self._check_replica(worker, state)
            self._check_held_units(worker)

    def _check_database(self) -> None:
        runs = self._all("SELECT round, step, state FROM runs")
        if not runs:
            return
        demand(runs[0]["round"] >= self.round, "I4", f"the run went back from round {self.round} to {runs[0]['round']}")
        self._check_seeding()
        self._check_events()
        self._check_contributions()
        self._check_schedule(runs[0])
        self._check_fragments()
        self._check_evaluations()
        self._check_units()
        if self.node.up:
            self._check_coordinator(self.node.run)

    def _check_schedule(self, run: sqlite3.Row) -> None:
        """Count the steps of the rounds that have ended since, from what was contributed to them."""
        total = self.sync.rounds * self.sync.inner_steps
        while self.round < run["round"]:
            never = self.sync.wait == "never"
            whole = first_steps(self.sync.inner_steps) if never and self.round == 0 else self.sync.inner_steps
            steps = min(whole, total - self.step)
            rows = self._all("SELECT worker, inner_steps FROM assignments WHERE round = ?", self.round)
            h = {row["worker"]: row["inner_steps"] for row in rows}
            left_out = self._left_out(self.round)
            trained = {who: units for who, units in self.trained.get(self.round, {}).items() if who not in left_out}
            shares = [Fraction(units, h[worker]) for worker, units in trained.items()]
            self.step += steps if self.sync.streams else min(math.ceil(steps * max(shares, default=0)), steps)
            self.round += 1
        demand(run["step"] == self.step, "I8", f"round {self.round} begins at step {run['step']}, not {self.step}")
        self.finished = run["state"] == "finished"
        demand(self.finished == (self.step == total), "I8", f"the run is {run['state']} at step {self.step} of {total}")

    def _left_out(self, round_: int) -> set[str]:
        """Who is left out of all deltas of a round: its work is given back."""
        factors: dict[str, float] = {}
        for row in self._all("SELECT verdicts FROM fragments WHERE round = ?", round_) if self.hostile else ():
            for worker, verdict in json.loads(row["verdicts"]).items():
                factors[worker] = max(factors.get(worker, 0.0), verdict["factor"])
        return {worker for worker, factor in factors.items() if factor == 0}

    def _payload(self, name: str, invariant: str, digest: bytes | None = None) -> Payload:
        data = self.node.read(name)
        demand(data is not None, invariant, f"{name} is not there")
        assert data is not None
        demand(digest is None or blake3(data).digest() == digest, invariant, f"{name} has other bytes")
        return Payload.from_bytes(data)

    def _check_seeding(self) -> None:
        if (0, 0) in self.states or not self._all("SELECT round FROM checkpoints WHERE round = 0"):
            return
        for row in self._all("SELECT fragment, digest, state_digest FROM checkpoint_fragments WHERE round = 0"):
            payload = self._payload(NAMES.checkpoint(0, row["fragment"], row["digest"]), "I3")
            values = np.empty(payload.header.elements, np.float32)
            payload.decode(values)
            half = len(values) // 2
            self._set_state((0, row["fragment"]), values[:half].copy(), values[half:].copy())
            demand(self.digests[0, row["fragment"]] == row["state_digest"], "I3", "state 0 is not what was seeded")

    def _check_events(self) -> None:
        """Nobody honest is named; and what a round that was done again has replaced is forgotten."""
        query = "SELECT id, kind, message, data FROM events WHERE id > ? AND kind IN ('quarantined', 'redone')"
        for row in self._all(f"{query} ORDER BY id", self._last_event):
            self._last_event, data = row["id"], json.loads(row["data"])
            named = set(data["workers"] if row["kind"] == "redone" else [data["worker"]])
            demand(self.hostile and (named == {HOSTILE} or self._has_late_work()), "I11", row["message"])
            if row["kind"] == "redone" and data["place"] is not None:
                self._redo(data["round"], named)

    def _has_late_work(self) -> bool:
        """Whether an honest worker's late work is in the last rounds. What a hostile worker put into the mean that it
        missed, it takes back, since it comes less that mean. Beside that, honest work in time looks harmful."""
        return any(
            each.payload.header.carried and worker != HOSTILE  # type: ignore[union-attr]
            for (round_, _), kept in self.contributions.items()
            if round_ >= self.round - 2
            for worker, each in kept.items()
        )

    def _redo(self, round_: int, excluded: set[str]) -> None:
        """The last round was done again, without the workers `excluded`. The open one was dropped."""
        demand(round_ == self.round - 1, "I1", f"round {round_} was done again in round {self.round}")
        self.redone += 1
        self.excluded[round_] = excluded
        self.dropped |= {(*key, self.digests[key]) for key in self.states if key[0] > round_}
        self.forgotten |= {(*key, each) for key, kept in self.contributions.items() if key[0] > round_ for each in kept}
        self.acknowledged = {key: each for key, each in self.acknowledged.items() if key[0] <= round_}
        for of_rounds in (self.contributions, self.fixed):
            for key in [key for key in of_rounds if key[0] > round_]:
                del of_rounds[key]
        for of_deltas in (self.deltas, self.means, self.left_out):
            for key in [key for key in of_deltas if key[0] >= round_]:
                del of_deltas[key]
        for of_states in (self.states, self.digests):
            for key in [key for key in of_states if key[0] > round_]:
                del of_states[key]
        self.trained = {each: trained for each, trained in self.trained.items() if each <= round_}
        self._last_row = self._all("SELECT max(rowid) AS last FROM contributions WHERE round <= ?", round_)[0]["last"]
        self.counts.clear()
        for key, kept in self.contributions.items():
            for worker, each in kept.items():
                if worker not in self.excluded.get(key[0], ()):
                    first = self._first_unit(worker)
                    counts = self.counts.setdefault((first, key[1]), np.zeros(self._units, int))
                    for start, stop in each.payload.header.units:  # type: ignore[union-attr]
                        counts[start - first : stop - first] = 1
        self._check_fragments()
        published = sum(key[0] == round_ for key in self.deltas)
        demand(published == self.held_out.fragments, "I1", f"round {round_} was done again, with {published} deltas")

    def _check_evaluations(self) -> None:
        """What honest workers have measured is the loss of the run's state."""
        for row in self._all("SELECT round, worker, loss FROM evaluations WHERE round >= ?", self.round):
            if row["worker"] in self.workers:
                loss = self.loss(row["round"])
                where = f"state {row['round']}: {row['worker']} measured {row['loss']}"
                demand(loss is None or math.isclose(loss, row["loss"], rel_tol=1e-9), "I11", f"{where}, it has {loss}")

    def loss(self, round_: int) -> float | None:
        """Return the held-out loss of a state; None if it is not known yet."""
        keys = [(round_, fragment) for fragment in range(self.held_out.fragments)]
        if not all(key in self.states for key in keys):
            return None
        rate, beta = self.outer.learning_rate, self.outer.momentum
        points = [reached(*self.states[key], learning_rate=rate, beta=beta) for key in keys]
        return self.held_out.loss(np.concatenate(points))

    def _check_contributions(self) -> None:
        rows = self._all("SELECT rowid AS id, * FROM contributions WHERE rowid > ? ORDER BY rowid", self._last_row)
        for row in rows:
            self._last_row = row["id"]
            key, worker = (row["round"], row["fragment"]), row["worker"]
            where = f"round {key[0]}, fragment {key[1]}, {worker}"
            payload = self._payload(NAMES.contribution(*key, worker, row["digest"]), "I2", row["digest"])
            values = np.empty(payload.header.elements, np.float32)
            payload.decode(values)
            demand(worker not in self.contributions.get(key, {}), "I2", f"{where}: contributed twice")
            demand(key not in self.fixed, "I2", f"{where}: accepted after the contributors were fixed")
            self.contributions.setdefault(key, {})[worker] = Kept(row["digest"], row["tokens"], payload)
            self._check_weight(where, row, payload.header)
            self._count_units(where, key, values, payload.header)
            for start, stop in payload.header.units:  # type: ignore[union-attr]
                query = "SELECT 1 FROM unit_ranges WHERE state != 'consumed' AND start < ? AND stop > ?"
                demand(not self._all(query, stop, start), "I6", f"{where}: accepted, and its units are not consumed")

    def _check_weight(self, where: str, row: sqlite3.Row, header: Any) -> None:
        """One assigned round at most; of fragments that are sent in the middle of a round, what two rounds have. What
        workers that never wait have trained beyond a round weighs as much as the rest; less only if all of it is older."""
        query = "SELECT MAX(inner_steps) AS most FROM assignments WHERE worker = ? AND round <= ?"
        most = self._all(query, row["worker"], row["round"])[0]["most"]
        most = self.sync.most_steps_of(most) * (2 if self.sync.streams else 1)
        units = row["tokens"] // self.unit_tokens
        demand(units <= most, "I9", f"{where}: it weighs {units} units, and was assigned no more than {most}")
        if self.sync.wait == "never" and not header.carried and not self.hostile:
            named = sum(stop - start for start, stop in header.units)
            query = "SELECT 1 FROM unit_ranges WHERE worker = ? AND round = ? AND start < ? AND stop > ?"
            own = [self._all(query, row["worker"], row["round"], stop, start) for start, stop in header.units]
            stale = range(1 if any(own) else row["round"] + 1)
            right = {max(named // (1 + rounds), 1) for rounds in stale}
            demand(units in right, "I9", f"{where}: it weighs {units} units, and has the work of {named}")

    def _count_units(self, where: str, key: Key, values: np.ndarray, header: Any) -> None:
        """Read from a contribution's bytes which units it was trained on: each of its own round's units counts 1, each
        that is carried the share, less the means that it was carried past."""
        round_, fragment = key
        first = self._first_unit(header.worker)
        share, sent = header.carried_share, values.copy()
        for carried in header.carried:
            values += np.float32(share) * self.means[carried, fragment]
        own = np.zeros(self._units, bool)
        query = "SELECT start, stop FROM unit_ranges WHERE worker = ? AND round = ?"
        for row in self._all(query, header.worker, round_):
            own[row["start"] - first : row["stop"] - first] = True
        named = [unit - first for start, stop in header.units for unit in range(start, stop)]
        trained = self.trained.setdefault(round_, {})
        trained[header.worker] = max(trained.get(header.worker, 0), int(own[named].sum()))
        if self.hostile:
            self.counts.setdefault((first, fragment), np.zeros(self._units, int))[named] = 1
            return
        if CODECS[header.codec].error_feedback:
            of_earlier = {share, 1.0} if self.sync.streams else {share}
            whole = {unit: {1.0} if own[unit] else of_earlier for unit in named}
            self.error_feedback.check_sent(where, self.workers[header.worker], header, sent, whole)
        if self.sync.streams:  # what was trained while the late work was on its way is carried as well, and whole
            own |= np.abs(values - 1) < 0.3
        values = np.where(own, values, values / share)
        if CODECS[header.codec].error_feedback:
            self.error_feedback.count(where, (first, fragment), values, late=bool(header.carried))
            self.counts.setdefault((first, fragment), np.zeros(ELEMENTS, int))[named] = 1
            return
        counts = np.rint(values).astype(int)
        demand(bool(np.all(np.abs(values - counts) < 0.3)), "I6", f"{where}: these are no whole units")
        total = self.counts.setdefault((first, fragment), np.zeros(ELEMENTS, int))
        total += counts
        twice = np.flatnonzero(total > 1)
        demand(not len(twice), "I6", f"{where}: the work of units {twice.tolist()} is contributed twice")
        demand(bool(np.all(counts >= 0)), "I6", f"{where}: work was taken back")
        missing = [unit for unit in named if counts[unit] != 1]
        demand(not missing, "I6", f"{where}: it names units {missing}, whose work is not in it")

    def _check_fragments(self) -> None:
        rows = self._all("SELECT * FROM fragments WHERE round >= ? ORDER BY round, fragment", max(0, self.round - 1))
        for row in rows:
            key, where = (row["round"], row["fragment"]), f"round {row['round']}, fragment {row['fragment']}"
            if row["contributors"] is not None and row["contributors"] != "null":
                contributors = json.loads(row["contributors"])
                demand(
                    self.fixed.setdefault(key, contributors) == contributors,
                    "I2",
                    f"{where}: other contributors than before",
                )
                weights = self._weights(key)
                same = contributors.keys() == weights.keys()
                demand(same, "I2", f"{where}: is made of {contributors}, accepted were {weights}")
                demand(contributors == weights, "I9", f"{where}: {contributors} are to weigh {weights}")
            if row["delta_digest"] is not None:
                known = self.deltas.setdefault(key, row["delta_digest"])
                demand(known == row["delta_digest"], "I1", f"{where}: the published delta changed")
                if (key[0] + 1, key[1]) not in self.states:
                    self._check_delta(key, where)

    def _weights(self, key: Key) -> dict[str, int]:
        """What each contribution weighs: its units, and where these differ between honest workers, no more than four
        times as much as half of the others do."""
        tokens = {worker: each.tokens for worker, each in self.contributions.get(key, {}).items()}
        if self.sync.wait == "always" or len(tokens) < 3:
            return tokens
        return {
            worker: min(own, int(4 * np.median([each for other, each in tokens.items() if other != worker])))
            for worker, own in tokens.items()
        }

    def _check_delta(self, key: Key, where: str) -> None:
        """A newly published delta: made of what was accepted, for the state that it says; then step the third replica."""
        payload = self._payload(NAMES.delta(*key, self.deltas[key]), "I1", self.deltas[key])
        header, kept, weights = payload.header, self.contributions.get(key, {}), self._weights(key)
        named = [(each.worker, each.tokens) for each in header.contributors]  # type: ignore[union-attr]
        if self.hostile:  # some are left out
            kept = {worker: kept[worker] for worker, _ in named}
            demand(bool(kept), "I2", f"{where}: everybody is left out")
        demand(
            named == [(worker, weights[worker]) for worker in sorted(kept)],
            "I2",
            f"{where}: the delta names {named}; accepted were {weights}, and the kept {sorted(kept)}",
        )
        factors = {each.worker: each.factor for each in header.contributors}  # type: ignore[union-attr]
        if key[0] in self.excluded:
            before, without = self.counted[key], self.excluded[key[0]]
            expected = {worker: factor for worker, factor in before.items() if worker not in without}
            demand(factors == expected, "I2", f"{where}: is done again with {factors}, not {expected}")
        self.counted[key] = factors
        feeds_back = any(CODECS[each.payload.header.codec].error_feedback for each in kept.values())
        late = {worker for worker, each in kept.items() if each.payload.header.carried}  # type: ignore[union-attr]
        # All are honest, so nobody is left out. Who has gathered what a codec left out may be shortened, and so may
        # late work: it may be longer by half, however many rounds it has missed.
        bounded = set(factors) if feeds_back or self.hostile else late
        demand(
            all(0 < factor <= 1 if worker in bounded else factor == 1 for worker, factor in factors.items()),
            "I2",
            f"{where}: the weights count {factors} times",
        )
        demand(header.base == self.digests[key], "I3", f"{where}: the delta is for another state")  # type: ignore[union-attr]
        total = sum(weights[worker] for worker in kept)
        mean = np.zeros(header.elements, np.float32)
        for worker in sorted(kept):
            payload_of = kept[worker].payload
            payload_of.codec.accumulate(
                payload_of.chunk(0), np.float32(weights[worker] / total * factors[worker]), mean
            )
        codec = CODECS[header.codec]
        if codec.error_feedback:
            mean += self._residual((key[0] - 1, key[1]), where)
        raw = np.empty(codec.size(len(mean)), np.uint8)
        codec.encode(mean, raw)
        demand(raw.tobytes() == payload.chunk(0).tobytes(), "I2", f"{where}: is not the mean in worker-id order")
        delta = np.empty_like(mean)
        payload.decode(delta)
        self.means[key] = delta
        self.left_out[key] = mean - delta
        theta, momentum = (values.copy() for values in self.states[key])
        beta, rate = np.float32(self.outer.momentum), np.float32(self.outer.learning_rate)
        momentum = momentum * beta + delta
        theta = theta - rate * (momentum * beta + delta)
        self._set_state((key[0] + 1, key[1]), theta, momentum)

    def _residual(self, before: Key, where: str) -> np.ndarray:
        """What the delta before has left out, as the coordinator has stored it: nearly what this ledger knows."""
        if before not in self.left_out:
            return np.zeros(1, np.float32)
        (row,) = self._all("SELECT residual_digest FROM fragments WHERE round = ? AND fragment = ?", *before)
        demand(row["residual_digest"] is not None, "I2", f"{where}: what the delta before has left out is lost")
        content = self.node.read(NAMES.residual(*before, row["residual_digest"]))
        demand(content is not None, "I2", f"{where}: what the delta before has left out is not there")
        assert content is not None
        stored = np.empty_like(self.left_out[before])
        CODECS["int8"].decode(np.frombuffer(content, np.uint8), stored)
        error = float(np.abs(stored - self.left_out[before]).max())
        most = float(np.abs(self.left_out[before]).max()) / 100  # of 127 steps
        demand(error <= most, "I2", f"{where}: what the delta before has left out is stored wrongly")
        return stored

    def _set_state(self, key: Key, theta: np.ndarray, momentum: np.ndarray) -> None:
        largest = max(np.abs(theta).max(), np.abs(momentum).max())
        demand(bool(largest <= BOUND), "I10", f"state {key[0]} of fragment {key[1]}: its largest value is {largest}")
        self.states[key] = (theta, momentum)
        self.digests[key] = blake3(blake3(theta.tobytes()).digest() + blake3(momentum.tobytes()).digest()).digest()

    @property
    def _units(self) -> int:
        """How many units of a pool there is room for; those that are read from bytes are elements of a fragment."""
        return 4 * ELEMENTS if self.hostile else ELEMENTS

    def _first_unit(self, worker: str) -> int:
        """The first unit of the pool that the worker's units are of."""
        place = self._all("SELECT place FROM workers WHERE name = ?", worker)[0]["place"]
        return place * UNITS_PER_WORKER if self.private else 0

    def _check_units(self) -> None:
        rows = self._all("SELECT start, stop, state, worker, round FROM unit_ranges ORDER BY start")
        states = {row["name"]: row["state"] for row in self._all("SELECT name, state FROM workers")}
        ranges = self._by_pool(rows)
        of_whom = "SELECT place, next_unit FROM workers" if self.private else "SELECT 0 AS place, next_unit FROM runs"
        for pool in self._all(of_whom):
            first = pool["place"] * UNITS_PER_WORKER
            self._check_pool(first, first + pool["next_unit"], ranges.pop(first, []), states)
        demand(not ranges, "I6", f"there are units of nobody, from {sorted(ranges)} on")
        told = self._all("SELECT message FROM events WHERE kind = 'epoch-broken'")
        demand(not told, "I6", told[0]["message"] if told else "")

    @staticmethod
    def _by_pool(rows: list[sqlite3.Row]) -> dict[int, list[sqlite3.Row]]:
        """Ranges of units by the first unit of their pool; where there is one pool for all, that is 0."""
        pools: dict[int, list[sqlite3.Row]] = {}
        for row in rows:
            pools.setdefault(row["start"] // UNITS_PER_WORKER * UNITS_PER_WORKER, []).append(row)
        return pools

    def _check_pool(self, first: int, next_unit: int, rows: list[sqlite3.Row], states: dict[str, str]) -> None:
        at, opened = first, self._all("SELECT max(round) AS last FROM rounds")[0]["last"] or 0
        for row in rows:
            where = f"units [{row['start']}, {row['stop']})"
            demand(row["start"] == at, "I6", f"{where} do not follow unit {at}: a unit is there twice, or nowhere")
            of_another = self.private and row["state"] == "assigned" and self._first_unit(row["worker"]) != first
            demand(not of_another, "I6", f"{where} are assigned to {row['worker']}, whose they are not")
            at = row["stop"]
            if row["state"] == "assigned":
                state, kept = states[row["worker"]], self.sync.kept_rounds
                may_return = state == "lost" and kept > 0 and row["round"] >= opened - kept
                demand(state == "live" or may_return, "I6", f"{where} are held by {row['worker']}, which is {state}")
            if row["state"] == "consumed":
                taken = slice(row["start"] - first, row["stop"] - first)
                used = np.stack([counts[taken] for (pool, _), counts in self.counts.items() if pool == first])
                demand(bool(np.all(used.max(axis=0) == 1)), "I6", f"{where} are consumed, but no contribution has them")
        demand(at == next_unit, "I6", f"the units up to {next_unit} were assigned, those from {at} on are nowhere")
        units = at - first
        demand(units <= self._units, "setup", f"the simulation knows {self._units} units, {units} were assigned")
        demand(not self.passed_over, "I6", f"new units were assigned, and {sorted(self.passed_over)} lay in the pool")

    def _check_coordinator(self, run: LiveRun) -> None:
        for fragment, (round_, digest) in enumerate(run.outer.states):
            where = f"the coordinator's state {round_} of fragment {fragment}"
            redoing = (round_, fragment, digest) in self.dropped and not run.lock.free()  # type: ignore[attr-defined]
            demand(redoing or self.digests.get((round_, fragment)) == digest, "I3", f"{where} is not the run's")

    def _check_replica(self, worker: WorkerNode, state: Any) -> None:
        seen = (state.round, tuple(state.digests), worker.generation)
        if self._seen.get(worker.name) == seen:
            return
        self._seen[worker.name] = seen
        for fragment, digest in enumerate(state.digests):
            if (state.round, fragment, digest) in self.dropped:
                continue
            where = f"{worker.name}'s state {state.round} of fragment {fragment}"
            theta, momentum = self.states.get((state.round, fragment), (None, None))
            same = theta is not None and digest == self.digests[state.round, fragment]
            demand(same, "I3", f"{where} is not the run's")
            assert theta is not None
            assert momentum is not None
            same = state.theta[fragment].numpy().tobytes() == theta.tobytes()
            same = same and state.momentum[fragment].numpy().tobytes() == momentum.tobytes()
            demand(same, "I3", f"{where} is not what its digest says")

    def _check_held_units(self, worker: WorkerNode) -> None:
        """As a worker begins to train: what the coordinator counts as its own, it has. Otherwise nobody trains on it. Of
        what it may train on while it asks, the rest returns a round later."""
        rounds = worker.rounds()
        if rounds is None or not rounds.training or self._seen.get(f"{worker.name}'s assignment") is rounds.assignment:
            return
        state = worker.held()
        if state is None or (state.round, 0, state.digests[0]) in self.dropped:
            return  # it has yet to be told that the round has opened anew, or it cannot be seen now whether it has been
        assignment, carry = rounds.assignment, rounds.carry
        before = self._seen.get(f"{worker.name}'s assignment")
        self._seen[f"{worker.name}'s assignment"] = assignment
        self.error_feedback.check_carried(worker, assignment.round, carry)
        query = "SELECT start, stop FROM unit_ranges WHERE worker = ? AND state = 'assigned' AND round <= ?"
        held = {u for row in self._all(query, worker.name, assignment.round) for u in range(row["start"], row["stop"])}
        known = [*assignment.units, *carry.units]
        if self.sync.wait == "never" and before is not None:
            known += before.units
        has = {unit for start, stop in known for unit in range(start, stop)}
        demand(held <= has, "I6", f"{worker.name} holds units {sorted(held - has)} and does not know of them")

    # --- around a restart -----------------------------------------------------------------------------------------

    def crashing(self) -> None:
        """What the process knows as it dies, where it is not in the middle of changing it."""
        self._before = _view(self.node.run) if self.node.up and self.node.run.lock.free() else None  # type: ignore[attr-defined]

    def restarted(self, run: LiveRun, *, directly: bool) -> None:
        """Everything that was acknowledged or published is still there, as it was; and so is what the old process knew,
        if no other one has led since."""
        self.close()
        self._check_events()
        rows = {
            (row["round"], row["fragment"], row["worker"]): row["digest"]
            for row in self._all("SELECT round, fragment, worker, digest FROM contributions")
        }
        for contribution in self.acknowledged:
            demand(contribution in rows, "I2", f"{contribution} was acknowledged, and is forgotten after a restart")
        published = {
            (row["round"], row["fragment"]): row["delta_digest"]
            for row in self._all("SELECT round, fragment, delta_digest FROM fragments WHERE delta_digest IS NOT NULL")
        }
        kept_from = min(map(round_of, self.node.names(NAMES.kind("deltas"))), default=0)
        for key, digest in self.deltas.items():
            demand(published.get(key) == digest, "I1", f"delta {key} changed in a restart")
            if key[0] >= kept_from:
                self._payload(NAMES.delta(*key, digest), "I1", digest)
        for key, kept in self.contributions.items():
            for worker, each in kept.items():
                demand(rows.get((*key, worker)) == each.digest, "I2", f"{key}, {worker} changed in a restart")
                if key not in self.deltas:
                    self._payload(NAMES.contribution(*key, worker, each.digest), "I2", each.digest)
        for row in self._all("SELECT round, fragment, digest, state_digest FROM checkpoint_fragments"):
            if (row["round"], row["fragment"]) in self.digests and (0, 0) in self.states:
                name = NAMES.checkpoint(row["round"], row["fragment"], row["digest"])
                payload = self._payload(name, "I4", row["digest"])
                demand(payload.header.kind == "state", "I4", "a checkpoint is no checkpoint after a restart")
        if self._before is not None and directly:
            after = _view(run)
            for what, before in self._before.items():
                demand(
                    _same(what, before, after[what]), "I4", f"{what} was {before} and is {after[what]} after a restart"
                )
        self._before = None
        self.node.dirty = True

    def finish(self) -> None:
        """At the end of the run."""
        for key in self.acknowledged:
            demand(key[:2] in self.deltas, "I2", f"{key} was acknowledged and is in no delta")

    # --- the database ---------------------------------------------------------------------------------------------

    def _all(self, query: str, *values: Any) -> list[sqlite3.Row]:
        if self._database is None or self._opened != self.node.data_dir:
            self.close()
            self._opened = self.node.data_dir
            self._database = sqlite3.connect(self._opened / sqlite.FILE)
            self._database.row_factory = sqlite3.Row
        return self._database.execute(query, values).fetchall()

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None


def _view(run: LiveRun) -> dict[str, Any]:
    """What a coordinator knows of its run, and must know again after a restart."""
    opening = run.open
    return {
        "state": run.state,
        "round": run.round,
        "model": run.model,
        "live workers": run.members.live(),
        "member tokens": dict(run.members.by_token_hash),
        "open round": None if opening is None else opening.number,
        "assigned": set() if opening is None else set(opening.assigned),
        "contributed": [] if opening is None else [dict(each.contributed) for each in opening.fragments],
        "fragments": [] if opening is None else [each.state for each in opening.fragments],
        "outer": list(run.outer.states),
    }


def _same(what: str, before: Any, after: Any) -> bool:
    """A restart may catch up with what was due, never fall back."""
    if what == "outer":
        return not before or all(then[0] < now[0] or then == now for then, now in zip(before, after, strict=True))
    if what in ("open round", "assigned") and not before:
        return True
    if what in ("contributed", "fragments"):
        return not before or len(before) == len(after)
    return bool(before == after)
