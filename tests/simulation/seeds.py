"""Which seeds the tests simulate: some that never change, and some that change with the commit.

The fixed ones make a failure of today's code a failure of everybody's. But what is changed until they pass is tuned to
them; so each commit meets others as well, that nobody has seen before.
"""

import subprocess
from pathlib import Path

FIXED = range(50)
# When they were chosen, a round was done again in the first four, and others were accused in the last three.
DONE_AGAIN = (66, 147, 178, 75, 104, 180)
PER_COMMIT = 20
WITHOUT_COMMIT = FIXED.stop


def head(directory: Path) -> str | None:
    """Return the hash of the commit that is checked out in `directory`, None where git knows of none."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=directory, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def of_commit(commit: str | None) -> range:
    """Return the seeds of the commit with this hexadecimal hash: none of the fixed ones, up to eight digits each."""
    first = WITHOUT_COMMIT if commit is None else 1000 + int(commit[:6], 16)
    return range(first, first + PER_COMMIT)
