"""Functions of the user, which a run spec names as `module:function`."""

import importlib
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker.errors import ModelError

_LENGTH = 300  # longest quotation of an exception of the user's function, in characters


def call_user_function(key: str, name: str, *arguments: Any) -> Any:
    """Call the function `name`, the value of the spec's `key`, and return its result. Raises ModelError if there is no
    such function, or if it raises."""
    function = _imported(key, name)
    try:
        return function(*arguments)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{key} = {name!r} raised {_raised(error)}") from error


def _imported(key: str, name: str) -> Callable[..., Any]:
    """Return the function called `name`, from an installed package or the working directory."""
    module_name, _, function_name = name.partition(":")
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.append(directory)  # last, so that nothing there hides an installed package, least of all Outerstep
    try:
        module = importlib.import_module(module_name)
    except (ImportError, AttributeError) as error:
        raise ModelError(f"{key} = {name!r}: {error} (searched the installed packages, then {directory})") from error
    except Exception as error:
        raise ModelError(f"{key} = {name!r}: importing its module raised {_raised(error)}") from error
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if function is None:
        raise ModelError(
            f"{key} = {name!r}: {module!r} has no attribute {function_name!r}; installed packages are searched "
            f"before {directory}: if your module is there, rename it"
        )
    return function


def _raised(error: Exception) -> str:
    """Return the exception and where it was raised, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    # The last frame of the user's code rather than of a library it called.
    user = [each for each in frames if "site-packages" not in each.filename and each.filename != __file__]
    last = (user or frames)[-1]
    message = textwrap.shorten(str(error), _LENGTH, placeholder=" …")
    return f"{type(error).__name__}: {message} ({last.filename}, line {last.lineno})"
