"""The user's own functions, which a run spec names as `module:function`."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker.errors import ModelError


def imported(key: str, name: str) -> Callable[..., Any]:
    """Return the function that the spec's `key` names, out of an installed package or the working directory. Raises
    ModelError where there is none."""
    module_name, _, function_name = name.partition(":")
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.append(directory)  # last: nothing there may hide an installed package, one of ours above all
    try:
        module = importlib.import_module(module_name)
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"{key} = {name!r}: {error} (looked in the installed packages, then in {directory})"
        ) from error
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if function is None:
        raise ModelError(
            f"{key} = {name!r}: {module!r} has no attribute {function_name!r}; installed packages come "
            f"before {directory}: if yours is there, give it another name"
        )
    return function
