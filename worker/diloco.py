"""DiLoCo for any training loop: wrap a model and its inner optimizer, and train on.

    with DiLoCo.connect(model, optimizer, run="my-run") as diloco:
        for unit in diloco.units():
            loss = loss_of(model, batch_of(unit))
            loss.backward()
            diloco.report_loss(loss)
            optimizer.step()
            optimizer.zero_grad()

A hook on the optimizer counts the inner steps, so a step that a GradScaler skips does not count (its unit is used, see
rounds/training.py). After the H-th step, the hook does the sync, and `step()` returns with the next round's parameters
in the model. If several optimizers step one after the other, the last one's step ends the inner step. The algorithm is
explained in worker/rounds/__init__.py.
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

import httpx
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from outerstep.common.quantities import bytes_text
from protocol.digest import model_digest
from protocol.errors import OuterstepError
from protocol.messages import (
    DataSummary,
    EvaluationReport,
    FrozenSummary,
    HostDetail,
    HostValue,
    JoinRequest,
    Metrics,
    RunDetail,
)
from protocol.spec.run import RunSpec
from worker.accounts.machine import DeviceUse, host_facts, host_free_bytes, shared_facts, shared_metrics
from worker.accounts.progress import Progress
from worker.allowing import permit_data
from worker.data.open_training_set import open_training_set
from worker.data.training_set import TrainingSet
from worker.errors import RunEnded, Stopped
from worker.link.client import Client, open_http
from worker.link.membership import Heartbeat, Membership, SharedMembership
from worker.link.worker_token import with_worker_token
from worker.memory import TRAINING_ON_BYTES
from worker.process import logging_to_stderr, stop_on_signals
from worker.ranks import LOST, Ranks, is_of_a_lost_rank
from worker.rounds.exchange import Exchange
from worker.rounds.rounds import Rounds
from worker.rounds.training import InnerSteps, Training, round_seed
from worker.script.hooks import InUse, StepHooks
from worker.script.loader import FirstUnits, UnitSampler, unit_batches
from worker.script.optimizers import RunSchedules, reported_by, usable_optimizers
from worker.settings import script_settings
from worker.state.fragments import Fragments
from worker.state.optimizer_state import ScheduleFreePoints
from worker.state.outer_state import OuterState, is_mapped
from worker.state.parameters import frozen_summary, own_buffers, tensor_specs, trainable_parameters
from worker.state.saver import Saver
from worker.state.snapshot import identity
from worker.state.state_dir import StateDir, rank_directory
from worker.state.work import count, first_units, numbers
from worker.state.writes import ForeignWrites, Weights, temporary_weights

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Joined:
    """The parts of a worker that exist once it has joined the run."""

    state: OuterState
    heartbeat: Heartbeat
    rounds: Rounds


def _followed(spec: RunSpec, elements: int, *, waits: bool, in_files: bool) -> RunSpec:
    """Return the spec that this worker follows: if it `waits` for its deltas, as any worker of a run may do, or if
    memory is short, it has `wait = "always"`. `elements`: trained parameters; `in_files`: the outer state is in files,
    because memory is short."""
    free, needed = host_free_bytes(), TRAINING_ON_BYTES * elements
    no_room = in_files or (free is not None and free < needed)
    if spec.sync.wait == "always" or not (waits or no_room):
        return spec
    if no_room:
        log.info(
            "this worker waits for its deltas, as training on meanwhile takes copies of parameters and moments: %s",
            "its outer state is in files to save memory"
            if in_files
            else f"{bytes_text(needed)} of host memory with the outer state, and {bytes_text(free or 0)} are free",
        )
    return spec.model_copy(update={"sync": spec.sync.model_copy(update={"wait": "always", "most_steps": None})})


class DiLoCo:
    """One worker of a run. Use it as a context manager: entering joins the run and waits for work, leaving leaves it.

    `model` is on the device that it trains on. Its parameters seed the run if this worker is the first one. After that,
    they belong to the run; once the run is over, they are what its export has. Set `client.stop` to end everything
    within a few seconds. Leaving in the middle of a round hands in the inner steps done so far, if that takes only a
    few seconds. `inner_optimizer` is one optimizer, or several in the order in which they step.

    state_dir   directory of the snapshot from which a killed process continues; None: a restart is a new worker
    data        the training set, compared between workers (`training_set()` fills it in); None if not given.
                If the data are private, only their length and tokenizer leave this machine.
    evaluate    measures the held-out loss of the model as it is, and returns an outerstep.EvaluationReport; called
                when the coordinator asks this worker to
    probe       the same on fewer tokens: the coordinator may want to know the effect of each single contribution;
                None: `evaluate`
    initial     loads state 0 into the model if this worker seeds the run; None: the model holds it
    scheduler   the loop's LRScheduler, or several: set to the run's step before each inner step, wherever in the
                run this worker joins or resumes. If the loop steps it too, that has no effect.
    scaler      the loop's GradScaler, whose scale is saved in the snapshot. The snapshot is taken within the
                optimizer's step, so the scaler must be updated before it: if the loop uses `scaler.step`, give
                None.
    host        what the coordinator shows about this machine; None: whatever can be found out
    frozen      of the weights that the frozen parameters were quantised from, compared between workers; None: of the
                parameters as they are
    report      how much of that is sent: all, some (what the arithmetic depends on), or nothing; docs/settings.md
    ranks       the processes that train the model together, as one worker; None: torch.distributed's default
                group, in each process of which a DiLoCo is made
    offload     with a GPU: keep the outer state in a file in `state_dir` instead of page-locked memory; without one, a
                large one is in a file anyway. A worker with its state in a file waits for its deltas
    waits       wait for deltas, even if the run's workers train on until they arrive
    use         the model's FLOPs and the device's peak, for the MFU; None: only memory is reported
    clock       monotonic seconds

    Raises protocol.errors.Problem if the coordinator refuses, StateDirBusy, ModelError, CodecError (a pseudo-gradient
    that is not finite) and OSError (of the state directory), also from within `optimizer.step()`. A step also raises
    RuntimeError if the optimizers step in another order than given, or after the run is over, and Stopped if the loop
    ignores `finished` after this worker was asked to stop. Arguments that cannot work raise TypeError, ValueError or
    ModelError before the run is joined (script/optimizers.py).
    """

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        client: Client,
        run: RunDetail,
        name: str,
        state_dir: Path | str | None = None,
        data: DataSummary | None = None,
        evaluate: Callable[[], EvaluationReport] | None = None,
        probe: Callable[[], EvaluationReport] | None = None,
        initial: Callable[[], None] | None = None,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        host: dict[str, HostValue] | None = None,
        frozen: FrozenSummary | None = None,
        report: HostDetail = "all",
        offload: bool = False,
        waits: bool = False,
        use: DeviceUse | None = None,
        ranks: Ranks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        device = next(model.parameters()).device
        elements = sum(each.numel() for each in trainable_parameters(model).values())
        self._in_files = in_files = state_dir is not None and is_mapped(elements, device, offload=offload)
        self.ranks = ranks = ranks or Ranks.here()
        self.spec: RunSpec = ranks.on_first(lambda: _followed(run.spec, elements, waits=waits, in_files=in_files))
        self.name = name = ranks.on_first(lambda: name)
        self.model = model
        self.client = client
        self._run = run
        self._optimizers = usable_optimizers(model, inner_optimizer)
        self._schedules = RunSchedules(scheduler, self._optimizers, run.spec.total_inner_steps)
        if evaluate is not None and not callable(evaluate):
            raise TypeError(f"evaluate is of type {type(evaluate).__name__}: give a function without parameters")
        self._evaluate = None if evaluate is None else partial(reported_by, evaluate)
        self._probe = probe or self._evaluate
        self._initial, self._scaler = initial, scaler
        if data is not None and run.spec.data.private:
            data = data.of_private_data()
        tensors = tensor_specs(model)
        facts = (host_facts(device) if host is None else host) | ({"processes": ranks.size} if ranks.size > 1 else {})
        self._report: HostDetail = report
        request = JoinRequest(
            tensors=tensors, data=data, frozen=frozen or frozen_summary(model), host=shared_facts(facts, report)
        )
        self._writes = ForeignWrites(model, self._optimizers)
        use = use or DeviceUse(device)
        self._resources = ExitStack()
        self._progress = Progress(client.traffic, client.stages, clock, use, ranks, rounds=run.spec.sync.rounds)
        self._files = (
            None
            if state_dir is None
            else StateDir(
                rank_directory(state_dir, ranks.rank), pause=self._pause_while_wanted, show=self._progress.hold
            )
        )
        self._membership = (
            SharedMembership(client, name, request, self._files, ranks)
            if ranks.size > 1
            else Membership(client, name, request, self._files)
        )
        self._digests: list[bytes] | None = None  # of all fragments, when this worker leaves
        self._steps = InnerSteps(self.spec)
        self._has_entered = self._warms_up = False
        self._joined: Joined | None = None
        self._process = os.getpid()
        self._ended_by_stop = False  # the last inner step is done
        self._surroundings: list[AbstractContextManager[None]] = []
        self._hooks = StepHooks(self._optimizers, self._steps, self._writes, self._schedules)

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
        """Return a DiLoCo for a run on the coordinator at `url`. `options` are DiLoCo's own. `max_up` and `max_down`
        limit transfers, such as "8mbit", for all processes together; None: no limit.

        Defaults are those of `outerstep worker`: `url`, `token`, `name`, `state_dir`, `report`, `max_up` and `max_down`
        come from the environment variables OUTERSTEP_URL and so on. Without them, `name` is this machine's, and
        `state_dir` is ~/.local/state/outerstep/RUN/NAME. OUTERSTEP_CA names a file of additional certificates to trust.
        Within `with`, SIGTERM and Ctrl-C set `stopped`: units() ends, and leaving hands in the work done. If the script
        has set up no logging, what the worker does and waits for is logged to stderr. Raises ValueError for missing or
        wrong arguments, and NoCoordinator if there is no coordinator at the address, or none that is trusted.
        """
        ranks: Ranks = options.get("ranks") or Ranks.here()
        level = logging.INFO if ranks.is_first else logging.WARNING
        given = {"run": run, "url": url, "token": token, "name": name, "max_up": max_up, "max_down": max_down}
        given["report"] = options.get("report")
        name = ranks.on_first(lambda: script_settings(**given).name)
        who = script_settings(**given | {"name": name})
        options = {"state_dir": who.directory, "report": who.report} | options | {"ranks": ranks}
        http = open_http(who.url, who.ca)
        try:
            with logging_to_stderr(level):
                up, down = who.rates(ranks.size)
                client = Client(http, run, who.token, max_up=up, max_down=down)
                client = with_worker_token(client, who.name, options["state_dir"], ranks)
                diloco = cls(model, inner_optimizer, client=client, run=client.run_detail(), name=who.name, **options)
        except BaseException:
            http.close()
            raise
        diloco._resources.callback(http.close)
        diloco._surroundings = [logging_to_stderr(level), stop_on_signals(client.stop)]
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
                f"process {self._process} joined the run, and this is another one, such as a DataLoader's worker: "
                "take units() in the training loop's process, and pass their numbers to the loader"
            )
        return self._joined

    @property
    def round(self) -> int:
        """The round being trained."""
        return self.joined.rounds.assignment.round

    @property
    def inner_step(self) -> int:
        """Inner steps done in this round."""
        return self._steps.done

    @property
    def global_step(self) -> int:
        """Inner steps of the run so far, for learning-rate schedules: round × H + inner_step. A round that all workers
        handed in early, because they were stopped, counts the steps that were trained.

        Unless `sync.wait` is "always", a slower worker does fewer than H inner steps, and its `inner_step` is scaled to
        H: all workers are at the same place in the schedule at the same time.
        """
        return self._steps.global_step

    @property
    def warmup_scale(self) -> float:
        """Factor for the learning rate: below 1 during the first `inner.joiner_warmup_steps` inner steps of a worker
        that joined a running run, because its inner optimizer starts cold."""
        self._warms_up = True
        return self._steps.warmup_scale

    @property
    def data_seed(self) -> int:
        """A seed below 2^63 that differs for every worker, process and round, and is the same when a round is resumed.

        For a loop that draws its own batches, without units(). With the same seed everywhere, all workers would train
        on the same data; the coordinator then records the event `equal`.
        """
        return round_seed(self.spec.seed, self.name, self.round, self.ranks.rank)

    @property
    def finished(self) -> bool:
        """True if training must stop: the run is over, or this worker was asked to stop."""
        return self.joined.rounds.finished or self.stopped

    @property
    def stopped(self) -> bool:
        """True once this worker was asked to stop, by a signal for example, whether or not the run continues. All
        processes of a worker see it at the same inner step."""
        if self.ranks.size > 1 and not self.joined.rounds.finished:
            return self._ended_by_stop
        return self.client.stop.is_set()

    def units(self) -> Iterator[int]:
        """Yield the numbers of the work units to train on, one per inner step, until `finished`. With private data,
        they are numbers within this worker's own training set.

        Asking for the next unit ends the previous one. If its step was skipped, as a GradScaler does, the unit is used
        nevertheless, and the round has one inner step less. If the loop breaks out before a unit's step, that unit
        returns to the pool. A loader that loads ahead must take units from `unit_sampler` instead; here it gets
        RuntimeError.
        """
        rounds, first = self.joined.rounds, FirstUnits(self.model)
        while not self.finished:
            assignment = rounds.assignment
            due = first_units(assignment.units, self._steps.most)
            for unit in numbers(due):
                self._steps.begin_unit()
                yield self.spec.number_in_set(unit)
                first.end(stepped=self._steps.unit_stepped)
                if not self._steps.unit_stepped:
                    self._writes.check()
                    self._progress.skip()
                self._steps.end_unit()
                if self.finished or rounds.assignment is not assignment:
                    break
            else:
                log.warning(
                    "round %d: %d inner steps on %d units, but each unit is for one inner step. To use several batches "
                    "per step, divide the unit",
                    self.round,
                    self.inner_step,
                    count(due),
                )
                rounds.advance(ended=True, news=any(self.ranks.flags(rounds.has_news)))
                self._writes.remember()

    def upcoming(self) -> Iterator[int]:
        """Yield the numbers of the units after the current one, in order, as far as they are known: for a loader that
        prepares batches ahead.

        These are the units left in this round, and the next round's once its assignment is there (with `sync.overlap`,
        before this round ends). They are not guaranteed: if a round is dropped or this worker stops, other workers get
        them. Call it from the training loop's thread, as often as useful.
        """
        ranges = [] if self.finished else self.joined.rounds.units_to_come
        return map(self.spec.number_in_set, numbers(ranges))

    def training_set(self, source: str | None = None, *, data_root: Sequence[str] = ()) -> TrainingSet:
        """Return the run's own training set, given by `data` in its spec, so that this loop can share the run with
        `outerstep worker`. `training_set().unit(number)` is int64[batch_size, sequence_length + 1] for each number of
        units(); of conversations (`data.format`), `outerstep.unpack` returns its inputs and targets. Each of several
        processes takes its own rows, `[rank::size]`.

        Call it before `with`: the coordinator compares the set between workers as they join. `source` is where this
        machine has the data, if not where the spec says; `data_root` lists the directories and addresses that the spec
        may name, like `outerstep worker --data-root`. Raises RuntimeError once joined, ValueError for a run whose
        scripts bring their own data and for sequences longer than the model allows, NotAllowed, and DataError.
        """
        if self._has_entered:
            raise RuntimeError("call training_set() before `with`: the training set is compared when the run is joined")
        if self.spec.data.source == "custom" and source is None:
            raise ValueError(
                f'the run {self.spec.name} has data.source = "custom": its scripts bring their own data, in the '
                "order of unit_sampler() or batches()"
            )
        spec = self.spec.with_source(source)
        permit_data(spec, tuple(data_root), own_source=source is not None)
        described = getattr(getattr(self.model, "config", None), "to_dict", None)
        if described is not None and (fault := spec.length_fault(described())) is not None:
            raise ValueError(fault)
        data = open_training_set(spec, stop=self.client.stop)
        self._resources.callback(data.close)
        summary = data.summary
        self._membership.describe(summary.of_private_data() if spec.data.private else summary)
        return data

    def unit_sampler(self, dataset: Sized, micro_batch: int | None = None) -> UnitSampler:
        """Return a `batch_sampler` for a DataLoader over `dataset`, to use in place of units(), because a loader loads
        ahead.

        One pass of the loader is a round, so the loop around it is `while not diloco.finished`. A row of the data set
        is one sequence. A unit has `inner.batch_size` rows, divided equally between the processes of this worker.
        `micro_batch` is the number of rows per batch of the loader, if several batches make an inner step. Raises
        ValueError for a size that does not fit, and Problem `data-mismatch` if another worker's data set has another
        length, once both have joined.
        """
        rows = len(dataset)
        sampler = UnitSampler(self.spec, rows, micro_batch, self._steps, lambda: self.finished, self.ranks)
        if not self.spec.data.private and self.ranks.rank == 0:  # a unit must have the same rows on all workers
            self._membership.report_rows(rows, joined=self.has_joined)
        return sampler

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield batches of a DataLoader until `finished`, in place of a loop over its epochs. Batches have the loader's
        size and are loaded the loader's way (ahead, in processes), but in the order of the run, as with `unit_sampler`.

        Also takes a loader that accelerate has prepared. Raises TypeError for a data set without numbered rows,
        ValueError for a loader with its own order, and for a batch size that does not fit.
        """
        return unit_batches(loader, self.unit_sampler, lambda: self.finished)

    def report_loss(self, loss: Tensor) -> None:
        """Report one inner step's mean loss (a scalar, nats per token) before `optimizer.step()`, without waiting for
        the device.

        Without it, the training loss is unknown to the run. Raises ModelError if the parameters change from report to
        report without a step of the run's optimizer.
        """
        self._writes.check_between_steps()
        self._progress.report_loss(loss)

    @contextmanager
    def weights(self, given: Weights) -> Iterator[None]:
        """Put other values into the model within the `with` block, to evaluate or save an average of the weights. At
        its end, the model holds its own values again, bit for bit. Do not train within.

        `given` is a module with the same parameters, such as torch's AveragedModel (its buffers are used as well); a
        mapping of names to tensors, such as its state_dict(); or the tensors of the trainable parameters, in order.
        Raises ValueError if they do not match.
        """
        with temporary_weights(self.model, given):
            around, self._writes.borrowed = self._writes.borrowed, True
            try:
                yield
            finally:
                self._writes.borrowed = around

    # --- lifetime -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._has_entered:
            raise RuntimeError(
                "this DiLoCo has joined the run before: make another one with DiLoCo.connect(), which continues "
                "from the state directory"
            )
        self._has_entered = True
        self._hooks.allow_steps()
        with self._resources as resources:
            resources.enter_context(InUse(self._optimizers))
            for surrounding in self._surroundings:
                resources.enter_context(surrounding)
            if self._files is not None:
                resources.enter_context(self._files)
            if (buffers := own_buffers(self.model)) and self.ranks.is_first:
                log.warning(
                    "%d buffers, such as %s, stay local to this worker: they are neither averaged nor exported",
                    *(len(buffers), buffers[0]),
                )
            self._joined = joined = self._join(resources)
            joined.rounds.begin()
            self._writes.remember()
            if not self.finished:
                self._schedules.set(self.global_step)
            self._hooks.attach(resources, self._check_running, self._after_inner_step)
            self._resources = resources.pop_all()
        return self

    def _join(self, resources: ExitStack) -> Joined:
        client, spec, membership = self.client, self.spec, self._membership
        reply = membership.join()
        resources.callback(self._leave)
        points = ScheduleFreePoints(self._optimizers)
        fragments = Fragments(self.model, reply.layout, self.ranks, points)
        on_cuda = fragments.device.type == "cuda"
        owner = identity(self._run, reply.layout, self.name)
        mapped_in = self._files.path if self._files is not None and self._in_files else None
        state = OuterState(
            reply.layout,
            spec.outer,
            pin_memory=on_cuda,
            owns=fragments.owns,
            mapped_in=mapped_in,
            processes=self.ranks.size,
        )
        heartbeat = Heartbeat(membership, reply.lease_s, self._shared_metrics)
        if self.ranks.is_first:  # on other ranks it would learn nothing
            resources.enter_context(heartbeat)
        # The codecs' bytes depend on IEEE division, which CUDA and CPUs guarantee and Metal does not.
        encoder = fragments.device if on_cuda else torch.device("cpu")
        exchange = Exchange(membership, spec, state, encoder)
        training = Training(
            fragments,
            self._optimizers,
            self._steps,
            self._progress,
            self._evaluate,
            self._initial,
            self._scaler,
            self._writes,
            self.ranks,
            self._probe,
            points,
        )
        saver = resources.enter_context(Saver(self._files, owner, state, client.stages, self.ranks))
        rounds = Rounds(exchange, training, saver, heartbeat)
        resources.callback(rounds.close)
        return Joined(state, heartbeat, rounds)

    def _pause_while_wanted(self, seconds: float) -> None:
        """Wait. Raises Stopped, RunEnded, and the heartbeat's error if nothing needs what is waited for any more."""
        self.client.pause(seconds)
        if self._joined is not None:
            self._joined.heartbeat.raise_failure()
            if self._joined.heartbeat.run_ended.is_set():
                raise RunEnded("the run ended while this worker waited for room on its disk")

    def _check_running(self) -> None:
        """Raise RuntimeError or Stopped if this worker does no inner steps any more."""
        if self.joined.rounds.finished:
            raise RuntimeError(
                "the run is over for this worker, so a step would only change the model: leave the training loop "
                "once `diloco.finished` is true, as the end of units() does"
            )
        if self._ended_by_stop:
            raise Stopped("asked to stop: leave the training loop once `diloco.finished` is true")

    def _after_inner_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count one inner step, as the hook of the last optimizer."""
        rounds, heartbeat = self.joined.rounds, self.joined.heartbeat
        # A fused optimizer skips inside its kernel: a GradScaler calls its step even then.
        skipped = getattr(optimizer, "found_inf", None)
        if rounds.finished:
            return
        if skipped is not None and bool(skipped):
            self._progress.skip()
            return
        if self._steps.warmup_scale < 1 and not self._warms_up and self.ranks.is_first:
            self._warms_up = True  # once
            log.warning(
                "this worker joined a running run with a cold inner optimizer, and inner.joiner_warmup_steps = %d "
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
            return  # `__exit__` then hands in the work done
        if failed:
            self.ranks.on_first(heartbeat.raise_failure)
        rounds.advance(ended=self.inner_step >= self._steps.own, news=news)
        self._writes.remember_if_written()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._resources:
            if self.ranks.size > 1 and is_of_a_lost_rank(error):  # raised by the model's own collectives
                log.error("%s", LOST)
            if kind is None or (issubclass(kind, Stopped) and (self.ranks.size == 1 or self._ended_by_stop)):
                self.joined.rounds.hand_in()
                self._digests = self._all_digests()

    def _shared_metrics(self) -> Metrics:
        return shared_metrics(self._progress.metrics(), self._report)

    def _all_digests(self) -> list[bytes] | None:
        """Return the state digests of all fragments; None if there is no outer state."""
        state = self.joined.state
        digests = self.ranks.all(None if state.round is None else dict(zip(state.own, state.digests, strict=True)))
        known = {p: each for own in digests if own is not None for p, each in own.items()}
        return [known[p] for p in range(len(state))] if None not in digests else None

    def _leave(self) -> None:
        """Leave the run, so that nobody waits for this worker, and its units return to the pool."""
        self._progress.phase("leave")
        if not self.ranks.is_first:
            return
        state = None if self._joined is None else self._joined.state
        if state is not None and self.ranks.size == 1:
            self._digests = self._all_digests()
        round_number = None if state is None or self._digests is None else state.round
        state_digest = None if self._digests is None or round_number is None else model_digest(self._digests)
        try:
            report = self._progress.last_report(self._membership.epoch)
            self._membership.leave(round_number, state_digest, self._shared_metrics(), report)
        except (httpx.TransportError, OuterstepError) as error:
            log.warning("could not leave the run (%s): the lease will expire", error)
