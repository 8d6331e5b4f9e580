"""A few inner steps in separate processes, and what they show: the micro-batch, the time of a step and of a round.

`python -m outerstep.doctor.trial DIRECTORY` is such a process, one of several under torchrun. It reads a `TrialOrder`;
rank 0 writes the `TrialSteps`, and a process that fails writes the error. A crash there does not end the doctor.
"""

import logging
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from pydantic import BaseModel
from torch import Tensor
from transformers.utils import logging as transformers_logging

from outerstep.common.quantities import bytes_text, count_text, duration_text, share_text
from outerstep.doctor.examination import Finding, fine, warning, wrong
from protocol.errors import OuterstepError
from protocol.spec.run import RunSpec
from worker.box import Box, set_up
from worker.errors import Stopped
from worker.ranks import ALONE, Ranks
from worker.settings import BoxSettings
from worker.starting import group_of, start

ORDER, STEPS, FAULT = "order.json", "steps.json", "fault-{}.txt"
MOST_STEPS, ENOUGH_S = 5, 20.0  # inner steps after the first; none if the first alone took this long
_POLL_S = 0.2
_TERM_S = 4.0  # time for torchrun to end its processes
_SHOWN = 300  # characters of a process's last output


class TrialOrder(BaseModel):
    spec: RunSpec
    settings: BoxSettings


class TrialSteps(BaseModel):
    """Measurements of a few inner steps. The first one includes one-time costs, such as compiling and allocating the
    optimizer's memory. `share`: sequences of the batch per process; `at_once`: the final micro-batch; `reasons`: for
    the mode and the micro-batch; `warned`: the worker's warnings."""

    first_s: float
    step_s: float
    peak_bytes: int | None
    share: int
    at_once: int
    precision: str
    processes: int
    reasons: list[str]
    warned: list[str]
    mfu: float | None


def take_steps(
    spec: RunSpec,
    settings: BoxSettings,
    device: torch.device,
    *,
    ranks: Ranks = ALONE,
    stop: threading.Event | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> TrialSteps:
    """Take a few inner steps as a worker would, then discard the model. Raises what a worker would raise."""
    warned: list[str] = []
    collect = logging.Handler(logging.WARNING)
    collect.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("worker").addHandler(collect)
    try:
        box = set_up(spec, settings, device, stop=stop, ranks=ranks)
        with closing(box.data):
            batch = box.data.unit(0)[ranks.rank :: ranks.size].to(device)
            box.model.train()
            box.schedule.set(0)
            first_s = _step_s(box, batch, clock)
            spent_s = 0.0 if settings.compile else first_s  # compiling takes minutes, but only in the first step
            took: list[float] = []
            while len(took) < MOST_STEPS and ranks.on_first(partial(operator.lt, spent_s, ENOUGH_S)):
                took.append(_step_s(box, batch, clock))
                spent_s += took[-1]
    finally:
        logging.getLogger("worker").removeHandler(collect)
    step_s = median(took or [first_s])
    return TrialSteps(
        first_s=first_s,
        step_s=step_s,
        peak_bytes=box.use.peak_memory_bytes(),
        share=len(batch),
        at_once=min(box.micro_batches.size, len(batch)),
        precision=box.precision,
        processes=ranks.size,
        reasons=box.reasons,
        warned=warned,
        mfu=box.use.utilisation(spec.unit_tokens / step_s) if step_s else None,
    )


def _step_s(box: Box, batch: Tensor, clock: Callable[[], float]) -> float:
    begun = clock()
    box.step.gradient(batch)
    box.step.apply()
    if box.device.type != "cpu":
        torch.accelerator.synchronize()
    return clock() - begun


def take_steps_apart(spec: RunSpec, settings: BoxSettings, processes: int, stop: threading.Event) -> TrialSteps:
    """Take the steps in `processes` separate processes, which end when `stop` is set. Raises OuterstepError with their
    last output."""
    with TemporaryDirectory(prefix="outerstep-doctor-") as directory:
        place = Path(directory)
        (place / ORDER).write_text(TrialOrder(spec=spec, settings=_box_settings(settings)).model_dump_json())
        command = [sys.executable, "-m", "outerstep.doctor.trial", directory]
        if processes > 1:
            torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
            command = [sys.executable, "-m", *torchrun, *command[1:]]
        code, words = _run(command, processes, place / "words", stop)
        faults = sorted(place.glob(FAULT.format("*")))
        if faults:
            raise OuterstepError(faults[0].read_text())
        if code:
            raise OuterstepError(_failure(code, words))
        return TrialSteps.model_validate_json((place / STEPS).read_text())


def _box_settings(settings: BoxSettings) -> BoxSettings:
    """Return the settings without the token, and without the log of inner steps, which is for the run's steps."""
    fields = BoxSettings.model_fields.keys() - {"log"}
    return BoxSettings.model_validate({name: getattr(settings, name) for name in fields})


def _run(command: list[str], processes: int, log: Path, stop: threading.Event) -> tuple[int, str]:
    """Run the command and return its exit code and output. All its processes end with this call."""
    environment = dict(os.environ)
    if processes > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // processes, 1)))
    with log.open("wb") as words:
        child = subprocess.Popen(command, env=environment, stdout=words, stderr=words)
        try:
            while child.poll() is None and not stop.wait(_POLL_S):
                pass
        finally:
            code = _end(child)
    if stop.is_set():
        raise Stopped("asked to stop")
    return code, log.read_text(errors="replace").strip()


def _end(child: subprocess.Popen[bytes]) -> int:
    """End `child` if necessary, and return its exit code. It gets SIGTERM because torchrun, which starts its processes
    in separate sessions, then ends them."""
    child.terminate()  # no effect if it has ended
    try:
        return child.wait(_TERM_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def _failure(code: int, words: str) -> str:
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL) or "(SIGKILL)" in words or "exitcode  : -9" in words:
        return "the system killed the process that took the step, most likely because host memory ran out"
    lines = words.splitlines()
    return f"the process that took the step exited with {code}: {lines[-1][-_SHOWN:] if lines else 'no output'}"


def main(directory: Path) -> None:
    """Run one of the processes."""
    transformers_logging.disable_progress_bar()
    order = TrialOrder.model_validate_json((directory / ORDER).read_text())
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        device, _ = start(order.settings, size)
        with group_of(device, size):
            steps = take_steps(order.spec, order.settings, device, ranks=Ranks.here())
    except (OuterstepError, ValueError, OSError) as error:
        (directory / FAULT.format(rank)).write_text(str(error))
        sys.exit(1)  # torchrun then ends the others
    if rank == 0:
        (directory / STEPS).write_text(steps.model_dump_json())


if __name__ == "__main__":
    main(Path(sys.argv[1]))


def judge_steps(seen: TrialSteps, spec: RunSpec, wanted: object) -> list[Finding]:
    found = [warning("step", each) for each in seen.warned]
    return [judge_choice(seen, wanted), *found, fine("step", step_in_words(seen, spec))]


def steps_timeout(seconds: float) -> Finding:
    said = f"no inner step within {duration_text(seconds)}, including loading the data"
    remedy = "check --device. Data from a URL are fetched first; what was fetched is kept"
    return wrong("step", said, remedy)


def judge_choice(seen: TrialSteps, wanted: object) -> Finding:
    """Judge the worker's choice of micro-batch; `wanted`: the setting micro_batch."""
    said = "; ".join(seen.reasons)
    if isinstance(wanted, int) and wanted > seen.share:
        remedy = f"--micro-batch {seen.share} does the same; auto takes as many as fit"
        return warning("step", f"{said}, which is more than a batch has: all run at once", remedy)
    if isinstance(wanted, int) and seen.share % wanted:
        rest = seen.share % wanted
        said = f"{said} does not divide the batch: the last micro-batch has only {rest}, but takes nearly as long"
        return warning("step", said, f"give a divisor of {seen.share}")
    if seen.at_once < seen.share and not isinstance(wanted, int):
        return fine("step", f"{said}; here {seen.at_once} at once")
    return fine("step", said)


def step_in_words(seen: TrialSteps, spec: RunSpec) -> str:
    rate = f"{count_text(spec.unit_tokens / seen.step_s)} tokens/s" if seen.step_s else "too fast to measure"
    used = f", {share_text(seen.mfu)} of the peak (MFU)" if seen.mfu is not None else ""
    peak = f", peak memory {bytes_text(seen.peak_bytes)}" if seen.peak_bytes is not None else ""
    each = " of each process" if seen.processes > 1 else ""
    said = (
        f"{duration(seen.step_s)} for {spec.unit_tokens} tokens in {seen.precision}: {rate}{used}{peak}{each}; the "
        f"first step {duration(seen.first_s)}. "
    )
    sync = spec.sync
    whose = " on the fastest worker, and are fewer on others" if sync.wait == "never" else ""
    return f"{said}A round's {sync.inner_steps} take {duration(sync.inner_steps * seen.step_s)}{whose}"


def duration(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else duration_text(seconds)
