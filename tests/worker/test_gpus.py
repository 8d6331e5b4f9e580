"""`outerstep worker --gpus N`: one command, and torchrun starts a process for each. Here without GPUs, on two processes
of the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.coordinator import InThread, coordinator_thread
from protocol.messages import RunState, Scope
from tests.support.specs import tiny_spec
from tests.support.text import write_chapters
from tests.worker.runs import shown


def losses(running: InThread, directory: Path, name: str, *options: str) -> list[float]:
    """The loss of every inner step of a worker that trains the run `name` to its end."""
    log, state = directory / f"{name}.jsonl", directory / name
    command = [sys.executable, "-m", "outerstep", "worker", running.url, "--run", name, "--device", "cpu", *options]
    command += ["--data-root", str(directory)]
    variables = {"OUTERSTEP_TOKEN": running.token(Scope.WORKER), "OUTERSTEP_STEP_LOG": str(log), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--name", "a", "--state-dir", str(state)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert shown(running, name).state is RunState.FINISHED
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


@pytest.mark.nightly
def test_replicas_and_shards_train_as_one_process_does(tmp_path: Path) -> None:
    """On the same units, the batch is shared, in micro-batches as well, and the gradient is that of all of it."""
    text = write_chapters(tmp_path / "text", chapters=4, repeats=20)
    ways = {
        "one": [],
        "ddp": ["--gpus", "2", "--parallel", "ddp", "--micro-batch", "1"],
        "fsdp": ["--gpus", "2", "--parallel", "fsdp", "--micro-batch", "1", "--activation-checkpointing"],
    }
    with coordinator_thread(tmp_path / "coordinator") as running:
        found = {}
        for name, options in ways.items():
            running.create_run(tiny_spec(name, text, seed=0, rounds=3, min_workers=1))
            found[name] = losses(running, tmp_path, name, *options)
    assert len(found["one"]) == 15
    assert found["one"][-1] < found["one"][0] - 0.5
    for name in ("ddp", "fsdp"):
        assert found[name] == pytest.approx(found["one"], rel=1e-3)
