"""Whole runs with workers on a GPU, and with workers on GPU and CPU in one run: all hold the same state in the end."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from harness.coordinator import InThread, coordinator_thread
from harness.member import waiting
from outerstep.common.exit_codes import Exit
from tests.support.shown import finished, workers_of
from tests.support.text import write_chapters
from tests.support.workers import worker_settings
from worker.agent import run_worker

pytestmark = pytest.mark.slow

SPEC = """
name = "text"
[model]
preset = "tiny"
[data]
source = "{source}"
sequence_length = 64
[inner]
optimizer = "adamw"
batch_size = 8
learning_rate = 8e-3
warmup_steps = 10
[outer]
learning_rate = 1.0
momentum = 0.4
[sync]
rounds = {rounds}
inner_steps = 12
fragment_elements = 50_000
upload_codec = "{upload}"
{sync}
[members]
min_workers = {workers}
grace_min_s = 60
[evaluation]
max_tokens = 4096
"""

CLASSIC, STREAMING, NEVER = "", 'overlap = 4\noffsets = "spread"', 'wait = "never"'


def play(running: InThread, tmp_path: Path, devices: list[str]) -> None:
    """Let a worker on each of `devices` train until the run is over."""

    def work(name: str, device: str) -> Exit:
        return run_worker(worker_settings(running, "text", tmp_path / name, name=name, device=device))

    with ThreadPoolExecutor() as threads:
        assert set(threads.map(work, ("w0", "w1"), devices)) == {Exit.DONE}


@pytest.mark.parametrize(
    ("upload", "sync", "mixed"),
    [
        pytest.param("int8", CLASSIC, False, id="int8"),
        pytest.param("int8", CLASSIC, True, id="int8, mixed", marks=pytest.mark.nightly),
        pytest.param("int4", STREAMING, True, id="int4, overlap, mixed"),
        pytest.param("ternary", STREAMING, False, id="ternary, overlap", marks=pytest.mark.nightly),
        pytest.param("int8", NEVER, True, id="int8, never, mixed", marks=pytest.mark.nightly),
    ],
)
def test_all_replicas_end_with_the_same_bits_and_have_learned(
    upload: str, sync: str, mixed: bool, tmp_path: Path, device: torch.device
) -> None:
    devices = [str(device), "cpu"] if mixed else [str(device)] * 2
    text = write_chapters(
        tmp_path / "text", words="all work and no play makes jack a dull boy", chapters=8, repeats=200
    )
    with coordinator_thread(tmp_path / "coordinator") as running:
        running.create_run(SPEC.format(source=text, rounds=6, upload=upload, sync=waiting(sync), workers=2))
        play(running, tmp_path, devices)
        run, workers = finished(running, "text"), workers_of(running, "text")
        with running.client() as http:
            rounds = http.get("/v1/runs/text/rounds").json()["items"]
    assert {worker.state_digest for worker in workers} == {run.state_digest}
    assert run.divergences == 0
    assert [str(worker.host["device"]).split(":")[0] for worker in workers] == devices
    assert run.held_out_loss is not None
    assert run.held_out_loss < rounds[-1]["held_out_loss"] - 0.5
