"""Inner steps on trial: those that the worker takes, in processes of their own, whose end nothing here has to fear.

`python -m outerstep.doctor.trial DIRECTORY` is such a process, of several by torchrun. It reads an `Order`, and rank 0
writes the `Steps`; whoever fails says why.
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

from protocol.errors import OuterstepError
from protocol.spec.run import RunSpec
from worker.box import Box, set_up
from worker.errors import Stopped
from worker.ranks import ALONE, Ranks
from worker.settings import BoxSettings
from worker.starting import group_of, start

ORDER, STEPS, FAULT = "order.json", "steps.json", "fault-{}.txt"
MOST_STEPS, ENOUGH_S = 5, 20.0  # of inner steps after the first; none where that alone has taken so long
_POLL_S = 0.2
_TERM_S = 4.0  # torchrun may take to end its processes
_SHOWN = 300  # characters of a process's last words


class Order(BaseModel):
    spec: RunSpec
    settings: BoxSettings


class Steps(BaseModel):
    """A few inner steps: the first has what comes once only, as compiling and the optimizer's memory. `at_once`:
    sequences of the `share` of the batch that each process has, in the end; `reasons`: why mode and micro-batch are
    what they are; `warned`: what the worker would warn of."""

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
) -> Steps:
    """Take a few inner steps as a worker would, and forget the model. Raises what a worker ends with."""
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
            spent_s = 0.0 if settings.compile else first_s  # compiling takes minutes, of which the next has none
            took: list[float] = []
            while len(took) < MOST_STEPS and ranks.on_first(partial(operator.lt, spent_s, ENOUGH_S)):
                took.append(_step_s(box, batch, clock))
                spent_s += took[-1]
    finally:
        logging.getLogger("worker").removeHandler(collect)
    step_s = median(took or [first_s])
    return Steps(
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


def take_steps_apart(spec: RunSpec, settings: BoxSettings, processes: int, stop: threading.Event) -> Steps:
    """Take the steps in `processes` other processes, which end when `stop` is set. Raises OuterstepError, with their
    last words."""
    with TemporaryDirectory(prefix="outerstep-doctor-") as directory:
        place = Path(directory)
        (place / ORDER).write_text(Order(spec=spec, settings=_of_a_box(settings)).model_dump_json())
        command = [sys.executable, "-m", "outerstep.doctor.trial", directory]
        if processes > 1:
            torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
            command = [sys.executable, "-m", *torchrun, *command[1:]]
        code, words = _run(command, processes, place / "words", stop)
        faults = sorted(place.glob(FAULT.format("*")))
        if faults:
            raise OuterstepError(faults[0].read_text())
        if code:
            raise OuterstepError(_last_words(code, words))
        return Steps.model_validate_json((place / STEPS).read_text())


def _of_a_box(settings: BoxSettings) -> BoxSettings:
    """Return those without the token, and without a log of inner steps, which is for those of the run."""
    fields = BoxSettings.model_fields.keys() - {"log"}
    return BoxSettings.model_validate({name: getattr(settings, name) for name in fields})


def _run(command: list[str], processes: int, log: Path, stop: threading.Event) -> tuple[int, str]:
    """Return the exit code and the last of what was written. All processes end with this."""
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
    """Return the exit code of `child`, which is ended if it has not: by SIGTERM, as torchrun has started its processes
    in sessions of their own, and ends them then."""
    child.terminate()  # which does nothing to one that has ended
    try:
        return child.wait(_TERM_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def _last_words(code: int, words: str) -> str:
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL) or "(SIGKILL)" in words or "exitcode  : -9" in words:
        return "the system has killed the process that took the step: the host's memory did not suffice, most likely"
    lines = words.splitlines()
    return f"the process that took the step ended with {code}: {lines[-1][-_SHOWN:] if lines else 'without a word'}"


def main(directory: Path) -> None:
    """Be one of the processes."""
    transformers_logging.disable_progress_bar()
    order = Order.model_validate_json((directory / ORDER).read_text())
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        device, _ = start(order.settings, size)
        with group_of(device, size):
            steps = take_steps(order.spec, order.settings, device, ranks=Ranks.here())
    except (OuterstepError, ValueError, OSError) as error:
        (directory / FAULT.format(rank)).write_text(str(error))
        sys.exit(1)  # with which torchrun ends the others
    if rank == 0:
        (directory / STEPS).write_text(steps.model_dump_json())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
