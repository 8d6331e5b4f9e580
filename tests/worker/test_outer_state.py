"""The worker's outer state: stepped in place, its digest taken when it is wanted."""

import errno
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.member import pack_frames
from protocol.codecs import CODECS
from protocol.errors import WireError
from protocol.fragments import TensorSpec, plan_fragments
from protocol.outer_step import outer_step
from protocol.spec.sections import OuterSpec
from protocol.wire import CHUNK_ELEMENTS, DeltaHeader, Payload, pack_header
from worker.errors import Resync
from worker.state.outer_state import OuterState

N = CHUNK_ELEMENTS + 1000
LAYOUT = plan_fragments([TensorSpec(name="w", shape=[N])], N)
OUTER = OuterSpec(learning_rate=0.7, momentum=0.9)


@pytest.fixture(params=[False, True], ids=["in memory", "in files"])
def state(request: pytest.FixtureRequest, tmp_path: Path) -> OuterState:
    state = OuterState(LAYOUT, OUTER, pin_memory=False, mapped_in=tmp_path if request.param else None)
    generator = torch.Generator().manual_seed(1)
    state.set(0, torch.randn(N, generator=generator), torch.randn(N, generator=generator))
    return state


def delta_bytes(values: np.ndarray, codec: Any, base: bytes) -> bytes:
    frames = pack_frames(values, CODECS[codec], zstd=False)
    header = DeltaHeader(
        run="r", round=0, fragment=0, codec=codec, elements=len(values), chunk_elements=CHUNK_ELEMENTS,
        frame_bytes=[len(frame) for frame in frames], base=base, contributors=[],
    )  # fmt: skip
    return pack_header(header) + b"".join(frames)


def delta(values: np.ndarray, codec: Any, base: bytes) -> Payload:
    return Payload.from_bytes(delta_bytes(values, codec, base))


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_a_step_chunk_by_chunk_is_the_reference_of_the_whole(state: OuterState, codec: str) -> None:
    theta, momentum = state.theta[0].numpy().copy(), state.momentum[0].numpy().copy()
    payload = delta(np.random.default_rng(2).standard_normal(N).astype(np.float32), codec, state.fragment_digest(0))
    values = np.empty(N, np.float32)
    payload.decode(values)
    outer_step(theta, momentum, values, learning_rate=0.7, beta=0.9)
    before = state.fragment_digest(0)
    state.step(0, payload)
    assert state.theta[0].numpy().tobytes() == theta.tobytes()
    assert state.momentum[0].numpy().tobytes() == momentum.tobytes()
    assert state.fragment_digest(0) != before
    with pytest.raises(Resync, match="belongs to outer state"):
        state.step(0, payload)


def test_what_one_worker_alone_would_reach_is_an_outer_step_on_its_own_pseudo_gradient(state: OuterState) -> None:
    """The state itself stays as it is."""
    theta, momentum, digest = state.theta[0].numpy().copy(), state.momentum[0].numpy().copy(), state.fragment_digest(0)
    local = torch.from_numpy(theta + np.random.default_rng(3).standard_normal(N).astype(np.float32))
    outer_step(theta, momentum, theta - local.numpy(), learning_rate=0.7, beta=0.9)
    np.testing.assert_allclose(state.alone(0, local).numpy(), theta, rtol=1e-5, atol=1e-5)
    assert state.fragment_digest(0) == digest
    assert state.is_intact(0)


def test_a_delta_with_a_bad_value_in_its_last_chunk_changes_nothing(state: OuterState) -> None:
    before = state.fragment_digest(0)
    body = bytearray(delta_bytes(np.ones(N, np.float32), "fp32", before))
    body[-4:] = np.float32(np.nan).tobytes()
    with pytest.raises(WireError, match="nan"):
        state.step(0, Payload.from_bytes(body))
    assert state.is_intact(0)
    assert state.fragment_digest(0) == before


def test_a_bit_that_flips_after_a_step_is_in_the_digest(state: OuterState) -> None:
    payload = delta(np.ones(N, np.float32), "int8", state.fragment_digest(0))
    twin = OuterState(LAYOUT, OUTER, pin_memory=False)
    twin.set(0, state.theta[0], state.momentum[0])
    for each in (state, twin):
        each.step(0, payload)
    state.theta[0].view(torch.int32)[5] ^= 1
    assert state.fragment_digest(0) != twin.fragment_digest(0), "the coordinator will refuse it"
    state.theta[0].view(torch.int32)[7] ^= 1
    assert not state.is_intact(0), "and from then on this worker sees it by itself"


def _mapped_bytes(folder: Path) -> int:
    """Resident pages of the files in the folder that this process has mapped, with or without a name. The system may
    take any of them back at any time."""
    resident, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Rss:"):
            resident += 1024 * int(line.split()[1]) if ours else 0
        elif "-" in line.split(" ", 1)[0]:
            ours = str(folder) in line
    return resident


def test_a_state_in_files_takes_memory_only_while_it_is_used(tmp_path: Path) -> None:
    n = 1 << 22
    layout = plan_fragments([TensorSpec(name="w", shape=[2 * n])], n, taper=False)
    state = OuterState(layout, OUTER, pin_memory=False, mapped_in=tmp_path)
    values = torch.randn(n)
    for p in range(2):
        state.set(p, values, values + 1)
    assert _mapped_bytes(tmp_path) < n, "of 16 n"
    assert torch.equal(state.momentum[1], values + 1)
    assert _mapped_bytes(tmp_path) > 2 * n, "4 n are in use"
    state.release(1)
    assert _mapped_bytes(tmp_path) < n
    assert state.is_intact(0)
    room = state.room_for_pseudo_gradient(0)
    assert room is not None
    assert _mapped_bytes(tmp_path) > 2 * n
    state.release_pseudo_gradients()
    assert _mapped_bytes(tmp_path) < n


def test_files_take_few_descriptors_whatever_the_number_of_fragments(tmp_path: Path) -> None:
    """7 B parameters are 835 fragments, and a process may often open 1,024 files."""
    layout = plan_fragments([TensorSpec(name="w", shape=[100 * 256])], 256, taper=False)
    open_files = Path("/proc/self/fd")
    before = len(list(open_files.iterdir()))
    state = OuterState(layout, OUTER, pin_memory=False, mapped_in=tmp_path)
    assert len(list(open_files.iterdir())) < before + 10
    assert len(state) == 100


def test_what_changes_goes_into_a_file_that_nothing_needs(tmp_path: Path) -> None:
    """Of the files, one has the state of the last work, one the state that is trained on: both stay as they are."""

    def contents() -> list[bytes]:
        return [path.read_bytes() for path in sorted(tmp_path.glob("state-*.bin"))]

    state = OuterState(LAYOUT, OUTER, pin_memory=False, mapped_in=tmp_path)
    state.set(0, torch.ones(N), torch.ones(N))
    slot_of_work = state.keep(0)
    for round_ in range(4):
        payload = delta(np.ones(N, np.float32), "int8", state.fragment_digest(0))
        before = contents()
        state.step(0, payload)
        slot = state.keep(slot_of_work)
        assert {index for index in range(3) if contents()[index] != before[index]} == {slot}
        assert slot != slot_of_work
        if round_ % 2:  # otherwise no work is done on it
            slot_of_work = slot


def test_fragments_that_did_not_change_with_the_others_are_kept_with_them(tmp_path: Path) -> None:
    """As after a checkpoint of which only some fragments differed."""
    layout = plan_fragments([TensorSpec(name="w", shape=[512])], 256, taper=False)
    state = OuterState(layout, OUTER, pin_memory=False, mapped_in=tmp_path)
    for p in range(2):
        state.set(p, torch.full((256,), float(p)), None)
    before = state.keep(0)
    state.set(1, torch.full((256,), 5.0), None)
    slot = state.keep(before)
    assert slot != before
    again = OuterState(layout, OUTER, pin_memory=False, mapped_in=tmp_path)
    again.begin_at(slot)
    assert again.digests == state.digests
    assert [float(theta[0]) for theta in again.theta] == [0.0, 5.0]


def test_a_state_that_does_not_fit_on_the_disk_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapped file with holes would let the process die at a later write."""

    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=re.escape(str(tmp_path))):
        OuterState(LAYOUT, OUTER, pin_memory=False, mapped_in=tmp_path)
