"""`make gpu`: everything that needs a GPU, part by part; a part that has passed is not run again.

    python -m tests.gpu [--wheels DIR] [--results FILE] [--again]

Nothing is fetched. Any Python with a torch that sees the GPU will do; packages that it lacks are taken from the wheels
in DIR. Results go to FILE, one line of JSON per part, and hold for this code, torch and GPU. Exit code 0: all parts have
passed; 1: one has not; 3: there is no GPU, or a package is missing.

Only the standard library is imported here, until the packages are known to be there.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
NO_GPU = 3

PYTEST = ["-m", "pytest", "-q", "-c", "tests/gpu/pytest.ini", "--rootdir", "."]
# In the order of what the others stand on. Seconds are for a hang alone: each takes a fraction of them.
PARTS: dict[str, tuple[int, list[str]]] = {
    "codecs": (
        180,
        [*PYTEST, "tests/gpu/test_bits.py", "tests/worker/test_codecs.py", "tests/protocol/test_vectors.py"],
    ),
    "streams": (60, [*PYTEST, "tests/worker/test_side_stream.py", "tests/worker/test_fragments.py"]),
    "inner steps": (
        240,
        [
            *(*PYTEST, "-m", "not nightly"),
            *("tests/worker/test_step_on_cuda.py", "tests/worker/test_step.py", "tests/worker/test_compact.py"),
            "tests/gpu/test_frontier.py",
        ],
    ),
    "runs": (240, [*PYTEST, "tests/gpu/test_runs.py", "tests/gpu/test_fp16.py"]),
    "speed": (300, ["-m", "benchmarks.gpu", "--json"]),
}
UNUSED = {"plotly", "uvloop"}  # of the dashboard and of `outerstep coordinator` alone


def needed() -> set[str]:
    """The distributions that the parts need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["coordinator"], *extras["worker"], "hypothesis", "psutil", "pytest"]
    return {re.split(r"[<>=!~;\[ (]", each)[0] for each in wanted} - UNUSED


def is_missing(distribution: str) -> bool:
    try:
        return not importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--wheels", type=Path, help="a folder of wheels, for packages that this Python lacks")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "gpu.jsonl", help="where results are kept")
    parser.add_argument("--again", action="store_true", help="run parts that have passed again")
    options = parser.parse_args()
    if options.wheels is not None and not use_wheels(options.wheels):
        return NO_GPU
    missing = sorted(filter(is_missing, needed()))
    if missing:
        print(f"{sys.executable} lacks {', '.join(missing)}: install them, or put their wheels (and those of what they "
              "need) into a folder and name it: make gpu GPU_WHEELS=DIR")  # fmt: skip
        return NO_GPU
    import torch

    if not torch.cuda.is_available():
        print(f"there is no GPU here that torch {torch.__version__} of {sys.executable} can use: nothing was run")
        return NO_GPU
    where = {"code": code_digest(), "torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    passed = set() if options.again else passed_parts(options.results, where)
    failed = []
    for name, (limit_s, arguments) in PARTS.items():
        if name in passed:
            print(f"{name}: has passed before")
        elif not run(name, arguments, limit_s, options.results, where):
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else f"all {len(PARTS)} parts have passed; see {options.results}")
    return 1 if failed else 0


def use_wheels(folder: Path) -> bool:
    """Unpack the wheels beside the results, for this process and those that it starts. Return False if pip fails."""
    site = ROOT / "build" / "gpu-site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
    wheels = sorted(map(str, folder.glob("*.whl")))
    if not wheels:
        print(f"GPU_WHEELS: there are no wheels in {folder}")
        return False
    done = subprocess.run([*pip, "--target", str(site), *wheels], check=False)
    if done.returncode != 0:
        print(f"GPU_WHEELS: pip could not install the wheels of {folder}, see above")
        return False
    sys.path.insert(0, str(site))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    return True


def code_digest() -> str:
    """Return a digest of all Python and C files of the project, with or without git."""
    digest = hashlib.blake2b(digest_size=8)
    for package in ("protocol", "coordinator", "worker", "outerstep", "migrations", "benchmarks", "tests"):
        for path in sorted((ROOT / package).rglob("*")):
            if path.suffix in (".py", ".c"):
                digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def passed_parts(results: Path, where: dict[str, str]) -> set[str]:
    lines = results.read_text().splitlines() if results.exists() else []
    return {each["part"] for each in map(json.loads, lines) if each["passed"] and where.items() <= each.items()}


def run(name: str, arguments: list[str], limit_s: float, results: Path, where: dict[str, str]) -> bool:
    """Run a part, with its output as it comes, and keep the result; return True if it has passed."""
    print(f"{name}: {' '.join(arguments)}", flush=True)
    began, last = time.monotonic(), ""
    with subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        limit = threading.Timer(limit_s, process.kill)
        limit.start()
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.rstrip()
        passed = process.wait() == 0
        limit.cancel()
    seconds = time.monotonic() - began
    how = "passed" if passed else f"FAILED with exit code {process.returncode}"
    if not passed and seconds >= limit_s:
        how = f"FAILED: it was killed after {limit_s:g} s"
    print(f"{name}: {how} in {seconds:.1f} s", flush=True)
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.write(json.dumps({"part": name, "passed": passed, "seconds": round(seconds, 1), **where, "last": last}))
        file.write("\n")
    return passed


if __name__ == "__main__":
    sys.exit(main())
