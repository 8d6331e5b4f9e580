"""The stages of a worker's start, in its order, up to the join; then the speed of the line."""

import os
import platform
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from outerstep import __version__, rest
from outerstep.common import files
from outerstep.common.quantities import bytes_text, count_text, counted
from outerstep.doctor import line
from outerstep.doctor.findings import Examination, Finding, Judgement, Listener, State
from outerstep.doctor.steps import Steps, in_words, take_steps
from protocol import PROTOCOL_VERSION
from protocol.compiled import COMPILED, KERNELS
from protocol.errors import Problem
from protocol.fragments import Layout, first_difference
from protocol.messages import RunDetail, RunState, data_difference
from worker.agent import check_state_directory
from worker.allowing import allowed_by, permit
from worker.box import Box, Built, Chosen, assemble, build, check_room, choose, open_data, summary_of_frozen
from worker.data.training_set import TrainingSet
from worker.errors import DataError, ModelError
from worker.fit import chosen_options
from worker.link.client import open_http
from worker.link.worker_token import token_to_read_with
from worker.ranks import Ranks
from worker.settings import WorkerSettings
from worker.starting import group_of, start
from worker.state.parameters import tensor_specs
from worker.state.state_dir import SNAPSHOT


def examine(
    settings: WorkerSettings,
    listener: Listener,
    *,
    now: Callable[[], float] = time.time,
    clock: Callable[[], float] = time.monotonic,
) -> list[Finding]:
    """Return the findings about a worker with these settings; `listener` gets them as they are made. Each process that
    torchrun has started for the worker calls this. Raises WrongVariable."""
    transformers_logging.disable_progress_bar()
    exam, size = Examination(listener), int(os.environ.get("WORLD_SIZE", "1"))
    exam.check("versions", _versions, _judge_versions)
    started = exam.check("device", lambda: start(settings, size), lambda seen: (State.FINE, seen[1]))
    if started is None:
        return exam.findings
    device, _ = started
    with group_of(device, size), open_http(settings.url, settings.ca) as http:
        ranks, client = Ranks.here(), rest.Client(http)
        found = _reach(exam, settings, client, ranks, now, clock)
        exam.check(
            "state",
            lambda: ranks.together(lambda: check_state_directory(settings.directory, ranks.rank)),
            lambda _: (State.FINE, f"{settings.directory} can be used"),
        )
        run, elements, steps = None, None, None
        if found is not None:
            run, layout = found
            elements, steps = _train(exam, settings, run, layout, device, ranks, clock)
            if steps is None and size > 1:  # another process may still wait in a step
                return exam.findings
        if "Authorization" in http.headers:
            up, down = settings.max_up, settings.max_down
            exam.check(
                "line",
                lambda: ranks.on_first(lambda: line.measure(client, up, down, clock=clock)),
                lambda seen: line.judge_line(seen, run, elements, None if steps is None else steps.step_s),
            )
    return exam.findings


def _versions() -> str:
    versions = f"outerstep {__version__}, protocol {PROTOCOL_VERSION}, Python {platform.python_version()}"
    return f"{versions}, torch {torch.__version__}; kernels: {KERNELS}"


def _judge_versions(seen: str) -> Judgement:
    if COMPILED:
        return State.FINE, seen
    remedy = "install a C compiler and Python.h (gcc and python3-dev), then reinstall outerstep; results are the same"
    return State.WARNING, f"{seen}; {remedy}"


# --- the coordinator and the run ------------------------------------------------------------------------------------


def _reach(
    exam: Examination,
    settings: WorkerSettings,
    client: rest.Client,
    ranks: Ranks,
    now: Callable[[], float],
    clock: Callable[[], float],
) -> tuple[RunDetail, Layout | None] | None:
    """Return the run, with the layout of its model if it is seeded; None if something is wrong. The token is only sent
    to a coordinator, and the client only keeps one that lets workers join."""
    greet = partial(line.greet, client, now=now, clock=clock)
    greeting = exam.check("coordinator", lambda: ranks.on_first(greet), line.judge_greeting)
    if greeting is None:
        return None
    exam.check("TLS", lambda: greeting, lambda seen: line.judge_tls(settings.url, seen, now()))
    exam.check("clock", lambda: greeting, line.judge_clock)
    token = token_to_read_with(settings.token, settings.run, settings.name, settings.directory)
    client.http.headers["Authorization"] = f"Bearer {token}"
    said = State.FINE, "valid, and lets workers join"
    if exam.check("token", lambda: ranks.on_first(partial(_check_token, client)), lambda _: said) is None:
        del client.http.headers["Authorization"]
        return None
    return exam.check("run", lambda: ranks.on_first(partial(_run, client, settings.run)), _judge_run)


def _check_token(client: rest.Client) -> bool:
    try:
        client.line_check_down(0)  # allowed for tokens that may join
    except Problem as problem:
        if problem.slug in ("unauthorized", "forbidden"):
            remedy = "ask an admin for a join token: outerstep token create --scope join"
            raise Problem(problem.slug, f"{problem.detail}; {remedy}") from problem
        raise
    return True


def _run(client: rest.Client, name: str) -> tuple[RunDetail, Layout | None]:
    run = client.run(name)
    if run.state in (RunState.FINISHED, RunState.STOPPED):
        raise Problem("run-ended", f"{name} is {run.state}: nothing is left to train; join another run, or create one")
    try:
        return run, client.checkpoint(name).layout
    except Problem as problem:
        if problem.slug == "not-found":
            return run, None
        raise


def _judge_run(seen: tuple[RunDetail, Layout | None]) -> Judgement:
    run, _ = seen
    said = f"{run.name} is {run.state}: {run.reason}; {counted(run.live_workers, 'live worker')}"
    if run.state in (RunState.PAUSED, RunState.DRAINING):
        return State.WARNING, f"{said}; a worker waits until the operator resumes it: outerstep run resume {run.name}"
    return State.FINE, said


# --- what is trained here -------------------------------------------------------------------------------------------


def _train(
    exam: Examination,
    settings: WorkerSettings,
    run: RunDetail,
    layout: Layout | None,
    device: torch.device,
    ranks: Ranks,
    clock: Callable[[], float],
) -> tuple[int | None, Steps | None]:
    """Set the box up and take a few inner steps. Return the number of trained elements, and the steps; None for what
    could not be found out."""
    spec, path = run.spec, settings.directory
    fine = State.FINE, "everything that the run's spec asks for is allowed here"
    if exam.check("allowed", lambda: permit(spec, allowed_by(settings)), lambda _: fine) is None:
        return run.elements, None
    choosing = partial(choose, spec, settings, device, ranks, path)
    chosen = exam.check("settings", lambda: ranks.together(choosing), partial(_judge_choice, settings))
    if chosen is None:
        return run.elements, None
    room = exam.check("memory", lambda: ranks.together(partial(check_room, chosen)), lambda seen: (State.FINE, seen))
    if chosen.need is not None and path.is_dir():
        exam.check("disk", lambda: files.free_bytes(path), partial(judge_disk, chosen.need.disk, path))
    if room is None:
        return run.elements, None
    building = partial(build_for, chosen, run, layout)
    built = exam.check("model", lambda: ranks.together(building), partial(judge_model, layout))
    if built is None:
        return run.elements, None
    elements = sum(each.elements for each in tensor_specs(built.model))
    data = exam.check(
        "data",
        lambda: ranks.together(partial(open_for, chosen, run, built)),
        partial(_judge_data, run, spec.with_source(chosen.settings.data).data.source),
    )
    if data is None:
        return elements, None

    def take() -> tuple[Box, Steps]:
        box = assemble(chosen, built, data)
        return box, take_steps(box, clock=clock)

    with closing(data):
        taken = exam.check("step", take, _judge_steps)
    return elements, None if taken is None else taken[1]


def _judge_choice(given: WorkerSettings, chosen: Chosen) -> Judgement:
    said = f"{chosen.precision} on {chosen.device}" + ("" if chosen.base == "full" else f", base {chosen.base}")
    return State.FINE, said + ("" if given.fit is None else f"; --fit auto chooses {chosen_options(chosen.settings)}")


def judge_disk(need_bytes: int, path: Path, free: int) -> Judgement:
    said = f"the worker's state needs about {bytes_text(need_bytes)}; {bytes_text(free)} are free"
    if free > 2 * need_bytes or (path / SNAPSHOT).exists():
        return State.FINE, said
    remedy = "make room, or give --state-dir on another disk"
    return (State.WARNING if free > need_bytes else State.WRONG), f"{said}: {remedy}"


def build_for(chosen: Chosen, run: RunDetail, layout: Layout | None) -> Built:
    """Build the model. Raises ModelError if it is not the run's, as the coordinator would find when this worker
    joined."""
    built = build(chosen)
    if layout is not None and (difference := first_difference(layout.tensors, tensor_specs(built.model))):
        raise ModelError(
            f"this worker's model is not the model of the run {run.name}: {difference}; install the same versions of "
            "outerstep and transformers as the run's workers"
        )
    if run.frozen is not None and summary_of_frozen(built.model, run.spec.model, chosen.base) != run.frozen:
        raise ModelError(
            f"this worker's frozen parameters are not those of the run {run.name}; load the same weights everywhere, "
            "from the same directory or revision"
        )
    return built


def judge_model(layout: Layout | None, built: Built) -> Judgement:
    elements = sum(each.elements for each in tensor_specs(built.model))
    frozen = any(not each.requires_grad for each in built.model.parameters())
    said = f"{type(built.model).__name__}, {count_text(elements)} parameters to train"
    said += ", the others frozen" if frozen else ""
    if layout is None:
        return State.FINE, f"{said}; the first worker's model becomes the run's"
    return State.FINE, f"{said}, matching the run's layout of {counted(len(layout.fragments), 'fragment')}"


def open_for(chosen: Chosen, run: RunDetail, built: Built) -> TrainingSet:
    """Open the training set. Raises DataError if it is not the run's."""
    data = open_data(chosen, built.model)
    if run.data is not None and (difference := data_difference(data.summary, run.data, run.spec.data)):
        data.close()
        raise DataError(f"{difference}. Copy the run's files here, or give their place with --data")
    return data


def _judge_data(run: RunDetail, source: str, data: TrainingSet) -> Judgement:
    spec, trained = run.spec, data.summary.unit_tokens
    total = count_text(data.units_per_epoch * (trained or spec.unit_tokens))
    each = "" if trained is None else f", on average {trained} of them trained on"
    said = (
        f"{source}: {counted(data.units_per_epoch, 'unit')} of {spec.unit_tokens} tokens{each}, {total} tokens in total"
    )
    if spec.data.private:
        return State.FINE, f"{said}; its digest is not sent"
    if run.data is None:
        return State.FINE, f"{said}; digest {data.summary.digest}. The first worker's set becomes the run's"
    return State.FINE, f"{said}; the same digest as the run's workers"


def _judge_steps(taken: tuple[Box, Steps]) -> Judgement:
    box, steps = taken
    return State.FINE, f"{'; '.join(box.reasons)}. {in_words(steps, box.spec, box.ranks.size)}"
