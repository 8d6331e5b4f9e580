"""Where this machine keeps what can be had again."""

import os
from pathlib import Path
from typing import Literal


def cache_directory(kind: Literal["data", "shards"]) -> Path:
    """Return the directory of token sets that were prepared here ("data"), or of shards that were fetched ("shards"),
    if nothing else is said."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outerstep" / kind
