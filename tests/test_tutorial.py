"""docs/tutorial.md, typed block by block at terminals of two boxes, with the output that the page shows.

Each box has its own clone, virtual environment, home and network namespace, with a slow line between them. The text
typed is the page's, except for the three things that the reader must replace. `pip` and `git` use the machine's own
network, because the namespaces have no internet. The time of each step is printed; no assertion depends on it.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness import lines
from harness.lines import Line, Shape, slow_lines
from tests.support.shell import Shell
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(?:sh\n# (?P<terminal>.+?)|text)\n(?P<lines>.*?)^```$", re.MULTILINE | re.DOTALL)
BOXES = ("box 1", "box 2")
TO_INSTALL = "both boxes"
ADDRESS, REPOSITORY = "192.168.1.10", "https://git.example.org/outerstep.git"
LASTING = ("outerstep coordinator ", "outerstep worker ")  # these keep running
TO_PASTE, PASTED = "| base64", "base64 -d |"
FIRST_ROUND = "INFO round 0:"
HOME_LINE = Shape(up_mbit=40, down_mbit=100, round_trip_s=0.02)
PATIENCE_S = 900.0  # after which a hang is a failure; the whole page should take ten minutes


@dataclass
class Block:
    """Text to type at a terminal, and the lines of output that the page shows."""

    step: str  # the heading above it
    terminal: str
    typed: str
    expected: list[str] = field(default_factory=list)

    @property
    def box(self) -> str:
        return self.terminal.partition(",")[0]

    @property
    def lasts(self) -> bool:
        return self.typed.splitlines()[-1].startswith(LASTING)


def blocks() -> list[Block]:
    found: list[Block] = []
    for block in BLOCK.finditer(PAGE):
        if block["terminal"] is None:
            found[-1].expected += block["lines"].splitlines()
        else:
            step = re.findall(r"^## (.+)$", PAGE[: block.start()], re.MULTILINE)[-1]
            found.append(Block(step, block["terminal"], block["lines"]))
    return found


def pattern(line: str) -> re.Pattern[str]:
    """The pattern of an expected line: a number matches any number, an ellipsis anything."""
    parts = (re.sub(r"\d+(\\\.\d+)?", r"\\d+(\\.\\d+)?", re.escape(part)) for part in line.rstrip("… ").split("…"))
    return re.compile(".*".join(parts))


def test_every_block_is_typed_somewhere() -> None:
    assert {block.box for block in blocks()} == {TO_INSTALL, *BOXES}
    assert set(re.findall(r"^```(\S+)", PAGE, re.MULTILINE)) == {"sh", "text"}
    assert PAGE.count("```sh") == len(blocks())
    assert all(pattern(line).search(line) for block in blocks() for line in block.expected)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git clone")
@pytest.mark.parametrize("made", ["ca.key", "ca.pem", "coordinator.key", "join.token", "data/admin.token"])
def test_git_ignores_secrets_that_the_page_creates(made: str) -> None:
    assert made.partition("/")[0] in PAGE
    subprocess.run(["git", "check-ignore", "--quiet", "--no-index", made], cwd=ROOT, check=True)


@dataclass
class Boxes:
    """The terminals of the two boxes, by name."""

    folders: dict[str, Path]
    behind: dict[str, Line]
    closing: ExitStack
    shells: dict[str, Shell] = field(default_factory=dict)

    def shell(self, terminal: str, box: str, prefix: list[str]) -> Shell:
        if terminal not in self.shells:
            shell = Shell(prefix, self.folders[box], environment(self.folders[box]))
            self.closing.callback(shell.end)
            self.shells[terminal] = shell
        return self.shells[terminal]

    def of(self, block: Block) -> list[Shell]:
        """Return the terminals for a block: one of its box, behind the slow line, or one per box on the machine's network."""
        if block.box == TO_INSTALL:
            return [self.shell(f"{box}, {block.terminal}", box, []) for box in BOXES]
        return [self.shell(block.terminal, block.box, self.behind[block.box].prefix)]

    def play(self, block: Block, pasted: str) -> str:
        """Type a block, wait for the expected output, and return all output of the first terminal."""
        typed = block.typed.replace(ADDRESS, self.behind["box 1"].far_address).replace(REPOSITORY, str(ROOT))
        if typed.splitlines()[-1].startswith(PASTED):
            typed += f"{pasted}\n\x04"
        shells = self.of(block)
        before = [len(shell.text) for shell in shells]
        for shell in shells:
            shell.press(typed)
        if not block.lasts:
            for shell in shells:
                shell.wait(PATIENCE_S)
        for shell, start in zip(shells, before, strict=True):
            for line in block.expected:
                if block.lasts:
                    wait_for(line, shell, start)
                assert is_there(line, shell, start), f"{line!r} is not in:\n{shell.text[start:]}"
        return shells[0].text[before[0] :]


def is_there(line: str, shell: Shell, start: int) -> bool:
    return pattern(line).search(shell.text, start) is not None


def wait_for(line: str, shell: Shell, start: int) -> None:
    def comes() -> bool:
        return is_there(line, shell, start)

    wait_until(comes, patience_s=PATIENCE_S)


def environment(home: Path) -> dict[str, str]:
    """Return a newcomer's environment variables: nothing of Outerstep or of this virtual environment."""
    own = ("OUTERSTEP", "VIRTUAL_ENV", "PYTHON", "PYTEST", "XDG_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    paths = [path for path in os.environ["PATH"].split(":") if Path(path) != Path(sys.prefix) / "bin"]
    path = ":".join([str(Path(sys.base_prefix) / "bin"), *paths])
    # Both boxes share the cores of this machine; with more threads they would mostly spin.
    return kept | {"PATH": path, "HOME": str(home), "TERM": "xterm", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def boxes(tmp_path: Path) -> Iterator[Boxes]:
    if reason := lines.why_not("openssl", "git"):
        pytest.skip(f"no network namespaces for two boxes: {reason}")
    if not (ROOT / ".git").exists():
        pytest.skip(f"nothing to clone: {ROOT} is not a git clone")
    folders = {box: tmp_path / box.replace(" ", "-") for box in BOXES}
    for folder in folders.values():
        folder.mkdir()
    with ExitStack() as closing:
        behind = closing.enter_context(slow_lines(dict.fromkeys(BOXES, HOME_LINE)))
        yield Boxes(folders, behind, closing)


@pytest.mark.nightly
@pytest.mark.timeout(3600)  # it installs torch, twice
def test_a_newcomer_s_path(boxes: Boxes, capsys: pytest.CaptureFixture[str]) -> None:
    pasted = ""
    took = dict.fromkeys((block.step for block in blocks()), 0.0)
    began = time.monotonic()
    for block in blocks():
        block_began = time.monotonic()
        came = boxes.play(block, pasted)
        took[block.step] += time.monotonic() - block_began
        if block.typed.rstrip().endswith(TO_PASTE):
            pasted = "\n".join(re.findall(r"^[A-Za-z0-9+/=]{4,}$", came, re.MULTILINE))
        if any(FIRST_ROUND in line for line in block.expected):
            first_round_s = time.monotonic() - began

    worker_1, worker_2, looking = (
        boxes.shells[name] for name in ("box 1, second terminal", "box 2", "box 1, third terminal")
    )
    for shell in (worker_1, worker_2):
        shell.wait(PATIENCE_S)  # both workers have ended with exit code 0
        losses = [float(each) for each in re.findall(r"state \d+: held-out loss ([\d.]+)", shell.text)]
        assert losses[-1] < losses[0] - 1
    (of_the_run,) = re.findall(r"^state digest +(\w{64})", looking.text, re.MULTILINE)
    assert re.findall(r"left at +state \d+, (\w+)", looking.text) == [of_the_run, of_the_run], looking.text
    with capsys.disabled():
        print("\n" + "".join(f"{seconds:7.1f} s  {step}\n" for step, seconds in took.items()))
        print(f"{first_round_s:7.1f} s from the clone to the end of the first round; the page says ten minutes")
