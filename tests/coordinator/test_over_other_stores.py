"""The coordinator's own tests, with blobs in a bucket. (In memory, `make nightly` runs all tests.)"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

# Those that store, read, spoil, lose or delete blobs, or start again on them.
ABOUT_BLOBS = [
    "deltas",
    "transfers",
    "spoilt_files",
    "restart",
    "backup",
    "residuals",
    "retention",
    "bodies",
    "seeding",
    "faults",
    "late",
    "weights",
]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_coordinators_tests_pass_with_blobs_in_a_bucket() -> None:
    here = Path(__file__).parent
    files = [str(here / f"test_{each}.py") for each in ABOUT_BLOBS]
    command = [sys.executable, "-m", "pytest", "-q", "--blobs=bucket", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=here.parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"^(\d+) passed", done.stdout, re.MULTILINE)
    assert passed is not None
    assert int(passed[1]) > 80
