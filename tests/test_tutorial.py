"""docs/tutorial.md, typed: every block of it at a terminal of the box that its first line names, each box a clone, an
environment, a home and a network namespace of its own, with a line between them. What is typed is the page's, but for
the three things that it asks for; and what it says that comes out does.

`pip` and `git` have the machine's own network, for there is no internet behind the lines. The times are printed, and
nothing depends on them.
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
LASTING = ("outerstep coordinator ", "outerstep worker ")  # the page says that these stay there
TO_PASTE, PASTED = "| base64", "base64 -d |"
FIRST_ROUND = "INFO round 0:"
HOME_LINE = Shape(up_mbit=40, down_mbit=100, round_trip_s=0.02)
PATIENCE_S = 900.0  # a hang is a failure; the page speaks of ten minutes for all of it


@dataclass
class Block:
    """What is typed at a terminal, and the lines of which the page says that they come out."""

    step: str  # the heading that it is below
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
    """What a line of the page stands for: any number for a number, and anything at all for an ellipsis."""
    parts = (re.sub(r"\d+(\\\.\d+)?", r"\\d+(\\.\\d+)?", re.escape(part)) for part in line.rstrip("… ").split("…"))
    return re.compile(".*".join(parts))


def test_every_block_is_typed_somewhere() -> None:
    assert {block.box for block in blocks()} == {TO_INSTALL, *BOXES}
    assert set(re.findall(r"^```(\S+)", PAGE, re.MULTILINE)) == {"sh", "text"}
    assert PAGE.count("```sh") == len(blocks())
    assert all(pattern(line).search(line) for block in blocks() for line in block.expected)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no clone")
@pytest.mark.parametrize("made", ["ca.key", "ca.pem", "coordinator.key", "join.token", "data/admin.token"])
def test_no_secret_that_the_page_makes_is_added_to_the_clone(made: str) -> None:
    assert made.partition("/")[0] in PAGE
    subprocess.run(["git", "check-ignore", "--quiet", "--no-index", made], cwd=ROOT, check=True)


@dataclass
class Boxes:
    """The terminals of the two boxes, by their names on the page."""

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
        """Where a block is typed: at a terminal of the box, behind its line; or on both, with the machine's network."""
        if block.box == TO_INSTALL:
            return [self.shell(f"{box}, {block.terminal}", box, []) for box in BOXES]
        return [self.shell(block.terminal, block.box, self.behind[block.box].prefix)]

    def play(self, block: Block, pasted: str) -> str:
        """Type a block, wait for what the page says that comes out, and return all that came."""
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
    """That of somebody who has just come: nothing of Outerstep, and of this environment nothing."""
    own = ("OUTERSTEP", "VIRTUAL_ENV", "PYTHON", "PYTEST", "XDG_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    paths = [path for path in os.environ["PATH"].split(":") if Path(path) != Path(sys.prefix) / "bin"]
    path = ":".join([str(Path(sys.base_prefix) / "bin"), *paths])
    # Both boxes have the cores of this machine: threads that spin for one another would be all that they do.
    return kept | {"PATH": path, "HOME": str(home), "TERM": "xterm", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def boxes(tmp_path: Path) -> Iterator[Boxes]:
    if reason := lines.why_not("openssl", "git"):
        pytest.skip(f"no network namespaces for two boxes: {reason}")
    if not (ROOT / ".git").exists():
        pytest.skip(f"there is nothing to clone: {ROOT} is no clone of the repository itself")
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
        shell.wait(PATIENCE_S)  # both workers have ended, and well
        losses = [float(each) for each in re.findall(r"state \d+: held-out loss ([\d.]+)", shell.text)]
        assert losses[-1] < losses[0] - 1
    (of_the_run,) = re.findall(r"^state digest +(\w{64})", looking.text, re.MULTILINE)
    assert re.findall(r"left at +state \d+, (\w+)", looking.text) == [of_the_run, of_the_run], looking.text
    with capsys.disabled():
        print("\n" + "".join(f"{seconds:7.1f} s  {step}\n" for step, seconds in took.items()))
        print(f"{first_round_s:7.1f} s from the clone to the end of the first round, of the ten minutes of the page")
