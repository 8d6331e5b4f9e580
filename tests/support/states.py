"""A small outer state: 500 parameters in two fragments. And payloads of state 0."""

from pathlib import Path

from protocol import wire
from protocol.fragments import Layout, TensorSpec, plan_fragments
from protocol.spec.sections import OuterSpec
from worker.state.outer_state import OuterState

LAYOUT: Layout = plan_fragments([TensorSpec(name="w", shape=[500])], 256)


def empty_state(mapped_in: Path | None = None) -> OuterState:
    """Nothing is in it yet."""
    return OuterState(LAYOUT, OuterSpec(learning_rate=0.7, momentum=0.9), pin_memory=False, mapped_in=mapped_in)


def zeros_of_state_0(elements: int) -> tuple[wire.StateHeader, list[bytes]]:
    """Header and frames of fragment 0 of state 0, raw fp32 zeros."""
    frames = [bytes(4 * chunk) for chunk in wire.chunk_sizes(elements, wire.CHUNK_ELEMENTS)]
    header = wire.StateHeader(
        run="r",
        round=0,
        fragment=0,
        codec="fp32",
        elements=elements,
        chunk_elements=wire.CHUNK_ELEMENTS,
        frame_bytes=[len(frame) for frame in frames],
    )
    return header, frames
