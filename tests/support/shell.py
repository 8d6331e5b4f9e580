"""A shell at a terminal, into which one types, and all that was written there."""

import os
import re
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

from tests.support import at_terminal
from tests.support.waiting import PATIENCE_S, wait_until

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
FAILED = "failed with"


class Shell:
    """bash in `folder`, started behind `prefix` (a command). What is typed is not echoed, so `text` is output alone."""

    def __init__(self, prefix: list[str], folder: Path, environment: dict[str, str]) -> None:
        command = [*prefix, "bash", "--norc", "--noprofile", "--noediting"]
        self._process, self._master = at_terminal.start(command, environment, folder)
        self._written = b""
        self._typed = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.press("stty -echo columns 200; PS1=; PS2=\n")
        self.wait()
        self.press(f"trap 'echo \"{FAILED} $?: $BASH_COMMAND\"' ERR\n")
        self.wait()

    @property
    def text(self) -> str:
        """All that was written, without what moves a cursor."""
        return CONTROL.sub("", self._written.decode(errors="replace"))

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait(self, patience_s: float = 60.0) -> None:
        """Wait until all that was typed is done. AssertionError where a command of it has failed."""
        self._typed += 1
        told = f"all of {self._typed} done"
        self.press(f"echo all of $(({self._typed})) done\n")
        wait_until(lambda: told in self.text or FAILED in self.text, patience_s=patience_s)
        assert FAILED not in self.text, self.text

    def end(self) -> None:
        """Hang up, as when the window is closed: bash passes that on to what runs in it."""
        self._process.send_signal(signal.SIGHUP)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(PATIENCE_S)
        os.close(self._master)

    def _read(self) -> None:
        with suppress(OSError):  # nobody has the terminal any more
            while piece := os.read(self._master, 65536):
                self._written += piece
