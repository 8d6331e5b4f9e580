"""The `outerstep worker` process: signals, exit codes, and all that surrounds the training loop."""

import logging
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

import httpx
import torch

from protocol.compiled import KERNELS
from protocol.errors import CodecError, OuterstepError, Problem, Remedy
from protocol.exit_codes import Exit
from protocol.messages import RunDetail, RunState
from worker.data.opening import open_training_set
from worker.diloco import DiLoCo
from worker.errors import DataError, ModelError, StateDirBusy, Stopped
from worker.inner.evaluation import evaluate
from worker.inner.optimizers import build_inner_optimizer
from worker.link.client import Client, open_http
from worker.models.building import build_model, check_vocabulary
from worker.settings import WorkerSettings
from worker.train import train

# From the first signal to the end, whatever hangs: less than the 10 s after which containers are killed.
LEAVE_WITHIN_S = 9.0

log = logging.getLogger(__name__)


def run_worker(settings: WorkerSettings, *, end_process: Callable[[int], object] = os._exit) -> Exit:
    """Join the run, train until it ends, and return the exit code.

    `end_process` is called if leaving after a signal takes longer than LEAVE_WITHIN_S.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        device = choose_device(settings.device)
    except ValueError as error:
        log.error("%s", error)
        return Exit.USAGE
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    try:
        with stop_on_signals(end_process) as stop:
            _work(settings, device, stop)
    except Stopped:
        log.info("stopped")
    except Problem as problem:
        return _code_of(problem)
    except (CodecError, DataError, ModelError, StateDirBusy) as error:
        log.error("%s", error)
        return Exit.REFUSED
    except (OuterstepError, OSError, httpx.HTTPError) as error:
        log.error("%s: %s", type(error).__name__, error)
        return Exit.RETRY
    except Exception:
        log.exception("an unexpected fault; starting this worker again resumes its work")
        return Exit.RETRY
    return Exit.DONE


def choose_device(name: str) -> torch.device:
    """Return the device called `name`; "auto" is CUDA, MPS or the CPU, the first that is there. Raises ValueError for a
    device that this machine lacks."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {name!r} cannot be used: {reason}; use auto, cpu, cuda, cuda:1 or mps") from error
    return device


def _work(settings: WorkerSettings, device: torch.device, stop: threading.Event) -> None:
    with open_http(settings.url) as http:
        client = Client(http, settings.run, settings.token, stop=stop)
        run = client.run_detail()
        if run.state in (RunState.FINISHED, RunState.STOPPED):
            log.info("the run %s is %s: nothing to do", run.name, run.state)
            return
        _train(settings, client, run, device, stop)


def _train(
    settings: WorkerSettings, client: Client, run: RunDetail, device: torch.device, stop: threading.Event
) -> None:
    spec = run.spec
    if spec.data.source == "custom":
        raise DataError(
            f"the run {run.name} has data.source = 'custom': its workers are scripts of their own, with DiLoCo"
        )
    model = build_model(spec, device)
    data = open_training_set(spec, check=partial(check_vocabulary, model), stop=stop)
    optimizer = build_inner_optimizer(model, spec.inner)
    measure = partial(evaluate, model, data, spec.evaluation.max_tokens, device) if data.held_out_tokens else None
    parameters = sum(parameter.numel() for parameter in model.parameters())
    log.info("run %s as %s: %d parameters on %s; kernels %s", run.name, settings.name, parameters, device, KERNELS)
    diloco = DiLoCo(
        model,
        optimizer,
        client=client,
        run=run,
        name=settings.name,
        state_dir=settings.directory,
        data=data.summary,
        evaluate=measure,
        host=host_facts(device),
    )
    with diloco:
        train(diloco, model, optimizer, data, device)


def host_facts(device: torch.device) -> dict[str, str | int | float]:
    """Return the facts about this machine that the coordinator shows."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "host": platform.node(),
        "device": f"{device}: {name}",
        "threads": torch.get_num_threads(),
        "kernels": KERNELS,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


@contextmanager
def stop_on_signals(end_process: Callable[[int], object]) -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and SIGINT set: finish the inner step, hand in what is done, leave.

    A second signal ends the process at once. So does `end_process`, called if the worker does not leave in time.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # whoever runs a worker in a thread has the signals
        return

    def give_up() -> None:
        log.warning("leaving has taken %.0f s: gone without goodbye; the lease ends by itself", LEAVE_WITHIN_S)
        end_process(Exit.DONE)

    last_resort = threading.Timer(LEAVE_WITHIN_S, give_up)
    last_resort.daemon = True

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if not stop.is_set():
            stop.set()
            last_resort.start()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        last_resort.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def _code_of(problem: Problem) -> Exit:
    if problem.slug == "run-ended":
        log.info("%s", problem.detail)
        return Exit.DONE
    log.error("the coordinator refuses: %s", problem)
    return Exit.REFUSED if problem.remedy is Remedy.REFUSED else Exit.RETRY
