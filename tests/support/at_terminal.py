"""A process at a terminal of its own, as a shell starts it there."""

import fcntl
import os
import pty
import struct
import subprocess
import termios
from pathlib import Path

from tests.support.signals import default_signals


def start(
    command: list[str], environment: dict[str, str], folder: Path | None = None, size: tuple[int, int] | None = None
) -> tuple[subprocess.Popen[bytes], int]:
    """Start `command` at a new terminal of `size`, columns and lines. Return it, and the side that one types at."""
    master, slave = pty.openpty()
    if size is not None:
        set_size(master, *size)

    def take_terminal() -> None:
        default_signals()
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal

    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=slave, stdout=slave, stderr=slave, preexec_fn=take_terminal
    )
    os.close(slave)
    return process, master


def set_size(terminal: int, width: int, height: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
