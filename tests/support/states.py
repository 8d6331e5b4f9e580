"""A small outer state: 500 parameters in two fragments."""

from protocol.fragments import Layout, TensorSpec, plan_fragments
from protocol.spec import OuterSpec
from worker.state.outer_state import OuterState

LAYOUT: Layout = plan_fragments([TensorSpec(name="w", shape=[500])], 256)


def empty_state() -> OuterState:
    """Nothing is in it yet."""
    return OuterState(LAYOUT, OuterSpec(learning_rate=0.7, momentum=0.9), pin_memory=False)
