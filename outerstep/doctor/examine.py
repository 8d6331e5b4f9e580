"""The examination of a machine: all checks, in the order in which a worker would run into problems."""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import httpx
import torch

from outerstep import __version__, rest
from outerstep.common.connections import proxy_of, starts_slowly_after_silence
from outerstep.doctor import coordinator, machine, membership, network, training, trial
from outerstep.doctor.examination import Examination, Finding, Listener, fine
from outerstep.doctor.trial import TrialSteps, take_steps_apart
from protocol.messages import RunState
from protocol.spec.run import RunSpec
from worker.fit import chosen_options, fitted
from worker.inner.data_parallel import Mode, choose_mode, replica_budget
from worker.link.client import open_http
from worker.link.worker_token import token_to_read_with
from worker.memory import disk_bytes
from worker.ranks import Ranks
from worker.settings import BoxSettings, WorkerSettings
from worker.starting import check_gpus, start
from worker.state.outer_state import is_mapped

# Time limits of the checks.
HOST_S, ANSWER_S, DATA_S, MODEL_S, STEP_S, LINE_S = 15.0, 30.0, 120.0, 300.0, 600.0, 180.0


class TakeSteps(Protocol):
    """Takes a few inner steps, in this many processes."""

    def __call__(self, spec: RunSpec, settings: BoxSettings, processes: int, stop: threading.Event) -> TrialSteps: ...


def examine(
    settings: WorkerSettings,
    processes: int,
    listener: Listener,
    *,
    take_steps: TakeSteps = take_steps_apart,
    now: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
) -> list[Finding]:
    """Return the findings about a worker with these settings and this many processes; `listener` gets them as they are
    made."""
    exam = Examination(listener)
    exam.check("versions", lambda _: machine.look_at_software(), machine.judge_software, within_s=HOST_S)
    with open_http(settings.url, settings.ca) as http:
        reached = _reach(exam, settings.url, http, now, monotonic)
        token_used = token_to_read_with(settings.token, settings.run, settings.name, settings.directory)
        http.headers["Authorization"] = f"Bearer {token_used}"
        client = rest.Client(http)
        token = None
        if reached:
            token = exam.check(
                "token", lambda _: membership.look_at_token(client), membership.judge_token, within_s=ANSWER_S
            )
        else:
            exam.skip(["token"], "no coordinator answers")
        may_ask = token not in (None, membership.Access.NONE)
        run = _ask_for_run(exam, client, settings) if may_ask else None
        if not may_ask:
            exam.skip(["run", "name"], "no coordinator answers" if not reached else "the token is not valid")
        place = exam.check(
            "state", lambda _: machine.look_at_directory(settings.directory), machine.judge_directory, within_s=HOST_S
        )
        device = _choose_device(exam, settings, processes)
        elements: int | None = None
        step_s: float | None = None
        if run is None or run.detail.state in (RunState.FINISHED, RunState.STOPPED):
            why = "the run's spec is unknown" if run is None else f"the run is {run.detail.state}"
            exam.skip(["allowed", "data", "model", "memory", "step"], why)
        else:
            elements, step_s = _train(exam, settings, processes, run, place, device, take_steps)
        if token in (membership.Access.WORKER, membership.Access.ADMIN):
            _measure_line(exam, client, settings, run, elements, step_s, monotonic)
        elif not reached:
            exam.skip(["line"], "no coordinator answers")
        else:
            exam.skip(["line"], "the token does not let workers join")
    return exam.findings


def _reach(
    exam: Examination,
    url: str,
    http: httpx.Client,
    now: Callable[[], float],
    monotonic: Callable[[], float],
) -> bool:
    """True if a coordinator answers. The token is only sent after that."""
    proxy = proxy_of(url)
    exam.check(
        "host",
        lambda _: coordinator.resolve(url),
        partial(coordinator.judge_host, url, proxy),
        within_s=HOST_S,
        late=partial(coordinator.judge_dns, HOST_S),
    )
    if exam.is_wrong("host"):
        exam.skip(["connection", "TLS", "coordinator", "clock"], "the host was not found")
        return False

    def greet(_: threading.Event) -> coordinator.Greeting | httpx.TransportError:
        try:
            return coordinator.greet(http, now=now, clock=monotonic)
        except httpx.TransportError as error:
            return error

    late = partial(coordinator.judge_silence, ANSWER_S)
    greeting = exam.check("connection", greet, partial(coordinator.judge_connection, url), within_s=ANSWER_S, late=late)
    if not isinstance(greeting, coordinator.Greeting):
        exam.skip(["TLS", "coordinator", "clock"], "there is no connection")
        return False
    exam.conclude("TLS", coordinator.judge_tls(url, greeting, now()))
    exam.conclude("coordinator", coordinator.judge_coordinator(url, greeting, __version__))
    if exam.is_wrong("coordinator"):
        exam.skip(["clock"], "no coordinator answers")
        return False
    exam.conclude("clock", coordinator.judge_clock(coordinator.clock_offset_s(greeting)))
    return True


def _ask_for_run(exam: Examination, client: rest.Client, settings: WorkerSettings) -> membership.Run | None:
    run = exam.check("run", lambda _: membership.look_at_run(client, settings), membership.judge_run, within_s=ANSWER_S)
    if run is None:
        exam.skip(["name"], "the run is unknown")
        return None
    exam.conclude("name", membership.judge_name(run, settings.name))
    return run


def _choose_device(exam: Examination, settings: WorkerSettings, processes: int) -> torch.device | None:
    def look(_: threading.Event) -> tuple[torch.device, str]:
        device, why = start(settings)
        if processes > 1:
            check_gpus(processes, settings.device)
        return device, why

    def judge(seen: tuple[torch.device, str]) -> list[Finding]:
        return [fine("device", seen[1] + (f"; {processes} processes" if processes > 1 else ""))]

    chosen = exam.check("device", look, judge, within_s=HOST_S * 4)
    return None if chosen is None else chosen[0]


def _train(
    exam: Examination,
    settings: WorkerSettings,
    processes: int,
    run: membership.Run,
    place: machine.Directory | None,
    device: torch.device | None,
    take_steps: TakeSteps,
) -> tuple[int | None, float | None]:
    """Check what is trained and how. Return the number of trained elements, and the seconds per inner step."""
    spec = run.detail.spec
    exam.check(
        "allowed", lambda _: membership.look_at_permission(spec, settings), membership.judge_permission, within_s=HOST_S
    )
    if exam.is_wrong("allowed"):
        exam.skip(["data", "model", "memory", "step"], "the run's spec asks for something that is not allowed")
        return run.detail.elements, None
    if settings.fit is not None and device is not None:
        ranks, state_dir = Ranks(0, processes), settings.directory
        chosen = exam.check(
            "fit", lambda _: fitted(spec, settings, device, ranks, state_dir), _judge_fit, within_s=HOST_S
        )
        if chosen is None:
            exam.skip(["data", "model", "memory", "step"], "no settings were chosen")
            return run.detail.elements, None
        settings = chosen
    opened = exam.check(
        "data",
        lambda stop: training.open_data(spec, settings, stop),
        lambda seen: training.judge_data(seen, run.detail),
        within_s=DATA_S,
        late=partial(training.data_timeout, DATA_S),
    )
    vocabulary = None if opened is None else opened.vocabulary
    built = exam.check(
        "model",
        lambda _: training.build(run.detail, processes, vocabulary, settings.max_parameters, settings.base),
        lambda seen: training.judge_model(seen, run.detail, run.layout),
        within_s=MODEL_S,
        late=partial(training.model_timeout, MODEL_S),
    )
    elements = run.detail.elements if built is None else built.elements
    if built is None or device is None:
        exam.skip(["memory"], "the model cannot be built" if built is None else "the device cannot be used")
    else:
        mode: Mode | None = None
        if processes > 1:
            mode, _ = choose_mode(
                built.elements + built.frozen,
                replica_budget(device),
                "ddp" if built.frozen_bytes is not None else settings.mode,
            )
        mapped = is_mapped(built.elements, device, offload=settings.offload)
        needed = training.memory_needed(
            built,
            mode,
            processes,
            settings.parameters,
            settings.optimizer_state,
            mapped=mapped,
            offload=settings.offload,
        )
        exam.check(
            "memory",
            lambda _: training.free_memory(device, processes),
            lambda free: training.judge_memory(needed, free, processes, device),
            within_s=HOST_S,
        )
        if place is not None:
            moments = 2 * training.MOMENT_BYTES if built.optimizer_bytes is None else built.optimizer_bytes
            needed_bytes = disk_bytes(built.elements, moments, in_files=mapped)
            exam.conclude("disk", machine.judge_disk(place, needed_bytes))
    if exam.is_wrong("data") or opened is None or built is None or exam.is_wrong("model") or device is None:
        exam.skip(["step"], "it needs the data, the model and the device")
        return elements, None
    taken = exam.check(
        "step",
        lambda stop: take_steps(spec, settings, processes, stop),
        lambda seen: trial.judge_steps(seen, spec, settings.micro_batch),
        within_s=STEP_S,
        late=partial(trial.steps_timeout, STEP_S),
    )
    return elements, None if taken is None else taken.step_s


def _judge_fit(chosen: BoxSettings) -> list[Finding]:
    return [fine("fit", f"--fit auto chooses {chosen_options(chosen)}")]


def _measure_line(
    exam: Examination,
    client: rest.Client,
    settings: WorkerSettings,
    run: membership.Run | None,
    elements: int | None,
    step_s: float | None,
    monotonic: Callable[[], float],
) -> None:
    def judge(seen: network.Connection) -> list[Finding]:
        seen = seen.limited_to(settings.max_up, settings.max_down)
        return network.judge_connection(seen, None if run is None else run.detail, elements, step_s)

    congestion_control = network.look_at_tcp()
    exam.conclude("tcp", network.judge_tcp(congestion_control, starts_slowly_after_silence(congestion_control)))
    exam.check("line", lambda _: network.measure(client, clock=monotonic), judge, within_s=LINE_S)
