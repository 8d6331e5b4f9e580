"""The demo: a coordinator and several workers on this machine, as separate processes, like in a real run."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from outerstep import rest
from outerstep.demo.processes import Child, Processes, unreachable, wait_until_ended, wait_until_ready
from outerstep.demo.spec import PROMPT, RUN
from outerstep.demo.summary import Summary, summarise, summary_text
from outerstep.display import Display
from outerstep.follow import ENDED, follow
from protocol.errors import Transient
from protocol.messages import RunDetail, Scope, TokenRequest
from protocol.spec.run import parse_spec

PATIENCE_S = 0.5  # between two looks at the run and at the processes
LEAVE_WITHIN_S = 60.0
DIGEST_WITHIN_S = 10.0
SAMPLE_BYTES = 400
NO_PROXY = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


@dataclass(frozen=True)
class DemoPlan:
    """A demo to run. `spec`: the spec of a run called RUN; `directory`: an existing, empty directory for data, logs and
    the trained model."""

    workers: int
    spec: str
    directory: Path


@dataclass(frozen=True)
class Trained:
    """An ended run on a coordinator that still runs. `seconds`: since the coordinator was started."""

    run: RunDetail
    client: rest.Client
    admin_token: str
    seconds: float


def run_demo(plan: DemoPlan, display: Display) -> tuple[Summary, str]:
    """Run the demo to its end. Return its summary as figures and as text. Raises ChildError if a process dies."""
    started = time.monotonic()
    with trained(plan, display) as it:
        sample = _sample(it.client, it.admin_token, plan.directory / "model")
        rounds, workers = list(it.client.rounds(RUN)), it.client.workers(RUN)
    summary = summarise(it.run, rounds, workers, seconds=time.monotonic() - started, sample=sample)
    return summary, summary_text(summary, it.run, PROMPT)


@contextmanager
def trained(plan: DemoPlan, display: Display) -> Iterator[Trained]:
    """Start a coordinator and the workers, and yield once the run has ended and the workers have left it. Raises
    ChildError if a process dies."""
    started = time.monotonic()
    for name in ("logs", "coordinator", "workers"):
        (plan.directory / name).mkdir()
    with Processes(plan.directory / "logs") as processes:
        data = plan.directory / "coordinator"
        coordinator = processes.start("coordinator", ["coordinator", "--data-dir", str(data), "--port", "0"], {})
        url = wait_until_ready(coordinator)
        admin_token = (data / "admin.token").read_text().strip()
        try:
            with rest.connect(url, admin_token, trust_env=False) as client:
                run = train_on(client, url, processes, plan, display)
                yield Trained(run, client, admin_token, time.monotonic() - started)
        except Transient as error:
            raise unreachable(coordinator) from error


def train_on(client: rest.Client, url: str, processes: Processes, plan: DemoPlan, display: Display) -> RunDetail:
    """Create the run, start the workers, and show the run until it ends and they have left. Return the ended run."""
    client.create_run(plan.spec)
    request = TokenRequest(scope=Scope.WORKER, note="the demo's workers", names=plan.workers)
    token = client.create_token(request).token
    from worker.allowing import options_for  # here, because `outerstep --help` must not import the worker

    # The user who starts the demo chose the spec, so everything it names is allowed.
    allowed = options_for(parse_spec(plan.spec))
    workers = [_start_worker(processes, index, url, token, plan.directory, allowed) for index in range(plan.workers)]
    _watch(client, processes, workers, display)
    for worker in workers:
        wait_until_ended(worker, LEAVE_WITHIN_S)  # by then it has reported its state
    return _final_run(client)


def _start_worker(processes: Processes, index: int, url: str, token: str, directory: Path, allowed: list[str]) -> Child:
    name = f"worker-{index}"
    state = directory / "workers" / name
    arguments = [
        "worker",
        url,
        "--run",
        RUN,
        "--name",
        name,
        "--state-dir",
        str(state),
        "--device",
        "cpu",
        *allowed,
    ]
    return processes.start(name, arguments, {"OUTERSTEP_TOKEN": token, "OMP_NUM_THREADS": "1", **NO_PROXY})


def _watch(client: rest.Client, processes: Processes, workers: list[Child], display: Display) -> None:
    """Show the run until it has ended. Raises ChildError if a process ends before it."""
    with display:
        for look in follow(client, RUN, patience_s=PATIENCE_S, sleep=time.sleep):
            display.show(look)
            processes.check()
            left = [worker for worker in workers if worker.process.poll() is not None]
            # The state is read after the process ended: a worker that left on its own leaves a run that is over.
            if left and client.run(RUN).state not in ENDED:
                raise left[0].failure("left before the run had ended")


def _final_run(client: rest.Client) -> RunDetail:
    """Return the run with its final state's digest, which the coordinator computes after publishing the last round."""
    deadline = time.monotonic() + DIGEST_WITHIN_S
    while (run := client.run(RUN)).state_digest is None and time.monotonic() < deadline:
        time.sleep(PATIENCE_S)
    return run


def _sample(client: rest.Client, token: str, directory: Path) -> str:
    """Export the trained model into `directory`. Return PROMPT and the model's continuation of it."""
    # Here, because torch takes seconds to import, and `outerstep --help` must not import it.
    import torch

    from outerstep.models import export_model
    from worker.export import sample

    torch.set_num_threads(1)  # a model this small is slower with several threads, and much slower on a busy machine
    model = export_model(client.http, RUN, token, directory)
    written = sample(model, PROMPT.encode(), SAMPLE_BYTES, torch.Generator().manual_seed(0))
    return PROMPT + written.decode(errors="replace")
