"""The `outerstep worker` process: everything around the training loop, and exit codes."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import httpx
import torch

from outerstep.common.connections import WrongVariable, error_text
from outerstep.common.exit_codes import Exit
from protocol.compiled import KERNELS
from protocol.errors import CodecError, NoCoordinator, NotUnderstood, OuterstepError, Problem, Remedy
from protocol.messages import HostValue, RunDetail, RunState
from worker.accounts.machine import host_facts
from worker.accounts.step_log import StepLog
from worker.allowing import allowed_by, permit
from worker.box import Box, check_suited, set_up
from worker.diloco import DiLoCo
from worker.errors import BoxError, DataError, ModelError, NotAllowed, StateDirBusy, Stopped
from worker.inner.micro_batch import is_out_of_memory, memory_error_of
from worker.joining.checkpoints import initial_parameters
from worker.link.client import Client, open_http
from worker.link.worker_token import with_worker_token
from worker.process import log_to_stderr, stop_on_signals
from worker.ranks import Ranks
from worker.settings import WorkerSettings
from worker.starting import group_of, start
from worker.state.state_dir import StateDir, rank_directory
from worker.train import train

log = logging.getLogger(__name__)


def run_worker(
    settings: WorkerSettings,
    *,
    ask: Callable[[str], bool] | None = None,
    end_process: Callable[[int], object] = os._exit,
) -> Exit:
    """Join the run, train until it ends, and return the exit code.

    `ask` asks the machine's owner a yes-or-no question; None if nobody can be asked. `end_process` is called if leaving
    after a signal takes longer than LEAVE_WITHIN_S.
    """
    log_to_stderr()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        device, why = start(settings, size)
    except ValueError as error:
        log.error("%s", error)
        return Exit.USAGE
    log.info("%s", why)
    try:
        stop = threading.Event()
        with group_of(device, size), stop_on_signals(stop, partial(end_process, Exit.DONE)):
            try:
                _work(settings, ask, device, stop)
            finally:
                stop.set()  # whatever is still being fetched is no longer needed
    except Exception as error:
        code, said = outcome(error)
        if said is None:
            log.exception("unexpected error; restarting this worker resumes its work")
        else:
            log.log(logging.INFO if code is Exit.DONE else logging.ERROR, "%s", said)
        return code
    return Exit.DONE


def outcome(error: Exception) -> tuple[Exit, str | None]:
    """Return the exit code of a worker that `error` has ended, and what the error means in words; None if it is
    unexpected."""
    match error:
        case Stopped():
            return Exit.DONE, "stopped"
        case Problem(slug="run-ended"):
            return Exit.DONE, error.detail
        case Problem():
            code = Exit.REFUSED if error.remedy is Remedy.REFUSED else Exit.RETRY
            return code, f"the coordinator rejected the request: {error}"
        case WrongVariable():
            return Exit.USAGE, str(error)
        case OuterstepError():
            return Exit.REFUSED if isinstance(error, _FINAL) else Exit.RETRY, str(error)
        case OSError() | httpx.HTTPError():
            return Exit.RETRY, error_text(error)
    if is_out_of_memory(error):
        reason = memory_error_of(error) or "no more is available"
        return Exit.REFUSED, f"not enough memory: {reason}; try --fit auto, or several GPUs (--gpus N)"
    return Exit.RETRY, None


# After these, the same command would fail again.
_FINAL = (BoxError, CodecError, DataError, ModelError, NoCoordinator, NotAllowed, NotUnderstood, StateDirBusy)


def _work(
    settings: WorkerSettings, ask: Callable[[str], bool] | None, device: torch.device, stop: threading.Event
) -> None:
    log.info("asking the coordinator at %s for the run %s", settings.url, settings.run)
    with open_http(settings.url, settings.ca) as http:
        up, down = settings.rates(Ranks.here().size)
        client = Client(http, settings.run, settings.token, stop=stop, max_up=up, max_down=down)
        client = with_worker_token(client, settings.name, settings.directory, Ranks.here())
        run = client.run_detail()
        if run.state in (RunState.FINISHED, RunState.STOPPED):
            log.info("the run %s is %s: nothing to do", run.name, run.state)
            return
        check_suited(run.spec, Ranks.here().size)
        permit(run.spec, allowed_by(settings), ask)
        check_state_directory(settings.directory, Ranks.here().rank)
        _train(settings, client, run, device, stop)


def check_state_directory(path: Path, rank: int) -> None:
    """Raise BoxError if process `rank` of a worker cannot keep its state in `path`, and StateDirBusy if another worker
    uses it, before a model is loaded for nothing."""
    try:
        with StateDir(rank_directory(path, rank)):
            pass
    except OSError as error:
        raise BoxError(
            f"--state-dir {path} cannot hold this worker's state: {error_text(error)}; choose another directory"
        ) from error


def _train(
    settings: WorkerSettings, client: Client, run: RunDetail, device: torch.device, stop: threading.Event
) -> None:
    ranks = Ranks.here()
    with _step_log(settings, ranks) as step_log:
        box = set_up(run.spec, settings, device, stop=stop, ranks=ranks, state_dir=settings.directory)
        _log_setup(run.name, settings, box)
        diloco = DiLoCo(
            box.model,
            box.optimizers,
            client=client,
            run=run,
            name=settings.name,
            state_dir=settings.directory,
            data=box.data.summary,
            evaluate=box.evaluate,
            probe=box.probe,
            initial=initial_parameters(box.model, run.spec.model, client),
            scaler=box.step.scaler,
            host=host_facts(device) | _facts_of(box),
            frozen=box.frozen,
            report=settings.report,
            offload=box.settings.offload,
            use=box.use,
            ranks=ranks,
        )
        log.info("joining the run")
        with closing(box.data), diloco:
            train(diloco, box, step_log)


@contextmanager
def _step_log(settings: WorkerSettings, ranks: Ranks) -> Iterator[StepLog | None]:
    """Yield the step log, which rank 0 writes; None if there is none. Raises BoxError if it cannot be written."""
    if settings.step_log is None or not ranks.is_first:
        yield None
        return
    with ExitStack() as opened:
        try:
            step_log = opened.enter_context(StepLog(settings.step_log))
        except OSError as error:
            raise BoxError(f"OUTERSTEP_STEP_LOG={settings.step_log}: {error.strerror}") from error
        yield step_log


def _facts_of(box: Box) -> dict[str, HostValue]:
    """Return what the coordinator shows about the box's settings."""
    adapted = box.spec.model.lora is not None
    return {"precision": box.precision} | ({"base": box.base} if adapted else {})


def _log_setup(run: str, settings: WorkerSettings, box: Box) -> None:
    parameters = sum(each.numel() for each in box.model.parameters() if each.requires_grad or box.frozen is None)
    parameters += box.frozen.elements if box.frozen is not None else 0
    log.info(
        "run %s as %s: %d parameters on %s in %s%s, %d sequences at once; kernels %s",
        run,
        settings.name,
        parameters,
        box.device,
        box.precision,
        ", the frozen ones in 4 bits" if box.base == "nf4" else "",
        min(box.micro_batches.size, box.spec.inner.batch_size // box.ranks.size),
        KERNELS,
    )
