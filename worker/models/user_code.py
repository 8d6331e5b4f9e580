"""The user's own functions, which a run spec names as `module:function`."""

import importlib
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker.errors import ModelError

_LENGTH = 300  # characters of what the user's function says


def called(key: str, name: str, *arguments: Any) -> Any:
    """Return what the function that the spec's `key` names returns. Raises ModelError where there is none, and where it
    raises anything itself."""
    function = _imported(key, name)
    try:
        return function(*arguments)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{key} = {name!r} raised {_raised(error)}") from error


def _imported(key: str, name: str) -> Callable[..., Any]:
    """Return the function called `name`, out of an installed package or the working directory."""
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
    except Exception as error:
        raise ModelError(f"{key} = {name!r}: its module raises {_raised(error)}") from error
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if function is None:
        raise ModelError(
            f"{key} = {name!r}: {module!r} has no attribute {function_name!r}; installed packages come "
            f"before {directory}: if yours is there, give it another name"
        )
    return function


def _raised(error: Exception) -> str:
    """Return what was raised, and where, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    # The user's own frame, not that of a library which it called.
    own = [each for each in frames if "site-packages" not in each.filename and each.filename != __file__]
    last = (own or frames)[-1]
    said = textwrap.shorten(str(error), _LENGTH, placeholder=" …")
    return f"{type(error).__name__}: {said} ({last.filename}, line {last.lineno})"
