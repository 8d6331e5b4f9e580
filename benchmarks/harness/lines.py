"""Slow and lossy lines: a network namespace per worker, a veth pair, `tc tbf` for the rate, `nft` for the loss.

Needs root, iproute2 and nftables. Where one is missing there are no such lines, and `why_not` says so.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables", "iperf3": "iperf3"}  # Debian's, by command

QUEUE_MS = 200  # what waits in front of a full line, as in a home router


@dataclass(frozen=True)
class Rate:
    """What a line carries, kbit/s from and to its far end, and how many of 1000 packets it loses, each way."""

    up_kbit: int
    down_kbit: int
    loss_per_mille: int = 0


@dataclass(frozen=True)
class Line:
    """`prefix` goes before a command that is to run behind this line; `address` is this machine's at its near end."""

    prefix: list[str]
    address: str
    space: str
    near: str
    far: str

    def shape(self, rate: Rate) -> None:
        """Carry so much from now on."""
        _do(f"tc qdisc replace dev {self.near} root {_bucket(rate.down_kbit)}")
        _do(f"tc -n {self.space} qdisc replace dev {self.far} root {_bucket(rate.up_kbit)}")
        for hook in ("input", "output"):
            _do(f"ip netns exec {self.space} nft flush chain inet line {hook}")
            if rate.loss_per_mille:
                loss = f"numgen random mod 1000 lt {rate.loss_per_mille} drop"
                _do(f"ip netns exec {self.space} nft add rule inet line {hook} {loss}")

    def wire_bytes(self) -> tuple[int, int]:
        """Bytes that have come up and gone down the line, with all headers and whatever was sent again."""
        counters = Path(f"/sys/class/net/{self.near}/statistics")
        return int((counters / "rx_bytes").read_text()), int((counters / "tx_bytes").read_text())


def why_not(*further: str) -> str | None:
    """Return why there are no slow lines on this machine, or not the `further` commands; None where all is there."""
    if os.geteuid() != 0:
        return "not root"
    missing = [tool for tool in ("ip", "tc", "nft", *further) if shutil.which(tool) is None]
    if missing:
        packages = sorted({PACKAGES[tool] for tool in missing})
        return f"no {' and no '.join(missing)} (Debian: apt install {' '.join(packages)})"
    try:
        with slow_lines(["probe"], Rate(2_000, 10_000, 5)):
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


@contextmanager
def slow_lines(names: list[str], rate: Rate) -> Iterator[dict[str, Line]]:
    """A line for each name, gone at the end whatever happens. CalledProcessError where the kernel refuses."""
    made: list[tuple[str, str]] = []
    lines = {}
    block = f"10.213.{os.getpid() % 250}"
    try:
        for index, name in enumerate(names):
            space, near, far = f"line{os.getpid()}-{index}", f"ln{os.getpid()}n{index}", f"ln{os.getpid()}f{index}"
            here, there = f"{block}.{4 * index + 1}", f"{block}.{4 * index + 2}"
            made.append((space, near))
            _do(f"ip netns add {space}")
            _do(f"ip link add {near} type veth peer name {far} netns {space}")
            _do(f"ip addr add {here}/30 dev {near}")
            _do(f"ip link set {near} up")
            _do(f"ip -n {space} addr add {there}/30 dev {far}")
            _do(f"ip -n {space} link set {far} up")
            _do(f"ip -n {space} link set lo up")
            inside = f"ip netns exec {space} nft"
            _do(f"{inside} add table inet line")
            for hook in ("input", "output"):
                _do(f"{inside} add chain inet line {hook} {{ type filter hook {hook} priority 0 ; }}")
            lines[name] = Line(["ip", "netns", "exec", space], here, space, near, far)
            lines[name].shape(rate)
        yield lines
    finally:
        for space, near in made:
            for command in (f"ip link del {near}", f"ip netns del {space}"):  # the one before may not have been made
                subprocess.run(command.split(), capture_output=True, check=False)


def _bucket(kbit: int) -> str:
    """The token bucket of a rate: it holds 2 ms, so that it keeps up with the timers, and at least ten packets."""
    return f"tbf rate {kbit}kbit burst {max(16_000, kbit // 4)} latency {QUEUE_MS}ms"


def _do(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)
