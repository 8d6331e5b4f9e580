"""A small outer state, 500 parameters in two fragments; and the header of an uploaded one."""

from collections.abc import Sequence

from protocol.digest import Buffer
from protocol.fragments import Layout, TensorSpec, plan_fragments
from protocol.spec import OuterSpec
from protocol.wire import StateHeader
from worker.state.outer_state import OuterState

LAYOUT: Layout = plan_fragments([TensorSpec(name="w", shape=[500])], 256)


def empty_state() -> OuterState:
    """Nothing is in it yet."""
    return OuterState(LAYOUT, OuterSpec(learning_rate=0.7, momentum=0.9), pin_memory=False)


def state_header(frames: Sequence[Buffer]) -> StateHeader:
    """Of an upload whose frames are no values: whoever only moves the bytes does not look."""
    return StateHeader(
        run="r", round=0, fragment=0, codec="fp32", elements=1, chunk_elements=1, frame_bytes=[len(f) for f in frames]
    )
