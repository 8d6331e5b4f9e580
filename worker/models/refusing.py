"""What transformers raises for a model that it cannot make, which is nearly anything, as one sentence."""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import StrictDataclassError

from worker.errors import ModelError

_REFUSALS = (
    ArithmeticError,  # no attention heads, for example
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
_LENGTH = 300  # some list every model that there is


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Raise ModelError that begins with `what` for what is raised within."""
    try:
        yield
    except _REFUSALS as error:
        raise ModelError(f"{what} ({type(error).__name__}: {in_short(error)})") from error


def in_short(error: Exception) -> str:
    """Return what the error says in one line that is not too long."""
    return textwrap.shorten(str(error), _LENGTH, placeholder=" …").rstrip(".")
