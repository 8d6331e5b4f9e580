"""A check for files of the user that hide one of Outerstep's packages.

Python looks beside the script first (with `python -m`, in the working directory), so a `worker.py` there is found in
place of the package `worker`. It would be run, and what it lacks reported as if Outerstep were broken.
"""

from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).parents[1]


def refuse_shadow(package: str) -> None:
    """Raise ImportError if another file hides our `package`; the message names it.

    Nothing is imported.
    """
    ours, found = _ROOT / package / "__init__.py", find_spec(package)
    if found is None or found.origin is None or not ours.exists() or Path(found.origin).samefile(ours):
        return
    hiding = Path(found.origin)
    what = "file" if hiding.name != "__init__.py" else "directory"
    path = hiding if what == "file" else hiding.parent
    raise ImportError(f"{path} hides the package `{package}` of Outerstep; rename the {what}")
