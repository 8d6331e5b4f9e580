"""The command `outerstep worker`. Its options are fields of `worker.settings.WorkerSettings`."""

import logging
import os
import sys
from types import ModuleType
from typing import Annotated, Any

import typer

from outerstep.cli.errors import UsageError, check_not_hidden, import_extra, validated
from outerstep.cli.options import TokenFileOption, check_log, find_token, owner_at_terminal, with_settings
from protocol import __version__

check_not_hidden("worker")

from worker.settings import BoxSettings, WorkerSettings  # noqa: E402

log = logging.getLogger(__name__)

# The other settings are properties of the machine, for which an environment variable is enough.
OPTIONS = (
    "run",
    "ca",
    "name",
    "state_dir",
    "device",
    "gpus",
    "parallel",
    "data",
    "allow_code",
    "data_root",
    "report",
    "micro_batch",
    "precision",
    "param_dtype",
    "optimizer_state",
    "fit",
    "offload",
    "lora_base",
    "compile",
    "activation_checkpointing",
)
FLAGS = {"url": "URL", "token": "--token-file"}

UrlArgument = Annotated[
    str | None, typer.Argument(metavar="URL", help="The coordinator's address. Required, unless OUTERSTEP_URL is set.")
]

with_permissions = with_settings(BoxSettings, ("allow_code", "data_root"))


@with_settings(WorkerSettings, OPTIONS)
def worker(*, url: UrlArgument = None, token_file: TokenFileOption = None, given: dict[str, Any]) -> None:
    """Join a run as a worker and train until it ends.

    A worker only makes outbound requests to the coordinator, so it needs no open port. After a crash, the same command
    continues where this worker was. SIGTERM or Ctrl-C leaves the run cleanly.

    The token is in --token-file or in OUTERSTEP_TOKEN. Each option can also be an environment variable:
    OUTERSTEP_STATE_DIR for --state-dir, and so on. Some settings of the machine are only environment variables:
    OUTERSTEP_MAX_UP, _MAX_DOWN, _MAX_PARAMETERS, _DATA_CACHE, _DATA_CACHE_GB, _PEAK_FLOPS, _STEP_LOG; docs/settings.md
    describes them. OMP_NUM_THREADS sets torch's CPU threads.

    The run's spec comes from somebody else, so the worker restricts it: it runs only code that --allow-code names, and
    reads data, tokenizers and weights only below --data-root, apart from what ships with Outerstep and what --data
    names. If something is not allowed, it asks at a terminal; elsewhere it exits with code 3 and says which option to
    add.

    \b
    Example:
      OUTERSTEP_TOKEN=… outerstep worker https://coordinator.example.org --run my-run
      outerstep worker https://coordinator.example.org --run my-run --token-file join.token --gpus 8
    """
    settings = settings_of(url, token_file, given)
    check_log("OUTERSTEP_STEP_LOG", settings.step_log)
    start_on_gpus(settings)
    raise typer.Exit(_agent(settings).run_worker(settings, ask=owner_at_terminal()))


def settings_of(url: str | None, token_file: Any, given: dict[str, Any]) -> WorkerSettings:
    """Return the settings from the command line, the environment and the defaults. Raises UsageError."""
    given = given | {"url": url, "token": find_token(None, token_file, os.environ)}
    return validated(WorkerSettings, given, FLAGS)


def _agent(settings: WorkerSettings) -> ModuleType:
    """Log a line, then import and return `worker.agent`, which imports torch for many seconds."""
    process = import_extra("worker.process", extra="worker", command="outerstep worker")
    process.log_to_stderr()
    log.info("outerstep %s, worker %s: importing torch and transformers", __version__, settings.name)
    return import_extra("worker.agent", extra="worker", command="outerstep worker")


def start_on_gpus(settings: WorkerSettings) -> None:
    """With several --gpus, replace this process by torchrun, which starts this command once per GPU. Raises UsageError
    if there are fewer of them."""
    gpus = settings.gpus or 1
    if gpus == 1 or "LOCAL_RANK" in os.environ:
        return
    starting = import_extra("worker.starting", extra="worker", command="outerstep worker")
    try:
        starting.check_gpus(gpus, settings.device)
    except ValueError as error:
        raise UsageError(str(error)) from error
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // gpus, 1)))
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    arguments = [sys.executable, "-m", *torchrun, "-m", "--", "outerstep", *sys.argv[1:]]
    os.execv(sys.executable, arguments)  # this command again # nosec B606
