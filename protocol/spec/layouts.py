"""The layout of a run: a model's tensors, cut into fragments as its spec has them."""

from protocol.fragments import Layout, TensorSpec, plan_fragments
from protocol.spec.sections import SyncSpec


def planned(sync: SyncSpec, tensors: list[TensorSpec]) -> Layout:
    """Return the layout of a run with these trained tensors. Raises LayoutError as `plan_fragments` does."""
    strided, taper = sync.fragment_layers == "strided", sync.offsets == "together"
    return plan_fragments(tensors, sync.fragment_elements, strided=strided, taper=taper)
