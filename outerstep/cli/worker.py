"""The command `outerstep worker`."""

import logging
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import typer

from outerstep.cli.errors import UsageError, import_extra, validated
from outerstep.cli.options import (
    AllowFactoryOption,
    CaOption,
    DataRootOption,
    LogFileOption,
    MaxParametersOption,
    TokenFileOption,
    TokenOption,
    check_log,
    checked_url,
    find_token,
    owner_at_terminal,
)
from protocol import __version__

log = logging.getLogger(__name__)

FLAGS = {
    "url": "URL",
    "run": "--run",
    "token": "--token",
    "ca": "--ca",
    "name": "--name",
    "state_dir": "--state",
    "device": "--device",
    "mode": "--mode",
    "data": "--data",
    "allow_factory": "--allow-factory",
    "data_root": "--data-root",
    "max_parameters": "--max-parameters",
    "tell": "--tell",
    "threads": "--threads",
    "data_cache": "--data-cache",
    "data_cache_gb": "--data-cache-gb",
    "micro_batch": "--micro-batch",
    "precision": "--precision",
    "parameters": "--parameters",
    "optimizer_state": "--optimizer-state",
    "fit": "--fit",
    "offload": "--offload",
    "base": "--base",
    "compile": "--compile",
    "activation_checkpointing": "--activation-checkpointing",
    "peak_flops": "--peak-flops",
    "max_up": "--max-up",
    "max_down": "--max-down",
    "log": "--log",
    "log_file": "--log-file",
}

DataCacheOption = Annotated[
    Path | None,
    typer.Option(
        "--data-cache",
        help="Directory for shards of token sets from a URL; workers may share it. Default: ~/.cache/outerstep/shards.",
    ),
]
DataCacheGbOption = Annotated[
    float | None, typer.Option("--data-cache-gb", help="Maximum size of the shards in GB. Default: 20.")
]


def worker(
    url: Annotated[str, typer.Argument(metavar="URL", help="The coordinator's address.", show_default=False)],
    run: Annotated[str, typer.Option("--run", help="The run to join.", show_default=False)],
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
    name: Annotated[
        str | None, typer.Option("--name", help="This worker's name in the run. Default: this machine's name.")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            help="Directory for this worker's local checkpoint. Default: ~/.local/state/outerstep/RUN/NAME.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="auto, cpu, cuda, cuda:1, mps … Default: auto, the fastest available."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", min=1, help="GPUs of this machine to use as one worker, by torchrun. Default: 1."),
    ] = None,
    mode: Annotated[
        Literal["auto", "ddp", "fsdp"],
        typer.Option("--mode", help="How several GPUs share the model: a replica each (ddp), or a shard each (fsdp)."),
    ] = "auto",
    data: Annotated[
        str | None,
        typer.Option("--data", help="Where this machine has the training set. Default: data.source of the run's spec."),
    ] = None,
    allow_factory: AllowFactoryOption = None,
    data_root: DataRootOption = None,
    max_parameters: MaxParametersOption = None,
    tell: Annotated[
        Literal["all", "some", "nothing"],
        typer.Option(
            "--tell", help="What to report about this machine to the coordinator; less than all needs a --name."
        ),
    ] = "all",
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="CPU threads of torch. Default: torch's own choice.")
    ] = None,
    data_cache: DataCacheOption = None,
    data_cache_gb: DataCacheGbOption = None,
    micro_batch: Annotated[
        str | None,
        typer.Option(
            "--micro-batch",
            metavar="auto|N",
            help="Sequences per forward pass; the batch size is the run's. Default: auto, as many as fit.",
        ),
    ] = None,
    precision: Annotated[
        Literal["float8", "bf16", "fp16", "tf32", "fp32"] | None,
        typer.Option("--precision", help="Precision of the arithmetic. Default: bf16 on CUDA, else fp32."),
    ] = None,
    parameters: Annotated[
        Literal["fp32", "bf16"] | None,
        typer.Option(
            "--parameters",
            help="Type of the parameters in memory; bf16 takes half, and rounds steps stochastically. Default: fp32.",
        ),
    ] = None,
    optimizer_state: Annotated[
        Literal["fp32", "bf16", "8bit"] | None,
        typer.Option("--optimizer-state", help="How to hold the optimizer's moments. Default: as the parameters."),
    ] = None,
    fit: Annotated[
        Literal["auto"] | None,
        typer.Option("--fit", help="auto: choose the settings with which the model fits into memory."),
    ] = None,
    offload: Annotated[
        bool,
        typer.Option("--offload", help="Keep gradients and moments in host memory: less GPU memory, more time."),
    ] = False,
    base: Annotated[
        Literal["full", "nf4"] | None,
        typer.Option("--base", help="How to hold the frozen model of adapters: fp32, or 4 bits. Default: the run's."),
    ] = None,
    compile_model: Annotated[bool, typer.Option("--compile", help="Compile the model (torch.compile).")] = False,
    activation_checkpointing: Annotated[
        bool,
        typer.Option("--activation-checkpointing", help="Use less memory for activations, and more time."),
    ] = False,
    peak_flops: Annotated[
        float | None,
        typer.Option("--peak-flops", help="Peak FLOP/s of the device, for the MFU. Default: from a table of GPUs."),
    ] = None,
    max_up: Annotated[
        str | None,
        typer.Option("--max-up", metavar="RATE", help="Maximum upload rate: 8mbit. Default: unlimited."),
    ] = None,
    max_down: Annotated[
        str | None, typer.Option("--max-down", metavar="RATE", help="Maximum download rate. Default: unlimited.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option("--log", help="File to append every inner step's loss to, as JSON lines.")
    ] = None,
    log_file: LogFileOption = None,
) -> None:
    """Join a run as a worker and train until it ends.

    A worker only makes outbound requests to the coordinator, so it needs no open port. After a crash, the same command
    continues where this worker was. SIGTERM or Ctrl-C leaves the run cleanly.

    The run's spec comes from somebody else, so the worker restricts it: it runs only code that --allow-factory names,
    and reads data, tokenizers and weights only below --data-root, apart from what ships with Outerstep and what --data
    names. If something is not allowed, or the model has more than --max-parameters, it asks at a terminal; elsewhere it
    exits with code 3 and says which option to add.

    \b
    Example:
      OUTERSTEP_TOKEN=… outerstep worker https://coordinator.example.org --run my-run
      outerstep worker https://coordinator.example.org --run my-run --gpus 8
    """
    settings = import_extra("worker.settings", extra="worker", command="outerstep worker")
    given: dict[str, Any] = {
        "url": checked_url(url),
        "run": run,
        "token": find_token(token, token_file, os.environ),
        "ca": None if ca is None else str(ca),
        "name": name,
        "state_dir": state,
        "device": device,
        "mode": mode,
        "data": data,
        "allow_factory": allow_factory or None,
        "data_root": data_root or None,
        "max_parameters": max_parameters,
        "tell": tell,
        "threads": threads,
        "data_cache": data_cache,
        "data_cache_gb": data_cache_gb,
        "micro_batch": micro_batch,
        "precision": precision,
        "parameters": parameters,
        "optimizer_state": optimizer_state,
        "fit": fit,
        "offload": offload,
        "base": base,
        "compile": compile_model,
        "activation_checkpointing": activation_checkpointing,
        "peak_flops": peak_flops,
        "max_up": max_up,
        "max_down": max_down,
        "log": log,
        "log_file": log_file,
    }
    joining = validated(settings.WorkerSettings, given, FLAGS)
    for flag, path in (("--log", joining.log), ("--log-file", joining.log_file)):
        check_log(flag, path)
    if gpus is not None and gpus > 1 and "LOCAL_RANK" not in os.environ:
        start_on(gpus, joining.device)
    raise typer.Exit(_agent(joining).run_worker(joining, ask=owner_at_terminal()))


def _agent(settings: Any) -> ModuleType:
    """Log a line, then import and return `worker.agent`, which imports torch for many seconds."""
    process = import_extra("worker.process", extra="worker", command="outerstep worker")
    process.log_to_stderr()
    log.info("outerstep %s, worker %s: importing torch and transformers", __version__, settings.name)
    return import_extra("worker.agent", extra="worker", command="outerstep worker")


def start_on(gpus: int, device: str) -> None:
    """Replace this process by torchrun, which starts this command once per GPU. Raises UsageError if there are fewer
    of them."""
    starting = import_extra("worker.starting", extra="worker", command="outerstep worker")
    try:
        starting.check_gpus(gpus, device)
    except ValueError as error:
        raise UsageError(str(error)) from error
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // gpus, 1)))
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    arguments = [sys.executable, "-m", *torchrun, "-m", "--", "outerstep", *sys.argv[1:]]
    os.execv(sys.executable, arguments)  # this command again # nosec B606
