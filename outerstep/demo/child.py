"""Runs an Outerstep command in a process that cannot outlive the demo: `python -m outerstep.demo.child coordinator …`.

Its standard input is a pipe that the demo holds open and never writes to. When the demo ends, even by kill −9, the
operating system closes the pipe, and this process exits too.
"""

import os
import sys
import threading

from outerstep.cli import main

ABANDONED = 70  # exit code, which nothing reads


def _end_with_the_demo() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(ABANDONED)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_demo, daemon=True).start()
    main()
