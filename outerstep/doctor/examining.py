"""The examination of a box: all checks, in the order in which a worker would meet what they look at."""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import httpx
import torch

from outerstep import __version__, rest
from outerstep.doctor import (
    access,
    address,
    clock,
    data,
    line,
    membership,
    memory,
    model,
    permission,
    software,
    state_directory,
)
from outerstep.doctor import step as stepping
from outerstep.doctor.examination import Examination, Teller
from outerstep.doctor.finding import Finding, fine
from outerstep.doctor.trial import Steps, take_steps_apart
from protocol.messages import RunState
from protocol.spec.run import RunSpec
from worker.inner.data_parallel import Mode, choose_mode, replica_budget
from worker.link.client import open_http
from worker.link.worker_token import token_to_read_with
from worker.settings import BoxSettings, WorkerSettings
from worker.starting import check_gpus, start

# What each check may take at most.
HOST_S, ANSWER_S, DATA_S, MODEL_S, STEP_S, LINE_S = 15.0, 30.0, 120.0, 300.0, 600.0, 180.0


class TakeSteps(Protocol):
    """What takes a few inner steps, in so many processes."""

    def __call__(self, spec: RunSpec, settings: BoxSettings, processes: int, stop: threading.Event) -> Steps: ...


def examine(
    settings: WorkerSettings,
    processes: int,
    teller: Teller,
    *,
    take_steps: TakeSteps = take_steps_apart,
    now: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
) -> list[Finding]:
    """Return what is found of a worker with these settings, in so many processes, having told it as it was found."""
    exam = Examination(teller)
    exam.check("versions", lambda _: software.look(), software.judge, within_s=HOST_S)
    with open_http(settings.url, settings.ca) as http:
        reached = _reach(exam, settings.url, http, now, monotonic)
        token_used = token_to_read_with(settings.token, settings.run, settings.name, settings.directory)
        http.headers["Authorization"] = f"Bearer {token_used}"
        client = rest.Client(http)
        token = None
        if reached:
            token = exam.check("token", lambda _: access.look(client), access.judge, within_s=ANSWER_S)
        else:
            exam.skip(["token"], "no coordinator answers")
        may_ask = token not in (None, access.Access.NONE)
        run = _ask_for_run(exam, client, settings) if may_ask else None
        if not may_ask:
            exam.skip(["run", "name"], "no coordinator answers" if not reached else "the token is not valid")
        place = exam.check(
            "state", lambda _: state_directory.look(settings.directory), state_directory.judge, within_s=HOST_S
        )
        device = _choose_device(exam, settings, processes)
        elements: int | None = None
        step_s: float | None = None
        if run is None or run.detail.state in (RunState.FINISHED, RunState.STOPPED):
            why = "the run's spec is not known" if run is None else f"the run is {run.detail.state}"
            exam.skip(["allowed", "data", "model", "memory", "step"], why)
        else:
            elements, step_s = _train(exam, settings, processes, run, place, device, take_steps)
        if token in (access.Access.WORKER, access.Access.ADMIN):
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
    """Return True if a coordinator answers. No token is sent before that is known."""
    proxy = address.proxy_of(url)
    exam.check(
        "host",
        lambda _: address.resolve(url),
        partial(address.judge_host, url, proxy),
        within_s=HOST_S,
        late=partial(address.judge_dns, HOST_S),
    )
    if exam.is_wrong("host"):
        exam.skip(["connection", "TLS", "coordinator", "clock"], "the host is not found")
        return False

    def greet(_: threading.Event) -> address.Greeting | httpx.TransportError:
        try:
            return address.greet(http, now=now, clock=monotonic)
        except httpx.TransportError as error:
            return error

    late = partial(address.judge_silence, ANSWER_S)
    greeting = exam.check("connection", greet, partial(address.judge_connection, url), within_s=ANSWER_S, late=late)
    if not isinstance(greeting, address.Greeting):
        exam.skip(["TLS", "coordinator", "clock"], "there is no connection")
        return False
    exam.conclude("TLS", address.judge_tls(url, greeting, now()))
    exam.conclude("coordinator", address.judge_coordinator(url, greeting, __version__))
    if exam.is_wrong("coordinator"):
        exam.skip(["clock"], "no coordinator answers")
        return False
    exam.conclude("clock", clock.judge(clock.offset_s(greeting)))
    return True


def _ask_for_run(exam: Examination, client: rest.Client, settings: WorkerSettings) -> membership.Run | None:
    run = exam.check("run", lambda _: membership.look(client, settings), membership.judge_run, within_s=ANSWER_S)
    if run is None:
        exam.skip(["name"], "the run is not known")
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
    place: state_directory.Directory | None,
    device: torch.device | None,
    take_steps: TakeSteps,
) -> tuple[int | None, float | None]:
    """Check what is trained and how; return the elements that are, and the seconds of an inner step."""
    spec = run.detail.spec
    exam.check("allowed", lambda _: permission.look(spec, settings), permission.judge, within_s=HOST_S)
    if exam.is_wrong("allowed"):
        exam.skip(["data", "model", "memory", "step"], "the run's spec asks for what is not allowed")
        return run.detail.elements, None
    opened = exam.check(
        "data",
        lambda stop: data.look(spec, settings, stop),
        lambda seen: data.judge(seen, run.detail),
        within_s=DATA_S,
        late=partial(data.judge_lateness, DATA_S),
    )
    vocabulary = None if opened is None else opened.vocabulary
    built = exam.check(
        "model",
        lambda _: model.look(run.detail, processes, vocabulary, settings.max_parameters),
        lambda seen: model.judge(seen, run.detail, run.layout),
        within_s=MODEL_S,
        late=partial(model.judge_lateness, MODEL_S),
    )
    elements = run.detail.elements if built is None else built.elements
    if built is None or device is None:
        exam.skip(["memory"], "the model cannot be built" if built is None else "the device cannot be used")
    else:
        mode: Mode | None = None
        if processes > 1:
            mode, _ = choose_mode(built.elements + built.frozen, replica_budget(device), settings.mode)
        needed = memory.need(built, mode, processes, settings.parameters)
        exam.check(
            "memory",
            lambda _: memory.look(device, processes),
            lambda room: memory.judge(needed, room, processes, device),
            within_s=HOST_S,
        )
        if place is not None:
            moments = 2 * model.MOMENT_BYTES if built.optimizer_bytes is None else built.optimizer_bytes
            snapshot = state_directory.snapshot_bytes(built.elements, moments)
            exam.conclude("disk", state_directory.judge_disk(place, snapshot))
    if exam.is_wrong("data") or opened is None or built is None or exam.is_wrong("model") or device is None:
        exam.skip(["step"], "it needs data, model and device")
        return elements, None
    taken = exam.check(
        "step",
        lambda stop: take_steps(spec, settings, processes, stop),
        lambda seen: stepping.judge(seen, spec, settings.micro_batch),
        within_s=STEP_S,
        late=partial(stepping.judge_lateness, STEP_S),
    )
    return elements, None if taken is None else taken.step_s


def _measure_line(
    exam: Examination,
    client: rest.Client,
    settings: WorkerSettings,
    run: membership.Run | None,
    elements: int | None,
    step_s: float | None,
    monotonic: Callable[[], float],
) -> None:
    def judge(seen: line.Line) -> list[Finding]:
        seen = seen.held_to(settings.max_up, settings.max_down)
        return line.judge(seen, None if run is None else run.detail, elements, step_s)

    exam.check("line", lambda _: line.look(client, clock=monotonic), judge, within_s=LINE_S)
