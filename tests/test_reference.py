"""A real run (processes, HTTP, SQLite) equals a single-process DiLoCo written independently, bit for bit. One with
workers in threads is for `make test`."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.coordinator import InThread, Running, coordinator_thread
from outerstep.common.exit_codes import Exit
from protocol.messages import CheckpointDetail, Scope
from protocol.spec.run import RunSpec, parse_spec
from protocol.wire import Payload
from tests.support.cases import in_the_night
from tests.support.reference import fragment_bounds, run_reference
from tests.support.specs import tiny_spec
from tests.support.text import write_text
from tests.support.workers import ForkedWorker
from tests.worker.runs import work

pytestmark = pytest.mark.slow

WORKERS = 3
NAMES = [f"w{index}" for index in range(WORKERS)]


def final_state(running: Running, run: str) -> tuple[CheckpointDetail, np.ndarray]:
    """The last checkpoint and its θ, as one vector."""
    with running.client() as client:
        reply = client.get(f"/v1/runs/{run}/checkpoints/latest").raise_for_status()
        checkpoint = CheckpointDetail.model_validate(reply.json())
        parts = []
        for fragment in checkpoint.fragments:
            body = client.get(f"/v1/runs/{run}/checkpoints/{checkpoint.round}/fragments/{fragment.fragment}")
            both = np.empty(2 * fragment.elements, np.float32)
            Payload.from_bytes(body.raise_for_status().content).decode(both)
            parts.append(both[: fragment.elements])
    return checkpoint, np.concatenate(parts)


def in_processes(running: InThread, run: str, directory: Path) -> None:
    token = running.token(Scope.WORKER)
    workers = [ForkedWorker(running.url, run, name, token, directory / name) for name in NAMES]
    for worker in workers:
        worker.start()
    for worker in workers:
        assert worker.wait() == 0, worker.log.read_text()


def in_threads(running: InThread, run: str, directory: Path) -> None:
    with ThreadPoolExecutor(WORKERS) as threads:
        assert set(threads.map(partial(work, running, directory, run), NAMES)) == {Exit.DONE}


def run_for_real(
    tmp_path: Path, spec: str, play: Callable[[InThread, str, Path], None]
) -> tuple[CheckpointDetail, np.ndarray, list[dict[str, Any]]]:
    name = parse_spec(spec).name
    with coordinator_thread(tmp_path / "data") as running:
        running.create_run(spec)
        play(running, name, tmp_path)
        checkpoint, theta = final_state(running, name)
        with running.client() as client:
            told = client.get(f"/v1/runs/{name}/workers").json()["items"]
    return checkpoint, theta, told


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("upload", "download", "play"),
    [
        ("int8", "int8", in_threads),
        in_the_night("fp32", "fp32", in_processes),
        pytest.param("int8", "int8", in_processes, marks=pytest.mark.system),
        in_the_night("ternary", "int4", in_processes),
    ],
)
def test_three_workers_and_four_rounds_equal_the_reference_bit_for_bit(
    tmp_path: Path, upload: str, download: str, play: Callable[[InThread, str, Path], None]
) -> None:
    text = write_text(tmp_path / "text", seed=1)
    codecs = f'upload_codec = "{upload}"\ndownload_codec = "{download}"'
    spec = tiny_spec("reference", text, seed=7, rounds=4, min_workers=WORKERS, sync=codecs)
    checkpoint, theta, told = run_for_real(tmp_path, spec, play)
    parsed: RunSpec = parse_spec(spec)
    reference = run_reference(parsed, WORKERS)

    assert checkpoint.round == parsed.sync.rounds
    assert np.array_equal(theta.view(np.uint32), reference.theta.numpy().view(np.uint32))
    bounds = fragment_bounds(len(theta), parsed.sync.fragment_elements)
    assert [fragment.state_digest for fragment in checkpoint.fragments] == reference.digests(bounds)
    assert [worker["state_digest"] for worker in told] == [checkpoint.state_digest] * WORKERS

    if upload != "ternary":  # where it rounds otherwise, a value is sent or is not
        by_torch = run_reference(parsed, WORKERS, outer="torch")
        assert np.allclose(theta, by_torch.theta.numpy(), rtol=0, atol=2e-3 if upload == "int8" else 2e-5)
    assert not np.allclose(theta, run_reference(parsed, WORKERS - 1).theta.numpy(), rtol=0, atol=2e-3)
