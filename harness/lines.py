"""Long, slow and lossy lines: a network namespace per line, and a program that carries packets between all of them.

Each packet waits in a queue, is transmitted at the line's rate, travels for half a round trip, and is lost by chance
(line/way.h). So TCP finds what it finds on such a line: slow start, windows, CUBIC or BBR, losses. Nothing is left
behind, however this process ends: devices and namespaces belong to the program, which ends with it.

Needs root, iproute2 and a C compiler; where there are no such lines, `why_not` says why.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent / "line"
TUN = Path("/dev/net/tun")
DEVICE = "line"  # its name at the far end
NETWORKS = "10.213"
# Debian's, by command.
PACKAGES = {"cc": "gcc", "git": "git", "ip": "iproute2", "nsenter": "util-linux", "openssl": "openssl"}
MTU = 1500
FRAMING = 38  # Ethernet's head, check, preamble and gap, for each packet
TCP_PAYLOAD = MTU - 52  # IP's and TCP's heads, timestamps among them
LEAST_QUEUE_S = 0.1
NO_LINES_EXIT = 3  # of commands that need them
MOST_WAITING = 100_000  # packets between the kernel and the program, which takes them at once


@dataclass(frozen=True)
class Shape:
    """What a line carries: rates from and to its far end, on the wire, where a packet has FRAMING bytes more than IP
    knows of. `loss` is the share of packets that are lost, each way: 1 for a line that is gone."""

    up_mbit: float
    down_mbit: float
    round_trip_s: float = 0.0
    loss: float = 0.0

    def queue_bytes(self, mbit: float) -> int:
        """What may wait in front of the line, as in a home router: a round trip's bytes, at least those of 100 ms."""
        return round(mbit * 1e6 / 8 * max(self.round_trip_s, LEAST_QUEUE_S))


def on_the_wire(payload_bytes: float) -> float:
    """Return the bytes that so many take on a line, in full packets of TCP: 6 % more."""
    return payload_bytes * (MTU + FRAMING) / TCP_PAYLOAD


@dataclass(frozen=True)
class Count:
    """Packets and bytes on the wire, one way: those that arrived, were lost under way, were dropped by a full queue."""

    packets: int
    bytes: int
    lost: int
    lost_bytes: int
    dropped: int
    dropped_bytes: int


class Program:
    """The program line/line.c, which has all lines, and its orders."""

    def __init__(self, lines: int, seed: int) -> None:
        command = [str(compiled()), str(lines), f"{NETWORKS}.0.2", str(seed)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._lock = threading.Lock()
        self.device, *spaces = self._answer().split()
        self.network = f"{NETWORKS}.{self.device.removeprefix('lines')}"
        self.pid = self._process.pid
        self.spaces = [f"/proc/{self.pid}/fd/{space}" for space in spaces]

    def order(self, text: str) -> str:
        """Give an order (see line.c) and return the answer. RuntimeError where the program has ended."""
        assert self._process.stdin is not None
        with self._lock:
            with suppress(BrokenPipeError):  # then there is no answer either, but its last words
                self._process.stdin.write(text + "\n")
                self._process.stdin.flush()
            return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(self._process.stderr.read().strip())
        return line

    def end(self) -> None:
        self._process.communicate()


@dataclass(frozen=True)
class Line:
    """`prefix` goes before a command that is to run behind this line; `address` is this machine's before it."""

    prefix: list[str]
    address: str
    far_address: str
    program: Program
    index: int

    def shape(self, shape: Shape) -> None:
        """Be such a line from now on."""
        for way, mbit in (("up", shape.up_mbit), ("down", shape.down_mbit)):
            delay_ns = round(shape.round_trip_s / 2 * 1e9)
            queue = shape.queue_bytes(mbit)
            self.program.order(f"set {self.index} {way} {mbit * 1e6} {delay_ns} {queue} {shape.loss}")

    def count(self) -> tuple[Count, Count]:
        """What has gone up the line so far, and down."""
        figures = [int(each) for each in self.program.order(f"count {self.index}").split()]
        return Count(*figures[:6]), Count(*figures[6:])

    def wire_bytes(self) -> tuple[int, int]:
        """Bytes that have come up and gone down the line, with all heads and whatever was sent again."""
        up, down = self.count()
        return up.bytes, down.bytes


def why_not(*further: str) -> str | None:
    """Return why there are no such lines on this machine, or not the `further` commands; None where all is there."""
    if os.geteuid() != 0:
        return "not root"
    missing = [tool for tool in ("cc", "ip", "nsenter", *further) if shutil.which(tool) is None]
    if missing:
        packages = sorted({PACKAGES[tool] for tool in missing})
        return f"no {' and no '.join(missing)} (Debian: apt install {' '.join(packages)})"
    if not TUN.exists():
        return f"no {TUN}"
    try:
        with slow_lines({"probe": Shape(10, 10)}):
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    except RuntimeError as error:
        return str(error)


@contextmanager
def slow_lines(shapes: dict[str, Shape], *, tcp: str | None = None, seed: int = 0) -> Iterator[dict[str, Line]]:
    """A line for each name, gone at the end whatever happens. Those behind them reach this machine and one another.

    `tcp` is the congestion control of both ends, if it is not to be the machine's. `seed` draws the losses. Raises
    CalledProcessError or RuntimeError where the kernel refuses.
    """
    if not shapes:
        yield {}
        return
    program = Program(len(shapes), seed)
    try:
        near, everybody = f"{program.network}.1", f"{program.network}.0/24"
        _configure([], program.device, near, everybody, tcp)
        lines = {}
        for index, (name, shape) in enumerate(shapes.items()):
            prefix, address = ["nsenter", f"--net={program.spaces[index]}"], f"{program.network}.{2 + index}"
            _configure(prefix, DEVICE, address, everybody, tcp)
            lines[name] = Line(prefix, near, address, program, index)
            lines[name].shape(shape)
        yield lines
    finally:
        program.end()


def _configure(prefix: list[str], device: str, address: str, network: str, tcp: str | None) -> None:
    """Give the device its address and the route to the others. The route names the congestion control, which may be any
    that the kernel has; the default of a namespace may not."""
    batch = [
        "link set lo up",
        f"link set {device} mtu {MTU} txqueuelen {MOST_WAITING} up",
        f"addr add {address}/32 dev {device}",
        f"route add {network} dev {device} src {address}" + (f" congctl {tcp}" if tcp else ""),
    ]
    _do([*prefix, "ip", "-batch", "-"], "\n".join(batch) + "\n")


def _do(command: list[str], given: str = "") -> None:
    subprocess.run(command, input=given, check=True, capture_output=True, text=True)


@cache
def compiled() -> Path:
    """Return the program, compiled if it has changed."""
    digest = hashlib.sha256(b"".join(each.read_bytes() for each in sorted(SOURCES.iterdir()))).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outerstep" / "lines"
    program = folder / f"line-{digest}"
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            compile_c(SOURCES / "line.c", Path(scratch) / "line").replace(program)
    return program


def compile_c(source: Path, program: Path) -> Path:
    _do(["cc", "-O2", "-Wall", "-Wextra", f"-I{SOURCES}", "-o", str(program), str(source)])
    return program
