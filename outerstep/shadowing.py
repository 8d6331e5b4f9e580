"""Detects the user's files that shadow one of Outerstep's packages.

Python first looks in the script's directory (with `python -m`, in the working directory), so it would import a
`worker.py` there instead of the package `worker`, and the errors would look as if Outerstep were broken.
"""

from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).parents[1]


def refuse_shadow(package: str) -> None:
    """Raise ImportError that names the file if one shadows our `package`. Nothing is imported."""
    ours, found = _ROOT / package / "__init__.py", find_spec(package)
    if found is None or found.origin is None or not ours.exists() or Path(found.origin).samefile(ours):
        return
    hiding = Path(found.origin)
    what = "file" if hiding.name != "__init__.py" else "directory"
    path = hiding if what == "file" else hiding.parent
    raise ImportError(f"{path} hides the package `{package}` of Outerstep; rename the {what}")
