"""A terminal as programs see it: what they write to it, put on a screen; and a process that has one."""

import errno
import os
import re
import select
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from tests.support import at_terminal
from tests.support.waiting import PATIENCE_S

_TOKEN = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])|\x1b\][^\x07]*\x07|[\s\S]")
_BEGUN = re.compile(r"\x1b(\[\??[0-9;]*|\][^\x07]*)?\Z")  # an escape sequence whose end has not been read yet


class Screen:
    """The lines that are on a terminal after all that was written to it. It knows what rich writes, and no more."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._rows: list[list[str]] = [[]]
        self._row = self._column = 0
        self._begun = ""
        self.cursor_shown = True

    @property
    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self._rows]

    def write(self, text: str) -> None:
        """Put `text` on the screen. It may end within an escape sequence: one read of a terminal returns what is there,
        not what belongs together."""
        text = self._begun + text
        begun = _BEGUN.search(text)
        self._begun = begun.group() if begun else ""
        text = text.removesuffix(self._begun)
        for token in _TOKEN.finditer(text):
            private, numbers, letter = token.groups()
            if letter is None:
                self._put(token.group())
            elif private:
                self.cursor_shown = letter == "h" if numbers == "25" else self.cursor_shown
            else:
                self._obey(letter, int(numbers or 1) if ";" not in numbers else 0)

    def _put(self, character: str) -> None:
        match character:
            case "\r":
                self._column = 0
            case "\n":
                self._down()
            case _ if character.isprintable():
                if self._column == self.width:
                    self._down()
                    self._column = 0
                row = self._rows[self._row]
                row.extend(" " * (self._column + 1 - len(row)))
                row[self._column] = character
                self._column += 1

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self._rows):
            self._rows.append([])
        if len(self._rows) > self.height:
            del self._rows[0]
            self._row -= 1

    def _obey(self, letter: str, number: int) -> None:
        match letter:
            case "A":
                self._row = max(self._row - number, 0)
            case "K":
                self._rows[self._row] = []
            case "J":
                self._rows = [[] for _ in self._rows]
            case "H":
                self._row = self._column = 0
            case "m":
                pass
            case _:
                raise AssertionError(f"this screen does not know {letter}")


class Terminal:
    """A process that runs at a terminal of its own, and what is on that."""

    def __init__(self, command: list[str], environment: dict[str, str], width: int, height: int) -> None:
        self.screen = Screen(width, height)
        whole = {**os.environ, "TERM": "xterm-256color", **environment}
        for name in ("COLUMNS", "LINES"):  # pytest-xdist sets them, and they outweigh the terminal's own size
            whole.pop(name, None)
        self.process, self._master = at_terminal.start(command, whole, size=(width, height))
        self._bytes = b""

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def resize(self, width: int, height: int) -> None:
        self.screen.width, self.screen.height = width, height
        at_terminal.set_size(self._master, width, height)

    def read_until(self, there: Callable[[str], bool]) -> str:
        """Return what is on the screen as soon as `there` says that it is what was waited for."""
        for _ in self._reads():
            if there(shown := "\n".join(self.screen.lines)):
                return shown
        raise AssertionError("it was never shown; this is:\n" + "\n".join(self.screen.lines))

    def read_to_the_end(self) -> int:
        """Return the exit code of the process, once all that it wrote is on the screen."""
        for _ in self._reads():
            pass
        return self.process.wait(PATIENCE_S)

    def _reads(self) -> Iterator[None]:
        """Yield at first and whenever something was written, until the process has ended. A picture is drawn again
        and again, so what bounds this is not that nothing comes."""
        yield
        until = time.monotonic() + PATIENCE_S
        while select.select([self._master], [], [], max(until - time.monotonic(), 0.0))[0]:
            try:
                read = os.read(self._master, 65536)
            except OSError as error:  # nobody has the terminal any more
                if error.errno == errno.EIO:
                    return
                raise
            if not read:
                return
            self._bytes += read
            whole = self._bytes.decode(errors="ignore")  # the last character may have come in part
            self._bytes = self._bytes[len(whole.encode()) :]
            self.screen.write(whole)
            yield
