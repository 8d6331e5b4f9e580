"""Nested dictionaries, lists and tuples of tensors and plain values, such as an optimizer's state_dict."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def with_each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same dictionaries, lists and tuples, with `change(tensor)` in the place of every tensor."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: with_each_tensor(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(with_each_tensor(each, change) for each in value)
    return value
