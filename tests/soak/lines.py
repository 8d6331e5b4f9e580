"""Slow and lossy lines: a network namespace per worker, a veth pair, `tc tbf` for the rate, `nft` for the loss.

Needs root, iproute2 and nftables. Where one is missing there are no such lines, and `why_not` says so.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

UP_KBIT, DOWN_KBIT, LOSS_PER_MILLE = 2_000, 10_000, 5


@dataclass(frozen=True)
class Line:
    """`prefix` goes before a command that is to run behind this line; `address` is this machine's at its near end."""

    prefix: list[str]
    address: str


def why_not() -> str | None:
    """Why there are no slow lines on this machine; None where there are."""
    if os.geteuid() != 0:
        return "not root"
    missing = [tool for tool in ("ip", "tc", "nft") if shutil.which(tool) is None]
    if missing:
        return f"no {' and no '.join(missing)} (Debian: apt install iproute2 nftables)"
    try:
        with slow_lines(["probe"]):
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


@contextmanager
def slow_lines(names: list[str]) -> Iterator[dict[str, Line]]:
    """A line for each name, gone at the end whatever happens. CalledProcessError where the kernel refuses."""
    made: list[tuple[str, str]] = []
    lines = {}
    block = f"10.213.{os.getpid() % 250}"
    try:
        for index, name in enumerate(names):
            space, near, far = f"soak{os.getpid()}-{index}", f"sk{os.getpid()}n{index}", f"sk{os.getpid()}f{index}"
            here, there = f"{block}.{4 * index + 1}", f"{block}.{4 * index + 2}"
            made.append((space, near))
            _do(f"ip netns add {space}")
            _do(f"ip link add {near} type veth peer name {far} netns {space}")
            _do(f"ip addr add {here}/30 dev {near}")
            _do(f"ip link set {near} up")
            _do(f"ip -n {space} addr add {there}/30 dev {far}")
            _do(f"ip -n {space} link set {far} up")
            _do(f"ip -n {space} link set lo up")
            _do(f"tc qdisc add dev {near} root tbf rate {DOWN_KBIT}kbit burst 16kb latency 200ms")
            _do(f"tc -n {space} qdisc add dev {far} root tbf rate {UP_KBIT}kbit burst 16kb latency 200ms")
            inside = f"ip netns exec {space} nft"
            _do(f"{inside} add table inet soak")
            for hook in ("input", "output"):
                _do(f"{inside} add chain inet soak {hook} {{ type filter hook {hook} priority 0 ; }}")
                _do(f"{inside} add rule inet soak {hook} numgen random mod 1000 < {LOSS_PER_MILLE} drop")
            lines[name] = Line(["ip", "netns", "exec", space], here)
        yield lines
    finally:
        for space, near in made:
            for command in (f"ip link del {near}", f"ip netns del {space}"):  # the one before may not have been made
                subprocess.run(command.split(), capture_output=True, check=False)


def _do(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)
