"""DiLoCo for any training loop: wrap a model and its inner optimizer, and train on.

    with DiLoCo.connect(model, optimizer, run="my-run") as diloco:
        for unit in diloco.units():
            loss = loss_of(model, batch_of(unit))
            loss.backward()
            diloco.report_loss(loss)
            optimizer.step()
            optimizer.zero_grad()

The inner steps are counted by a hook on the optimizer, so that a step which a GradScaler skips does not count (its unit
is spent all the same: inner_steps.py); after the H-th one the hook does the sync, and `step()` returns with the next
round's parameters in the model. Where several optimizers step one after the other for one inner step, the last one's
step ends it. Source of the algorithm: DiLoCo (arXiv 2311.08105), algorithm 1.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

import httpx
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from outerstep.common import tracing
from protocol.digest import model_digest
from protocol.errors import OuterstepError
from protocol.messages import DataSummary, EvaluationReport, HostDetail, HostValue, JoinRequest, Metrics, RunDetail
from protocol.spec.run import RunSpec
from protocol.spec.sections import PrivacySpec
from worker.accounts.machine import DeviceUse, host_facts, told_facts, told_metrics
from worker.accounts.progress import Progress
from worker.accounts.stages import RoundTrace
from worker.allowing import permit_data
from worker.data.opening import open_training_set
from worker.data.training_set import TrainingSet
from worker.errors import Stopped
from worker.link.client import Client, open_http
from worker.link.membership import Heartbeat, Membership, SharedMembership
from worker.link.own_token import with_own_token
from worker.privacy.mechanism import Protection, Spent
from worker.process import stop_on_signals, told_on_stderr
from worker.ranks import LOST, Ranks, is_of_a_lost_rank
from worker.rounds.exchange import Exchange
from worker.rounds.rounds import Rounds
from worker.rounds.training import InnerSteps, Training, round_seed
from worker.script.loader import UnitSampler, unit_batches
from worker.script.optimizers import FirstUnits, InUse, RunSchedules, reported_by, usable_optimizers
from worker.settings import membership_of
from worker.state.fragments import Fragments
from worker.state.optimizer_state import OwnPoints
from worker.state.outer_state import OuterState
from worker.state.parameters import frozen_summary, own_buffers, tensor_specs
from worker.state.saver import Saver
from worker.state.snapshot import identity
from worker.state.state_dir import StateDir, rank_directory
from worker.state.work import count, first_units, numbers
from worker.state.writes import Weights, Writes, lent

log = logging.getLogger(__name__)

# The hooks that refuse a step before the run is joined: one for each optimizer, of the latest DiLoCo that it was given.
_unjoined: WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle] = WeakKeyDictionary()


@dataclass(frozen=True)
class Joined:
    """The parts of a worker that exist only once it has joined the run."""

    state: OuterState
    heartbeat: Heartbeat
    rounds: Rounds


class DiLoCo:
    """One worker of a run. Use it as a context manager: entering joins the run and waits for work, leaving leaves it.

    `model` holds the initial parameters (they seed the run if this worker is its first) on the device that it trains
    on; afterwards its parameters belong to the run, and once that is over they are what an export of it has.
    `client.stop`, once set, ends everything within a few seconds.
    Leaving in the middle of a round, stopped or not, hands in the inner steps that were done, if a few seconds suffice.
    `inner_optimizer` is one optimizer, or several in the order in which they step.

    state_dir   where the snapshot is kept that lets a killed process go on; None: a restart begins like a new worker
    data        the training set, compared between workers (`training_set()` fills it in); None if the script does not
                say. Of private data length and tokenizer alone leave this machine
    evaluate    measures the held-out loss of the model as it is, and returns an outerstep.EvaluationReport; called when
                the coordinator asks this worker to
    initial     puts state 0 into the model, called if this worker is to seed the run; None: the model holds it
    scheduler   the loop's LRScheduler, or several: brought to the run's step before each inner step, wherever in the
                run this worker joins or goes on; where the loop steps it as well, that changes nothing
    scaler      the loop's GradScaler, whose scale goes into the snapshot. That is taken within the optimizer's step,
                so it has to be updated before; where the loop steps through it (`scaler.step`), give None
    host        what the coordinator shows about this machine; None: what can be found out about it
    tell        how much of that it is told: all, some (what the arithmetic depends on), or nothing; docs/settings.md
    ranks       the processes that train the model together, as one worker; None: those of torch.distributed's default
                group, in each of which a DiLoCo is made
    use         the model's FLOPs and the device's peak, for the MFU; None: memory alone is told
    clock       monotonic seconds

    Raises protocol.errors.Problem if the coordinator refuses, StateDirBusy, ModelError, CodecError (the
    pseudo-gradient is not finite) and OSError (of the state directory); also from within `optimizer.step()`, and from
    there RuntimeError, if the optimizers step in another order than they were given in, or after the run is over, and
    Stopped, in a loop that goes on where `finished` says that this worker was asked to stop. What cannot be trained
    with is refused before the run is joined: TypeError, ValueError, ModelError (script/optimizers.py).
    """

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        client: Client,
        run: RunDetail,
        name: str,
        state_dir: Path | None = None,
        data: DataSummary | None = None,
        evaluate: Callable[[], EvaluationReport] | None = None,
        initial: Callable[[], None] | None = None,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        host: dict[str, HostValue] | None = None,
        tell: HostDetail = "all",
        use: DeviceUse | None = None,
        ranks: Ranks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec: RunSpec = run.spec
        self.ranks = ranks = ranks or Ranks.here()
        self.name = name = ranks.by_first(lambda: name)
        self.model = model
        self.client = client
        self._run = run
        self._optimizers = usable_optimizers(model, inner_optimizer)
        self._schedules = RunSchedules(scheduler, self._optimizers, run.spec.total_inner_steps)
        if evaluate is not None and not callable(evaluate):
            raise TypeError(f"evaluate is of type {type(evaluate).__name__}: give a function without parameters")
        self._files = StateDir(rank_directory(state_dir, ranks.rank)) if state_dir is not None else None
        self._evaluate = None if evaluate is None else partial(reported_by, evaluate)
        self._initial, self._scaler = initial, scaler
        if data is not None and run.spec.data.private:
            data = data.model_copy(update={"digest": None})
        tensors, device = tensor_specs(model), next(model.parameters()).device
        facts = (host_facts(device) if host is None else host) | ({"processes": ranks.size} if ranks.size > 1 else {})
        self._tell: HostDetail = tell
        request = JoinRequest(tensors=tensors, data=data, frozen=frozen_summary(model), host=told_facts(facts, tell))
        self._writes = Writes(model, self._optimizers)
        use = use or DeviceUse(device)
        self._resources = ExitStack()
        if tracing.start("outerstep-worker"):
            trace = RoundTrace(run.name, run.created_at, name, ranks.rank if ranks.size > 1 else None)
            client.trace(trace)
            self._resources.callback(trace.end)
        self._progress = Progress(client.traffic, client.stages, clock, use, ranks, rounds=run.spec.sync.rounds)
        self._membership = (
            SharedMembership(client, name, request, self._files, ranks)
            if ranks.size > 1
            else Membership(client, name, request, self._files)
        )
        self._digests: list[bytes] | None = None  # of all fragments, as this worker leaves
        self._steps = InnerSteps(run.spec)
        self._has_entered = self._warms_up = False
        self._joined: Joined | None = None
        self._protection: Protection | None = None
        self._process = os.getpid()
        self._ended_by_stop = False  # the last inner step is done
        self._surroundings: list[AbstractContextManager[None]] = []
        self._let_steps_be_refused()

    @classmethod
    def connect(
        cls,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        run: str,
        url: str | None = None,
        token: str | None = None,
        name: str | None = None,
        max_up: str | None = None,
        max_down: str | None = None,
        **options: Any,
    ) -> Self:
        """Return a DiLoCo on the coordinator at `url`; `options` are those of DiLoCo itself. `max_up` and `max_down`
        are what transfers may take of the line, such as "8mbit", all processes together; None: all of it.

        What is left out is as `outerstep worker` has it: `url` and `token` are of the environment, OUTERSTEP_URL and
        OUTERSTEP_TOKEN, `name` is this machine's, `state_dir` ~/.local/state/outerstep/RUN/NAME. OUTERSTEP_CA names a
        file of certificates to trust beside the usual ones. Within `with`, SIGTERM and Ctrl-C set `stopped`: units()
        ends, and leaving hands in what is done. Where the script has set up no logging, what the worker does and waits
        for is told on stderr. Raises ValueError for what is missing or wrong, and NoCoordinator for an address where
        none is, or none that is trusted.
        """
        ranks: Ranks = options.get("ranks") or Ranks.here()
        level = logging.INFO if ranks.is_first else logging.WARNING
        tell = options.get("tell", "all")
        name = ranks.by_first(lambda: membership_of(run, url, token, name, tell=tell).name)
        who = membership_of(run, url, token, name, max_up=max_up, max_down=max_down)
        options = {"state_dir": who.directory} | options | {"ranks": ranks}
        http = open_http(who.url, who.ca)
        try:
            with told_on_stderr(level):
                up, down = who.rates(ranks.size)
                client = Client(http, run, who.token, max_up=up, max_down=down)
                client = with_own_token(client, who.name, options["state_dir"], ranks)
                diloco = cls(model, inner_optimizer, client=client, run=client.run_detail(), name=who.name, **options)
        except BaseException:
            http.close()
            raise
        diloco._resources.callback(http.close)
        diloco._surroundings = [told_on_stderr(level), stop_on_signals(client.stop)]
        return diloco

    # --- what a training loop uses --------------------------------------------------------------------------------

    @property
    def has_joined(self) -> bool:
        """True once the worker has joined the run."""
        return self._joined is not None

    @property
    def joined(self) -> Joined:
        """The parts that exist once the run is joined. Raises RuntimeError before that."""
        if self._joined is None:
            raise RuntimeError("DiLoCo is a context manager: train within `with DiLoCo.connect(...) as diloco:`")
        if os.getpid() != self._process:
            raise RuntimeError(
                f"process {self._process} joined the run, and this is another one, such as a DataLoader's worker: take "
                "units() in the training loop's process, and hand their numbers to the loader"
            )
        return self._joined

    @property
    def round(self) -> int:
        """The round that is being trained."""
        return self.joined.rounds.assignment.round

    @property
    def inner_step(self) -> int:
        """Inner steps done in this round."""
        return self._steps.done

    @property
    def global_step(self) -> int:
        """Inner steps of the run so far, for learning-rate schedules: round × H + inner_step; of a round that all
        workers handed in early, as they were stopped, those that were trained.

        If every worker has an H of its own (`sync.inner_steps = "auto"`), H is `sync.nominal_inner_steps` and
        `inner_step` is scaled to it, so that all workers are at the same place of the schedule at the same time.
        """
        return self._steps.global_step

    @property
    def warmup_scale(self) -> float:
        """Factor for the learning rate: below 1 during the first `inner.joiner_warmup_steps` inner steps of a worker
        that joined a run which was under way, because its inner optimizer starts cold."""
        self._warms_up = True
        return self._steps.warmup_scale

    @property
    def data_seed(self) -> int:
        """A seed below 2^63 that no other worker (or process of this one) and no other round has, and a resumed round
        has again.

        For a loop that draws its own batches, without units(): seeded alike everywhere, all workers would train on the
        same data, and nobody could tell.
        """
        return round_seed(self.spec.seed, self.name, self.round, self.ranks.rank)

    @property
    def finished(self) -> bool:
        """True if training is to stop: the run is over, or this worker was asked to stop."""
        return self.joined.rounds.finished or self.stopped

    @property
    def stopped(self) -> bool:
        """True once this worker was asked to stop, by a signal for example, whether or not the run goes on. If it has
        several processes, all of them learn of it at the same inner step."""
        if self.ranks.size > 1 and not self.joined.rounds.finished:
            return self._ended_by_stop
        return self.client.stop.is_set()

    def units(self) -> Iterator[int]:
        """Yield the numbers of the work units to train on, one per inner step, until `finished`. With private data they
        are numbers within this worker's own training set.

        Asking for the next unit ends the previous one: if its step was skipped, as a GradScaler does, it is spent all
        the same, and the round has an inner step less. If the loop breaks out before a unit's step, that unit returns
        to the pool. So a loader that loads ahead takes them from `unit_sampler`; here it is told, by RuntimeError.
        """
        rounds, first = self.joined.rounds, FirstUnits(self.model)
        while not self.finished:
            assignment = rounds.assignment
            due = first_units(assignment.units, assignment.inner_steps)
            for unit in numbers(due):
                self._steps.begin_unit()
                yield self.spec.number_in_set(unit)
                first.end(stepped=self._steps.unit_stepped)
                if not self._steps.unit_stepped:
                    self._writes.look()
                    self._progress.skip()
                self._steps.end_unit()
                if self.finished or rounds.assignment is not assignment:
                    break
            else:
                log.warning(
                    "round %d: %d inner steps on %d units; each unit is for a step of its own, so where several "
                    "batches make a step, divide the unit",
                    self.round,
                    self.inner_step,
                    count(due),
                )
                rounds.advance(ended=True, news=any(self.ranks.flags(rounds.has_news)))
                self._writes.note()

    def upcoming(self) -> Iterator[int]:
        """Yield the numbers of the units that follow the one in hand, in order, as far as they are known: for a loader
        that makes batches ahead of need.

        They are those that are left of this round, and the next round's once its assignment is there, which with
        `sync.overlap` is before this round ends. They are no promise: a round that is dropped, or a worker that is
        asked to stop, leaves them to others. Call it from the thread of the training loop, as often as is useful.
        """
        ranges = [] if self.finished else self.joined.rounds.units_to_come
        return map(self.spec.number_in_set, numbers(ranges))

    def training_set(self, source: str | None = None, *, data_root: Sequence[str] = ()) -> TrainingSet:
        """Return the run's own training set, of `data` in its spec, so that this loop can share the run with `outerstep
        worker`: `training_set().unit(number)` is int64[batch_size, sequence_length + 1] for each number of units(). Of
        several processes each takes its own rows, `[rank::size]`.

        Call it before `with`: the coordinator compares the set between workers as they join. `source` is where this
        machine has the data, if elsewhere than the spec says; `data_root` are the directories and addresses that the
        spec may name, as `outerstep worker --data-root` has them. Raises RuntimeError once joined, ValueError for a run
        whose scripts bring their data, NotAllowed, and DataError.
        """
        if self._has_entered:
            raise RuntimeError("call training_set() before `with`: the training set is compared as the run is joined")
        if self.spec.data.source == "custom" and source is None:
            raise ValueError(
                f'the run {self.spec.name} has data.source = "custom": its scripts bring their data, in the order of '
                "unit_sampler() or batches()"
            )
        spec = self.spec.with_source(source)
        permit_data(spec, tuple(data_root), own_source=source is not None)
        data = open_training_set(spec, stop=self.client.stop)
        self._resources.callback(data.close)
        summary = data.summary
        self._membership.describe(summary.model_copy(update={"digest": None}) if spec.data.private else summary)
        return data

    def unit_sampler(self, dataset: Sized, micro_batch: int | None = None) -> UnitSampler:
        """Return a `batch_sampler` for a DataLoader over `dataset`, in place of units(): a loader loads ahead.

        One pass of the loader is a round, so the loop around it is `while not diloco.finished`. A row of the data set
        is a sequence, and a unit `inner.batch_size` of them, in equal parts for the processes of this worker.
        `micro_batch` is the rows of one of the loader's batches, where several make an inner step. Raises ValueError
        for a size that does not suit, and Problem `data-mismatch` if the data set of another worker has another length,
        once both have joined.
        """
        rows = len(dataset)
        sampler = UnitSampler(self.spec, rows, micro_batch, self._steps, lambda: self.finished, self.ranks)
        if not self.spec.data.private and self.ranks.rank == 0:  # the same unit is of the same rows on all workers
            self._membership.has_rows(rows, joined=self.has_joined)
        return sampler

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield batches of a DataLoader until `finished`, of as many rows as it makes them, in place of a loop over its
        epochs: it loads ahead, and in its own way, but in the order of the run, as `unit_sampler` has it.

        A loader that accelerate has prepared is given as it is. Raises TypeError for a data set without rows by number,
        ValueError for a loader with an order of its own, and for a batch size that does not suit.
        """
        return unit_batches(loader, self.unit_sampler, lambda: self.finished)

    def report_loss(self, loss: Tensor) -> None:
        """Report one inner step's mean loss (a scalar, nats per token) before `optimizer.step()`, without waiting for
        the device.

        Without it nobody knows the training loss. Raises ModelError where the parameters change from report to report
        without a step of the run's optimizer.
        """
        self._writes.look_between()
        self._progress.report_loss(loss)

    @contextmanager
    def weights(self, given: Weights) -> Iterator[None]:
        """Have the model hold other values within the `with` block, to evaluate or save an average of the weights; at
        its end it holds its own again, bit for bit. It must not be trained within.

        `given` is a module of the same parameters, torch's AveragedModel for one, whose buffers are taken as well; a
        mapping of names to tensors, as of its state_dict(); or the tensors of the trainable parameters, in order.
        Raises ValueError where they do not suit.
        """
        with lent(self.model, given):
            around, self._writes.borrowed = self._writes.borrowed, True
            try:
                yield
            finally:
                self._writes.borrowed = around

    # --- lifetime -------------------------------------------------------------------------------------------------

    def _let_steps_be_refused(self) -> None:
        self._let_steps_be()
        for each in self._optimizers:
            _unjoined[each] = each.register_step_pre_hook(_refuse_to_train_alone)

    def _let_steps_be(self) -> None:
        for each in self._optimizers:
            if (hook := _unjoined.pop(each, None)) is not None:
                hook.remove()

    def __enter__(self) -> Self:
        if self._has_entered:
            raise RuntimeError(
                "this DiLoCo has joined the run before: make another one by DiLoCo.connect(), which goes on from the "
                "state directory"
            )
        self._has_entered = True
        self._let_steps_be()
        with self._resources as resources:
            resources.enter_context(InUse(self._optimizers))
            for surrounding in self._surroundings:
                resources.enter_context(surrounding)
            if self._files is not None:
                resources.enter_context(self._files)
            if (buffers := own_buffers(self.model)) and self.ranks.is_first:
                log.warning(
                    "%d buffers, such as %s, stay this worker's own: they are not averaged, and no export has them",
                    *(len(buffers), buffers[0]),
                )
            self._joined = joined = self._join(resources)
            joined.rounds.begin()
            self._writes.note()
            if not self.finished:
                self._schedules.set(self.global_step)
            *others, last = self._optimizers
            for each in self._optimizers:
                resources.callback(each.register_step_pre_hook(self._before_any).remove)
                resources.callback(each.register_step_post_hook(self._after_any).remove)
            resources.callback(last.register_step_pre_hook(self._before_another).remove)
            for each in others:
                resources.callback(each.register_step_pre_hook(self._before_the_last).remove)
            resources.callback(last.register_step_post_hook(self._after_inner_step).remove)
            resources.callback(register_optimizer_step_pre_hook(self._writes.before_other).remove)
            resources.callback(register_optimizer_step_post_hook(self._writes.after_other).remove)
            self._resources = resources.pop_all()
        return self

    def _join(self, resources: ExitStack) -> Joined:
        client, spec, membership = self.client, self.spec, self._membership
        reply = membership.join()
        resources.callback(self._leave)
        points = OwnPoints(self._optimizers)
        fragments = Fragments(self.model, reply.layout, self.ranks, points)
        on_cuda = fragments.device.type == "cuda"
        owner = identity(self._run, reply.layout, self.name)
        if spec.privacy is not None:
            spent = Spent(self._files, owner, reply.layout.total_elements)
            self._protection = Protection(spec.privacy, reply.layout.elements, spent, self.ranks)
            self._say_protected(spec.privacy, self._protection)
        state = OuterState(reply.layout, spec.outer, pin_memory=on_cuda, owns=fragments.owns)
        heartbeat = Heartbeat(membership, reply.lease_s, self._told_metrics)
        if self.ranks.is_first:  # the others' learns nothing
            resources.enter_context(heartbeat)
        # Metal does not promise IEEE division, which the codecs' bytes depend on; CUDA and CPUs do.
        encoder = fragments.device if on_cuda else torch.device("cpu")
        exchange = Exchange(membership, spec, state, encoder)
        training = Training(
            fragments,
            self._optimizers,
            self._steps,
            self._progress,
            self._evaluate if spec.privacy is None else None,  # it would be told without noise
            self._initial,
            self._scaler,
            self._writes,
            self.ranks,
            points,
            self._protection,
        )
        saver = resources.enter_context(Saver(self._files, owner, state, client.stages, self.ranks))
        rounds = Rounds(exchange, training, saver, heartbeat)
        resources.callback(rounds.close)
        return Joined(state, heartbeat, rounds)

    def _before_any(self, *_: Any) -> None:
        """Have a step be at the run's learning rate, and refuse one that no round would have or that others' writes
        came before, as the hook of all optimizers."""
        if self.joined.rounds.finished:
            raise RuntimeError(
                "the run is over for this worker, so that a step would only change the model: leave the training loop "
                "once `diloco.finished`, which the end of units() does by itself"
            )
        if self._ended_by_stop:
            raise Stopped("asked to stop: leave the training loop once `diloco.finished`")
        self._writes.before_step()
        self._schedules.warn_of_others()
        self._schedules.set(self.global_step)

    def _before_the_last(self, *_: Any) -> None:
        """Refuse a step that is late, as the hook of all optimizers but the last: the sync would come before it."""
        if self._steps.unit_stepped:
            raise RuntimeError(
                "an inner optimizer steps after the last one of the sequence that DiLoCo was given, which ends the "
                "inner step: let them step in that order, each once per unit"
            )

    def _before_another(self, *_: Any) -> None:
        """Refuse a second step for one unit, as the hook of the last optimizer: it would count as another unit's."""
        if self._steps.unit_stepped:
            raise RuntimeError(
                "the optimizer steps a second time for one unit of units(): each unit is for one inner step, and those "
                "that were not trained on would count as trained. Accumulate the gradients of a unit's batches for one "
                "step, or take no units and draw batches by diloco.data_seed: then every step is one"
            )

    def _after_any(self, *_: Any) -> None:
        """Note what a step has written, as the hook of all optimizers."""
        self._writes.after_step()

    def _after_inner_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Count one inner step, as the hook of the last optimizer."""
        rounds, heartbeat = self.joined.rounds, self.joined.heartbeat
        # A GradScaler has a fused optimizer skip within its kernel, so that its step is called all the same.
        skipped = getattr(optimizer, "found_inf", None)
        if rounds.finished:
            return
        if skipped is not None and bool(skipped):
            self._progress.skip()
            return
        if self._steps.warmup_scale < 1 and not self._warms_up and self.ranks.is_first:
            self._warms_up = True  # once
            log.warning(
                "this worker joined a run under way with a cold inner optimizer, and inner.joiner_warmup_steps = %d "
                "has no effect on this loop: multiply its learning rate by diloco.warmup_scale",
                self.spec.inner.joiner_warmup_steps,
            )
        self._steps.step()
        self._progress.step(self.inner_step, optimizer.param_groups[0].get("lr"))
        stopped, has_failed = self.client.stop.is_set(), heartbeat.failure is not None
        stop, failed, news = self.ranks.flags(stopped, has_failed, rounds.has_news)
        if stop:
            self.client.stop.set()
            self._ended_by_stop = True
            return  # on the way out, `__exit__` hands in what is done
        if failed:
            self.ranks.by_first(heartbeat.raise_failure)
        rounds.advance(ended=self.inner_step >= rounds.assignment.inner_steps, news=news)
        self._writes.note_sync()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._resources:
            if self.ranks.size > 1 and is_of_a_lost_rank(error):  # from the model's own collectives
                log.error("%s", LOST)
            if kind is None or (issubclass(kind, Stopped) and (self.ranks.size == 1 or self._ended_by_stop)):
                self.joined.rounds.hand_in()
                self._digests = self._all_digests()

    def _say_protected(self, privacy: PrivacySpec, protection: Protection) -> None:
        log.info(
            "the run is private: contributions are clipped to a norm of %g, and leave with Gaussian noise of %g on "
            "each value; losses are not told; %g contributions have left this worker so far",
            *(privacy.clip_norm, privacy.noise, protection.contributions),
        )
        if not self.spec.data.private:
            log.warning("data.private is false: the text is the same for all workers, so the noise protects little")

    def _told_metrics(self) -> Metrics:
        metrics = told_metrics(self._progress.metrics(), self._tell)
        protection = self._protection
        if protection is None:
            return metrics
        return metrics.model_copy(update={"loss": None, "private_contributions": protection.contributions})

    def _all_digests(self) -> list[bytes] | None:
        """Return the state digests of all fragments; None where there is no outer state."""
        state = self.joined.state
        digests = self.ranks.all(None if state.round is None else dict(zip(state.own, state.digests, strict=True)))
        known = {p: each for own in digests if own is not None for p, each in own.items()}
        return [known[p] for p in range(len(state))] if None not in digests else None

    def _leave(self) -> None:
        """Leave the run, so that nobody waits for this worker and its units return to the pool."""
        self._progress.phase("leave")
        if not self.ranks.is_first:
            return
        state = None if self._joined is None else self._joined.state
        if state is not None and self.ranks.size == 1:
            self._digests = self._all_digests()
        round_number = None if state is None or self._digests is None else state.round
        state_digest = None if self._digests is None or round_number is None else model_digest(self._digests)
        try:
            report = self._progress.report(self._membership.epoch)
            self._membership.leave(round_number, state_digest, self._told_metrics(), report)
        except (httpx.TransportError, OuterstepError) as error:
            log.warning("could not say goodbye (%s): the lease ends by itself", error)


def _refuse_to_train_alone(*_: Any) -> None:
    raise RuntimeError(
        "the optimizer steps, and the run was not joined: DiLoCo is a context manager, so train within "
        "`with DiLoCo.connect(...) as diloco:`; to train alone first, do that before DiLoCo is made"
    )
