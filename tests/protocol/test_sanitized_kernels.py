"""The compiled kernels, built with sanitizers, through their own tests and the payloads of strangers.

AddressSanitizer ends the process at the first byte that is read or written outside of what was allocated,
UndefinedBehaviorSanitizer at the first operation that C leaves undefined.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "protocol" / "kernels.c"
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g"]
FLAGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]

# In place of the module that is installed, from the very beginning.
LOADING = """
import importlib.util, sys
import protocol
spec = importlib.util.spec_from_file_location("protocol.kernels", sys.argv[1])
sys.modules[spec.name] = protocol.kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(protocol.kernels)
import pytest
code = pytest.main(["-p", "no:cacheprovider", *sys.argv[2:]])
from protocol.compiled import kernels
assert kernels.__spec__.origin == sys.argv[1]
sys.exit(code)
"""


def runtime() -> str:
    """The sanitizer's library, which must be loaded before all others. Skips where it cannot be had, and says why."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no gcc to build the kernels with sanitizers")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("there is no Python.h to build the kernels with sanitizers")
    found = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    library = found.stdout.strip()
    if not Path(library).is_absolute():  # gcc says the bare name of what it does not have
        pytest.skip("gcc has no libasan.so here")
    return library


def build(source: Path, folder: Path) -> Path:
    built = folder / "kernels.abi3.so"
    includes = f"-I{sysconfig.get_path('include')}"
    command = ["gcc", "-shared", "-fPIC", *FLAGS, *SANITIZERS, includes, str(source), "-o", str(built)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return built


def run_tests(library: str, built: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself keeps much to its end
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # each object by itself, with forbidden bytes around it
        "PYTHONPATH": str(ROOT),
    }
    # Not captured by pytest: what the sanitizer says is said as the process ends.
    command = [sys.executable, "-c", LOADING, str(built), "-q", "--capture=no", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_the_flags_are_those_of_the_installation() -> None:
    assert str(FLAGS).replace("'", '"') in (ROOT / "setup.py").read_text(encoding="utf-8")


@pytest.mark.covers("security:kernel-bytes")
def test_no_kernel_touches_what_is_not_its_own(tmp_path: Path) -> None:
    library = runtime()
    tests = [f"tests/protocol/test_{name}.py" for name in ("kernels", "hostile_payloads")]
    done = run_tests(library, build(SOURCE, tmp_path), *tests)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout


def test_a_kernel_that_does_is_found(tmp_path: Path) -> None:
    """One that reads a whole block where fewer values are left."""
    library = runtime()
    honest = SOURCE.read_text(encoding="utf-8")
    planted = honest.replace("Py_ssize_t k = least(BLOCK, n - start);", "Py_ssize_t k = BLOCK;")
    assert planted != honest
    (tmp_path / "kernels.c").write_text(planted, encoding="utf-8")
    done = run_tests(
        library, build(tmp_path / "kernels.c", tmp_path), "tests/protocol/test_kernels.py", "-k", "one_bad_value"
    )
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stdout[-4000:] + done.stderr[-4000:]
