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
from concurrent.futures import Future
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import torch
from torch import Tensor, nn

from protocol.errors import OuterstepError
from protocol.messages import DataSummary, EvaluationReport, JoinRequest, RunDetail
from protocol.spec import RunSpec
from worker.accounts.progress import Progress
from worker.errors import ModelError, Stopped
from worker.link.client import Client, open_http
from worker.link.heartbeat import Heartbeat
from worker.link.membership import Membership
from worker.rounds.inner_steps import InnerSteps
from worker.rounds.rounds import Rounds
from worker.rounds.streaming import StreamedRounds
from worker.rounds.sync import Sync
from worker.state import snapshot
from worker.state.fragments import Fragments, tensor_specs
from worker.state.outer_state import OuterState
from worker.state.saver import Saver
from worker.state.state_dir import StateDir
from worker.state.work import Midway, Work

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
        self._progress = Progress(client.traffic, client.stages, clock)
        request = JoinRequest(tensors=tensor_specs(model), data=data, host=host or {})
        self._membership = Membership(client, name, request, self._files)
        self._steps = InnerSteps(run.spec)
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
        return self._rounds.assignment.round

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
        return self._rounds.finished or self._client.stop.is_set()

    def units(self) -> Iterator[int]:
        """The numbers of the work units to train on, one per inner step, until `finished`."""
        while not self.finished:
            assignment = self._rounds.assignment
            for unit in chain.from_iterable(range(start, stop) for start, stop in assignment.units):
                self._steps.begin_unit()
                yield unit
                if self.finished or self._rounds.assignment is not assignment:
                    break
            else:
                self._move_on(ends=True)  # fewer than H steps: some were skipped

    def report_loss(self, loss: Tensor) -> None:
        """Tell one inner step's mean loss (a scalar, nats per token) before `optimizer.step()`; it costs no device
        sync.

        Without it the coordinator shows a training loss of 0.
        """
        self._progress.report_loss(loss)

    # --- one round ------------------------------------------------------------------------------------------------

    def _after_inner_step(self, *_: Any) -> None:
        """The optimizer's hook: one inner step is done."""
        if self._rounds.finished:
            return
        self._steps.step()
        self._progress.step(self.inner_step)
        if self._client.stop.is_set():
            return  # on the way out, `__exit__` hands in what is done
        if self._heartbeat.failure is not None:
            raise self._heartbeat.failure
        run_ended = self._heartbeat.run_ended
        if self._rounds.lease_ended or run_ended.is_set():
            run_ended.clear()
            if not self._rounds.still_wanted():
                self._keep_state()
                return
        self._move_on(ends=self.inner_step >= self._rounds.assignment.inner_steps)

    def _move_on(self, *, ends: bool) -> None:
        """Do what is due: at the end of the round, exchange pseudo-gradients, take the outer step, begin the next."""
        try:
            if ends:
                self._rounds.end(self._save)
                self._keep_state()
            else:
                self._rounds.after_step()
        except Stopped:
            self._rounds.finished = True

    # --- snapshot and lifetime ------------------------------------------------------------------------------------

    def _keep_state(self) -> None:
        if self._rounds.training:
            self._saver.keep_state()

    def _save(self, work: Work | Midway, *, partial: bool = False) -> Future[None] | None:
        def optimizer() -> dict[str, Any]:
            taken: dict[str, Any] = self._optimizer.state_dict()
            if isinstance(work, Midway):  # the training goes on while it is written
                taken = snapshot.copied(taken, self._fragments.memory)
            return taken

        warmup_left = self._steps.warmup_left or 0
        return self._saver.save(work, partial=partial, optimizer=optimizer, warmup_left=warmup_left)

    def _resume(self) -> None:
        """Go on with the sync in which, or after which, the last process with this state directory ended."""
        taken = self._saver.load()
        if taken is None:
            for p in range(len(self._fragments)):
                self._state.set(p, self._fragments.gather(p), None)
            return
        self._rounds.maybe_state_0, self._steps.warmup_left = False, taken.warmup_left
        try:
            self._optimizer.load_state_dict(taken.inner_optimizer)
        except ValueError as error:
            raise ModelError(
                f"the inner optimizer is not the one of the snapshot in this state_dir: {error}"
            ) from error
        log.info("resuming with the work of round %d", taken.work.round)
        self._rounds.resume(taken.work, partial=taken.partial)

    def __enter__(self) -> Self:
        with ExitStack() as resources:
            if self._owned_http is not None:
                resources.callback(self._owned_http.close)
            if self._files is not None:
                resources.enter_context(self._files)
            reply = self._membership.join()
            resources.callback(self._leave)
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
            rounds = StreamedRounds if self.spec.sync.streams else Rounds
            self._rounds = rounds(
                self._client,
                self._membership,
                self.spec,
                self._fragments,
                self._state,
                self._sync,
                self._steps,
                self._progress,
                self._evaluate,
                self._heartbeat.beat_now,
            )
            resources.callback(self._rounds.close)
            owner = snapshot.identity(self._run, reply.layout, self.name)
            self._saver = resources.enter_context(Saver(self._files, owner, self._state, self._client.stages))
            try:
                self._resume()
                self._rounds.begin_first()
                self._keep_state()
            except Stopped:
                self._rounds.finished = True
            resources.callback(self._optimizer.register_step_post_hook(self._after_inner_step).remove)
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._resources:
            if kind is None:
                self._rounds.hand_in(self._save)

    def _leave(self) -> None:
        """Tell the coordinator, so that nobody waits for this worker and its units return to the pool."""
        self._progress.phase("leave")
        state = getattr(self, "_state", None)
        round_number = None if state is None else state.round
        state_digest = None if state is None or round_number is None else state.digest()
        try:
            report = self._progress.report(self._membership.epoch)
            self._membership.leave(round_number, state_digest, self._progress.metrics(), report)
        except (httpx.TransportError, OuterstepError) as error:
            log.warning("could not say goodbye (%s): the lease ends by itself", error)
