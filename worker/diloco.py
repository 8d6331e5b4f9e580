"""DiLoCo for any training loop: wrap a model and its inner optimizer, and train on.

    with DiLoCo.connect(model, optimizer, url=..., run=..., token=..., name=...) as diloco:
        for unit in diloco.units():
            loss = loss_of(model, batch_of(unit))
            loss.backward()
            diloco.report_loss(loss)
            optimizer.step()
            optimizer.zero_grad()

The inner steps are counted by a hook on the optimizer, so that a step which a GradScaler skips does not count; after
the H-th one the hook does the sync, and `step()` returns with the next round's parameters in the model. Source of the
algorithm: DiLoCo (arXiv 2311.08105), algorithm 1.
"""

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import torch
from torch import Tensor, nn

from protocol.errors import CodecError, OuterstepError, Problem
from protocol.messages import Action, Assignment, DataSummary, EvaluationReport, JoinRequest, RunDetail
from protocol.spec import RunSpec
from worker import recovery, seeding, snapshot
from worker.client import Client, open_http
from worker.errors import ModelError, Resync, RunEnded, Stopped, UnexpectedAnswer, WorkLost
from worker.fragments import Fragments, tensor_specs
from worker.heartbeat import Heartbeat
from worker.inner_steps import InnerSteps
from worker.membership import Membership
from worker.outer_state import OuterState
from worker.progress import Progress
from worker.snapshot import Snapshot
from worker.state_dir import StateDir
from worker.sync import Sync
from worker.work import Carry, UnitRanges, Work, count

_PAUSE_S = 0.2  # between long polls

log = logging.getLogger(__name__)


class DiLoCo:
    """One worker of a run. Use it as a context manager: entering joins the run and waits for work, leaving leaves it.

    `model` holds the initial parameters (they seed the run if this worker is its first) on the device that it trains
    on; afterwards its parameters belong to the run. `client.stop`, once set, ends everything within a few seconds.
    Leaving in the middle of a round, stopped or not, hands in the inner steps that were done, if a few seconds suffice.

    state_dir   where the snapshot is kept that lets a killed process go on; None: a restart begins like a new worker
    data        the training set, compared between workers; None where the script does not say
    evaluate    measures the held-out loss of the model as it is; called when the coordinator asks this worker to
    host        what the coordinator shows about this machine
    clock       monotonic seconds

    Raises protocol.errors.Problem where the coordinator refuses, StateDirBusy, ModelError, CodecError (the
    pseudo-gradient is not finite) and OSError (of the state directory); also from within `optimizer.step()`.
    """

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        *,
        client: Client,
        run: RunDetail,
        name: str,
        state_dir: Path | None = None,
        data: DataSummary | None = None,
        evaluate: Callable[[], EvaluationReport] | None = None,
        host: dict[str, str | int | float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec: RunSpec = run.spec
        self.name = name
        self._run = run
        self._model = model
        self._optimizer = inner_optimizer
        self._client = client
        self._files = StateDir(state_dir) if state_dir is not None else None
        self._evaluate = evaluate
        self._progress = Progress(client.traffic, clock)
        request = JoinRequest(tensors=tensor_specs(model), data=data, host=host or {})
        self._membership = Membership(client, name, request, self._files)
        self._assignment = Assignment(action=Action.WAIT, reason="not joined yet", round=0)
        self._carry = Carry()
        self._steps = InnerSteps(run.spec)
        self._training = False  # in the middle of a round's inner steps
        self._maybe_state_0 = True  # the model is as it was built: no other state has been loaded yet
        self._finished = False
        self._owned_http: httpx.Client | None = None

    @classmethod
    def connect(
        cls,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        *,
        url: str,
        run: str,
        token: str,
        name: str,
        **options: Any,
    ) -> Self:
        """A DiLoCo on the coordinator at `url`; `options` are those of DiLoCo itself."""
        http = open_http(url)
        try:
            client = Client(http, run, token)
            diloco = cls(model, inner_optimizer, client=client, run=client.run_detail(), name=name, **options)
        except BaseException:
            http.close()
            raise
        diloco._owned_http = http
        return diloco

    # --- what a training loop uses --------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """The round that is being trained."""
        return self._assignment.round

    @property
    def inner_step(self) -> int:
        """Inner steps done in this round."""
        return self._steps.done

    @property
    def global_step(self) -> int:
        """Inner steps of the run so far, for learning-rate schedules: round × H + inner_step.

        Where every worker has an H of its own (`sync.inner_steps = "auto"`), H is `sync.nominal_inner_steps` and
        `inner_step` is scaled to it, so that all workers are at the same place of the schedule at the same time.
        """
        return self._steps.global_step

    @property
    def warmup_scale(self) -> float:
        """Factor for the learning rate: below 1 during the first `inner.joiner_warmup_steps` inner steps of a worker
        that joined a run which was under way, because its inner optimizer starts cold."""
        return self._steps.warmup_scale

    @property
    def finished(self) -> bool:
        """Whether to stop training: the run is over, or this worker was asked to stop."""
        return self._finished or self._client.stop.is_set()

    def units(self) -> Iterator[int]:
        """The numbers of the work units to train on, one per inner step, until `finished`."""
        while not self.finished:
            assignment = self._assignment
            for unit in chain.from_iterable(range(start, stop) for start, stop in assignment.units):
                self._steps.begin_unit()
                yield unit
                if self.finished or self._assignment is not assignment:
                    break
            else:
                self._end_round()  # fewer than H steps: some were skipped

    def report_loss(self, loss: Tensor) -> None:
        """Tell one inner step's mean loss (a scalar, nats per token) before `optimizer.step()`; it costs no device
        sync.

        Without it the coordinator shows a training loss of 0.
        """
        self._progress.report_loss(loss)

    # --- one round ------------------------------------------------------------------------------------------------

    def _after_inner_step(self, *_: Any) -> None:
        """The optimizer's hook: one inner step is done."""
        if self._finished:
            return
        self._steps.step()
        self._progress.step(self.inner_step)
        if self._client.stop.is_set():
            return  # on the way out, `__exit__` hands in what is done
        if self._heartbeat.failure is not None:
            raise self._heartbeat.failure
        in_doubt = self._membership.epoch != self._epoch or self._heartbeat.run_ended.is_set()
        if in_doubt and not self._still_wanted():
            return
        if self.inner_step >= self._assignment.inner_steps:
            self._end_round()

    def _end_round(self) -> None:
        """The H inner steps are done: exchange pseudo-gradients, take the outer step, begin the next round."""
        try:
            # Where a GradScaler skipped every step, the units are spent all the same.
            work = self._collect(self._steps.units_used or self._assignment.units)
            if self.spec.sync.inner_steps == "auto":
                self._heartbeat.beat_now()  # the next round's H depends on how fast this one went
            self._synchronise(work, self._save(work))
            self._progress.end_round(work.round)
            self._next_round()
        except Stopped:
            self._finished = True

    def _collect(self, units: UnitRanges) -> Work:
        """The pseudo-gradients of the round so far, and what they were trained on."""
        steps, carry = self.inner_step, self._carry
        loss = self._progress.end_inner_steps(steps, steps * self.spec.unit_tokens) if steps else carry.loss
        deltas = []
        for p, theta in enumerate(self._state.theta):
            delta = self._fragments.pseudo_gradient(p, theta, carry.deltas.get(p)).cpu()
            if not self._state.is_sound(p):
                log.error("round %d: the memory of fragment %d's outer state has changed by itself", self.round, p)
                delta.zero_()  # nobody knows it any more; the coordinator will refuse it for its base, and tell of it
            deltas.append(delta)
        norms = [float(torch.linalg.vector_norm(delta)) for delta in deltas]
        if not torch.isfinite(torch.tensor([loss, *norms])).all():
            raise CodecError(
                f"round {self.round}: the training has diverged: loss {loss}, pseudo-gradient norms {norms}; "
                "nothing was sent; lower the learning rate or clip gradients, in a new run"
            )
        self._training = False
        weight = count(units) or carry.weight
        carried = [carry.rounds.get(p, []) for p in range(len(deltas))]
        return Work(self.round, carry.units + units, weight, carry.inner_steps + steps, loss, norms, deltas, carried)

    def _synchronise(self, work: Work, saved: Future[None] | None) -> None:
        """Contribute, and step the outer state by what everybody contributed."""
        self._progress.phase("sync")
        self._carry = Carry()
        try:
            try:
                self._carry = self._sync.run(work, saved)
            except WorkLost:
                # The lease had ended and the units went back to the pool. If nobody took them, they are ours again.
                if not self._is_ours(self._ask(), work.round, work.units):
                    raise
                self._carry = self._sync.run(work, saved)
        except (Resync, WorkLost) as error:
            log.warning("round %d: %s; this round's work is dropped", work.round, error)
            if isinstance(error, Resync):
                self._state.round = None
            self._membership.start_over()
            return
        except RunEnded as error:
            log.info("%s", error)
            return
        if self._carry.deltas:
            log.warning("round %d closed without some of this worker's work: it goes into the next", work.round)

    @staticmethod
    def _is_ours(asked: Assignment, round_number: int, units: UnitRanges) -> bool:
        return asked.action is Action.TRAIN and asked.round == round_number and asked.units == units

    # --- between rounds -------------------------------------------------------------------------------------------

    def _first_round(self) -> None:
        """As `_next_round`, and what the last process left behind goes back to where it came from."""
        asked, resumed = self._ask(), self._state.round is not None
        if resumed and asked.action is Action.RECOVER and not self._carry.units:
            # Rounds went by without this worker: the units that its last process had for them return to the pool.
            self._membership.start_over()
        if not self._follow(asked):
            self._next_round()

    def _next_round(self) -> None:
        """Do what the coordinator says until there are units to train on, or the run is over."""
        while not self._follow(self._ask()):
            pass

    def _ask(self) -> Assignment:
        self._epoch = self._membership.epoch
        state_round, carried = self._state.round, self._carry.units
        return self._membership.act(lambda token: self._client.assignment(token, self.name, state_round, carried))

    def _follow(self, assignment: Assignment) -> bool:
        """Whether training can go on, or is over; otherwise ask again."""
        match assignment.action:
            case Action.SEED:
                self._progress.phase("seed")
                self._seed()
            case Action.RECOVER:
                self._progress.phase("recover")
                held = 0 if self._maybe_state_0 else self._state.round
                self._maybe_state_0 = False
                recovery.recover(self._client, self.spec, self._state, assignment.round, held=held)
            case Action.WAIT:
                self._progress.phase("wait")
                if assignment.reason != self._assignment.reason:
                    log.info("waiting: %s", assignment.reason)
                self._assignment = assignment
                self._client.pause(_PAUSE_S)
            case Action.TRAIN | Action.FINISH:
                self._begin(assignment)
                return True
        return False

    def _begin(self, assignment: Assignment) -> None:
        """Start from the global parameters, and from what of our own progress is not in them yet."""
        self._assignment, self._training = assignment, False
        if assignment.action is Action.FINISH:
            log.info("done: %s", assignment.reason)
            self._finished, self._carry = True, Carry()
            if assignment.round != self._state.round:  # told to leave before this worker had the run's state
                return
        self._steps.begin(assignment)
        if assignment.round != self._state.round:
            raise UnexpectedAnswer(f"asked to train on state {assignment.round} while holding {self._state.round}")
        for p in range(len(self._fragments)):
            self._fragments.rebase(p, self._state.theta[p], None)
        if assignment.evaluate and self._evaluate is not None:
            self._progress.phase("evaluate")
            report = self._evaluate()
            log.info("state %d: held-out loss %.4f", assignment.round, report.loss)
            self._membership.act(lambda token: self._client.report_evaluation(token, assignment.round, report))
        for p, delta in self._carry.deltas.items():
            self._fragments.rebase(p, self._state.theta[p], delta)
        if assignment.action is Action.TRAIN:
            self._training = True
            self._progress.begin_round(assignment.round)

    def _still_wanted(self) -> bool:
        """The lease ended in the middle of a round, or the coordinator says stop: is this round's work still wanted?

        Where it is not, it is dropped and the next round begins, if there is one.
        """
        self._heartbeat.run_ended.clear()
        trained = self._assignment
        try:
            asked = self._ask()
            if self._is_ours(asked, trained.round, trained.units):
                return True
            log.warning("the work on round %d is dropped: %s", trained.round, asked.reason)
            self._carry, self._training = Carry(), False
            if not self._follow(asked):
                self._next_round()
        except Stopped:
            self._finished = True
        return False

    def _seed(self) -> None:
        self._maybe_state_0 = False
        try:
            seeding.seed(self._client, self._membership, self.spec, self._fragments, self._state)
        except Problem as problem:
            if problem.slug != "state-conflict":
                raise
            log.warning("%s", problem.detail)  # another worker was asked to in the meantime
            self._maybe_state_0 = True
            self._client.pause(_PAUSE_S)

    # --- snapshot and lifetime ------------------------------------------------------------------------------------

    def _save(self, work: Work, *, partial: bool = False) -> Future[None] | None:
        if self._files is None:
            return None
        state, optimizer = self._state, self._optimizer.state_dict()
        warmup_left = self._steps.warmup_left or 0
        taken = Snapshot(state.theta, state.momentum, state.digests, work, partial, optimizer, warmup_left)
        return self._saver.submit(snapshot.save, self._files, self._owner, taken)

    def _hand_in(self) -> None:
        """Leaving in the middle of a round: contribute the inner steps that were done. The other units return to the
        pool as the worker leaves."""
        units = self._steps.units_used
        if not self._training or not (units or self._carry.units):
            return
        work = self._collect(units)
        self._save(work, partial=True)  # for a fragment that does not get through
        self._sync.hand_in(work)

    def _resume(self) -> None:
        """Go on with the sync in which, or after which, the last process with this state directory ended."""
        taken = snapshot.load(self._files, self._owner) if self._files is not None else None
        if taken is None or not snapshot.restore(self._state, taken):
            for p in range(len(self._fragments)):
                self._state.set(p, self._fragments.gather(p), None)
            return
        self._maybe_state_0, self._steps.warmup_left = False, taken.warmup_left
        try:
            self._optimizer.load_state_dict(taken.inner_optimizer)
        except ValueError as error:
            raise ModelError(
                f"the inner optimizer is not the one of the snapshot in this state_dir: {error}"
            ) from error
        log.info("resuming with the work of round %d", taken.work.round)
        self._synchronise(taken.work, None)
        if taken.partial and not self._carry.units:
            self._membership.start_over()  # the units that were left may still be ours, if nobody could be told

    def __enter__(self) -> Self:
        with ExitStack() as resources:
            if self._owned_http is not None:
                resources.callback(self._owned_http.close)
            if self._files is not None:
                resources.enter_context(self._files)
            reply = self._membership.join()
            resources.callback(self._leave)
            self._owner = snapshot.identity(self._run, reply.layout, self.name)
            self._fragments = Fragments(self._model, reply.layout)
            on_cuda = self._fragments.device.type == "cuda"
            self._state = OuterState(reply.layout, self.spec.outer, pin_memory=on_cuda)
            metrics = self._progress.metrics
            self._heartbeat = Heartbeat(self._client, self._membership, reply.lease_s, metrics)
            resources.enter_context(self._heartbeat)
            # Metal does not promise IEEE division, which the codecs' bytes depend on; CUDA and CPUs do.
            encoder = self._fragments.device if on_cuda else torch.device("cpu")
            run_ended = self._heartbeat.run_ended
            self._sync = Sync(self._client, self._membership, self.spec, self._state, encoder, run_ended)
            self._saver = resources.enter_context(ThreadPoolExecutor(1, "snapshot"))
            try:
                self._resume()
                self._first_round()
            except Stopped:
                self._finished = True
            resources.callback(self._optimizer.register_step_post_hook(self._after_inner_step).remove)
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._resources:
            if kind is None:
                self._hand_in()

    def _leave(self) -> None:
        """Tell the coordinator, so that nobody waits for this worker and its units return to the pool."""
        self._progress.phase("leave")
        state = getattr(self, "_state", None)
        round_number = None if state is None else state.round
        state_digest = None if state is None or round_number is None else state.digest()
        try:
            self._membership.leave(round_number, state_digest, self._progress.metrics())
        except (httpx.TransportError, OuterstepError) as error:
            log.warning("could not say goodbye (%s): the lease ends by itself", error)
