"""Simulated long, slow and lossy network lines: a network namespace per line, and a program that forwards packets.

Each packet waits in a queue, is transmitted at the line's rate, travels for half a round trip, and is lost at random
(line/way.h). So TCP behaves as on such a line: slow start, windows, CUBIC or BBR, losses. Nothing is left behind
however this process ends: devices and namespaces belong to the program, which ends with it.

Needs root, iproute2 and a C compiler; `why_not` returns what is missing.
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

from outerstep.common.connections import SLOW_START_AFTER_IDLE

SOURCES = Path(__file__).parent / "line"
TUN = Path("/dev/net/tun")
DEVICE = "line"  # the interface's name at the remote end
NETWORKS = "10.213"
# Debian packages by command.
PACKAGES = {
    "cc": "gcc",
    "git": "git",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "openssl": "openssl",
    "ss": "iproute2",
}
MTU = 1500
FRAMING = 38  # Ethernet header, checksum, preamble and gap per packet
TCP_PAYLOAD = MTU - 52  # IP and TCP headers with timestamps
LEAST_QUEUE_S = 0.1
NO_LINES_EXIT = 3  # exit code of commands that need lines where they cannot be made
MAX_WAITING = 100_000  # packets between the kernel and the program, which reads them at once


@dataclass(frozen=True)
class Shape:
    """A line's properties: rates from and to its remote end, counted on the wire with FRAMING bytes per packet. `loss`
    is the share of packets lost each way; 1 for an interrupted line."""

    up_mbit: float
    down_mbit: float
    round_trip_s: float = 0.0
    loss: float = 0.0

    def queue_bytes(self, mbit: float) -> int:
        """Return the size of the queue before the line, as in a home router: one round trip's bytes, at least 100
        ms."""
        return round(mbit * 1e6 / 8 * max(self.round_trip_s, LEAST_QUEUE_S))


def on_the_wire(payload_bytes: float) -> float:
    """Return the bytes on the wire for this many payload bytes in full TCP packets: 6 % more."""
    return payload_bytes * (MTU + FRAMING) / TCP_PAYLOAD


@dataclass(frozen=True)
class Count:
    """Packets and bytes on the wire, one way: arrived, lost in transit, and dropped by a full queue."""

    packets: int
    bytes: int
    lost: int
    lost_bytes: int
    dropped: int
    dropped_bytes: int


class Program:
    """The program line/line.c, which simulates all lines."""

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
        """Send an order (see line.c) and return the answer. RuntimeError if the program has ended."""
        assert self._process.stdin is not None
        with self._lock:
            with suppress(BrokenPipeError):  # then it has ended, and `_answer` raises with its stderr
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
    """A line. `prefix`: of a command, to run it behind the line; `address`: this machine's, as seen from there."""

    prefix: list[str]
    address: str
    far_address: str
    program: Program
    index: int

    def shape(self, shape: Shape) -> None:
        """Change the line's properties."""
        for way, mbit in (("up", shape.up_mbit), ("down", shape.down_mbit)):
            delay_ns = round(shape.round_trip_s / 2 * 1e9)
            queue = shape.queue_bytes(mbit)
            self.program.order(f"set {self.index} {way} {mbit * 1e6} {delay_ns} {queue} {shape.loss}")

    def count(self) -> tuple[Count, Count]:
        """Return the counts of both directions so far, up and down."""
        figures = [int(each) for each in self.program.order(f"count {self.index}").split()]
        return Count(*figures[:6]), Count(*figures[6:])

    def wire_bytes(self) -> tuple[int, int]:
        """Return the bytes that arrived up and down the line, with all headers and retransmissions."""
        up, down = self.count()
        return up.bytes, down.bytes


def why_not(*further: str) -> str | None:
    """Return why lines, or the `further` commands, are unavailable on this machine; None if they are available."""
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
def slow_lines(
    shapes: dict[str, Shape], *, tcp: str | None = None, keep_windows: bool = False, seed: int = 0
) -> Iterator[dict[str, Line]]:
    """Create a line for each name, and remove them at the end. Processes behind lines reach this machine and each
    other.

    `tcp`: the congestion control of both ends; default: the machine's. `keep_windows`: set
    net.ipv4.tcp_slow_start_after_idle to 0 at both ends; this machine gets its own back. `seed`: of the losses. Raises
    CalledProcessError or RuntimeError if the kernel does not allow it.
    """
    if not shapes:
        yield {}
        return
    program, before = Program(len(shapes), seed), None
    try:
        if keep_windows:
            before = SLOW_START_AFTER_IDLE.read_text()
            SLOW_START_AFTER_IDLE.write_text("0")
        near, everybody = f"{program.network}.1", f"{program.network}.0/24"
        _configure([], program.device, near, everybody, tcp)
        lines = {}
        for index, (name, shape) in enumerate(shapes.items()):
            prefix, address = ["nsenter", f"--net={program.spaces[index]}"], f"{program.network}.{2 + index}"
            _configure(prefix, DEVICE, address, everybody, tcp)
            if keep_windows:
                _do([*prefix, "tee", str(SLOW_START_AFTER_IDLE)], "0")
            lines[name] = Line(prefix, near, address, program, index)
            lines[name].shape(shape)
        yield lines
    finally:
        if before is not None:
            SLOW_START_AFTER_IDLE.write_text(before)
        program.end()


def _configure(prefix: list[str], device: str, address: str, network: str, tcp: str | None) -> None:
    """Give the device its address and its route to the others. The route sets the congestion control, as it can be any
    that the kernel has; the default of a namespace cannot."""
    batch = [
        "link set lo up",
        f"link set {device} mtu {MTU} txqueuelen {MAX_WAITING} up",
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
