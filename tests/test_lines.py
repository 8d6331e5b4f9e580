"""Long lines: what one direction does with each packet, exactly; what a network card does; and whole lines, by their
counters. No test here expects a machine to be in time: lines are never faster than they are said to be."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness import lines
from harness.lines import FRAMING, MTU, TCP_PAYLOAD, Line, Shape, compile_c, slow_lines

SUPPORT = Path(__file__).parent / "support"
MBIT, MS = 1e6, 1_000_000

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.fixture(scope="module")
def way(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """One direction by itself: what it prints for what it is told (support/way.c)."""
    program = compile_c(SUPPORT / "way.c", tmp_path_factory.mktemp("way") / "way")
    return lambda told: subprocess.run(
        [program], input=told, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def setting(at: int, rate: float, delay: int, queue: int = 1_000_000, loss: float = 0) -> str:
    return f"set {at} {rate} {delay} {queue} {loss}\n"


@needs_cc
def test_packets_are_transmitted_one_after_the_other_and_then_travel(way: Callable[[str], list[str]]) -> None:
    told = setting(0, 10 * MBIT, 20 * MS)
    told += "enter 1000 1500\nenter 1000 40\nenter 90000000 962\nleave 200000000\n"
    first = 1000 + 1538 * 800  # 10 Mbit/s: 800 ns per byte, framing included
    second = first + 78 * 800
    third = 90 * MS + 1000 * 800  # the line was idle
    assert way(told)[:-1] == [f"{number} {at + 20 * MS} passed" for number, at in enumerate([first, second, third])]


@needs_cc
def test_nothing_arrives_before_its_time(way: Callable[[str], list[str]]) -> None:
    told = setting(0, 10 * MBIT, 20 * MS) + "enter 0 1500\n"
    arrives = 1538 * 800 + 20 * MS
    assert way(told + f"leave {arrives - 1}\n") == ["0 0 0 0 0 0"]
    assert way(told + f"leave {arrives}\n") == [f"0 {arrives} passed", f"1 {1538} 0 0 0 0"]


@needs_cc
def test_a_full_queue_drops_what_comes_last(way: Callable[[str], list[str]]) -> None:
    told = setting(0, 8 * MBIT, 0, queue=10_000)  # a microsecond per byte: room for 6 of 1538
    told += "enter 0 1500\n" * 8
    told += "enter 1538000 1500\nenter 1538001 1500\n"  # one has been transmitted
    told += "enter 1538002 734\n"  # what is small finds room
    *fates, count = way(told + "leave 100000000\n")
    assert fates[:3] == ["6 dropped", "7 dropped", "9 dropped"]
    assert [int(fate.split()[0]) for fate in fates[3:]] == [0, 1, 2, 3, 4, 5, 8, 10]
    assert fates[-1] == f"10 {1000 * (7 * 1538 + 772)} passed"
    assert count == f"8 {7 * 1538 + 772} 0 0 3 {3 * 1538}"


@needs_cc
def test_losses_are_drawn_by_seed_and_number_alone(way: Callable[[str], list[str]]) -> None:
    def lost(seed: int, loss: float, gap: int) -> list[int]:
        told = f"seed {seed}\n" + setting(0, 1000 * MBIT, 5 * MS, loss=loss)
        told += "".join(f"enter {gap * number} 1000\nleave {gap * number}\n" for number in range(20_000))
        *fates, count = way(told + f"leave {10**12}\n")
        gone = [int(fate.split()[0]) for fate in fates if fate.endswith("lost")]
        assert count == f"{20_000 - len(gone)} {1038 * (20_000 - len(gone))} {len(gone)} {1038 * len(gone)} 0 0"
        return gone

    some = lost(1, 0.005, 10_000)
    assert lost(1, 0.005, 77_777) == some, "whenever they come"
    assert lost(2, 0.005, 10_000) != some
    assert 60 < len(some) < 140  # four standard deviations about 100
    assert set(some) < set(lost(1, 0.05, 10_000)), "of a worse line they are lost too"
    assert lost(1, 0, 10_000) == []
    assert lost(1, 1, 10_000) == list(range(20_000))


@needs_cc
def test_what_is_set_anew_holds_from_then_on(way: Callable[[str], list[str]]) -> None:
    told = setting(0, 8 * MBIT, 10 * MS) + "enter 0 962\n" * 4  # a millisecond each
    told += setting(2 * MS, 4 * MBIT, 10 * MS)  # half the rate, for the third and fourth
    assert [fate.split()[1] for fate in way(told + "leave 100000000\n")[:-1]] == [
        str(ms * MS) for ms in (11, 12, 14, 16)
    ]
    told = setting(0, 8 * MBIT, 10 * MS) + "enter 0 962\n" * 2 + "leave 11000000\n"
    told += setting(11 * MS, 8 * MBIT, 10 * MS, loss=1) + "leave 12000000\n"  # gone, with what is under way
    told += setting(12 * MS, 8 * MBIT, 10 * MS) + "enter 12000000 962\nleave 100000000\n"
    assert [fate.split()[2] for fate in way(told)[:-1]] == ["passed", "lost", "passed"]


@contextmanager
def far(names: list[str], shape: Shape, *, tcp: str | None = None, seed: int = 0) -> Iterator[list[Line]]:
    """Lines, or a skip with the reason."""
    if reason := lines.why_not():
        pytest.skip(f"no lines here: {reason}")
    with slow_lines(dict.fromkeys(names, shape), tcp=tcp, seed=seed) as made:
        yield list(made.values())


def behind(line: Line, code: str, *arguments: object) -> subprocess.Popen[bytes]:
    """A Python process behind a line; `argv[1:]` are the arguments."""
    imports = "import os, select, socket, struct, sys, time\n"
    command = [*line.prefix, sys.executable, "-S", "-c", imports + code, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


FETCH = """
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
while piece := s.recv(1 << 20): sys.stdout.buffer.write(piece)
"""
SEND = """
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
s.sendall(sys.stdin.buffer.read())
s.shutdown(socket.SHUT_WR)
s.recv(1)
"""


def carried_down(line: Line, sent: bytes) -> tuple[bytes, float]:
    """Send bytes down a line; what arrived, and after how many seconds from when the connection was there."""
    with socket.create_server((line.address, 0)) as server, behind(line, FETCH, *server.getsockname()) as fetching:
        connection, _ = server.accept()
        began = time.monotonic()
        sending = threading.Thread(target=_send, args=(connection, sent))
        sending.start()
        received, _ = fetching.communicate()
        sending.join()
        return received, time.monotonic() - began


def _send(connection: socket.socket, sent: bytes) -> None:
    with connection:
        connection.sendall(sent)


def carried_up(line: Line, sent: bytes) -> bytes:
    received = b""
    with socket.create_server((line.address, 0)) as server, behind(line, SEND, *server.getsockname()) as sender:
        sending = threading.Thread(target=sender.communicate, args=[sent])
        sending.start()
        connection, _ = server.accept()
        with connection:
            while piece := connection.recv(1 << 20):
                received += piece
        sending.join()
    return received


@pytest.mark.nightly
@pytest.mark.parametrize("tcp", ["cubic", "bbr"])
@pytest.mark.parametrize("mbit", [10, 100, 500])
def test_bytes_arrive_whole_at_no_more_than_the_rate(mbit: int, tcp: str) -> None:
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    if tcp not in available:
        pytest.skip(f"no {tcp} in this kernel: it has {' '.join(available)}")
    sent = os.urandom(mbit * 25_000)  # 0.2 s of it
    with far(["w"], Shape(mbit, mbit, 0.02), tcp=tcp) as (line,):
        received, took_s = carried_down(line, sent)
        assert received == sent
        up, down = line.count()
        packets = -(-len(sent) // TCP_PAYLOAD)
        assert took_s >= (packets * (MTU + FRAMING) - line_buffers()) * 8 / mbit / 1e6
        # Each packet is counted by itself, with all its heads, though hosts hand over many at once.
        assert down.packets >= packets
        assert down.bytes >= len(sent) + packets * (52 + FRAMING)
        assert down.bytes <= down.packets * (MTU + FRAMING)
        assert 0 < up.bytes < down.bytes
        assert carried_up(line, sent) == sent
        assert line.count()[0].bytes - up.bytes >= len(sent) + packets * (52 + FRAMING)


def line_buffers() -> int:
    """Bytes by which a line may seem faster than it is: a tick's worth, packets that are half through."""
    return 2 * (MTU + FRAMING)


@pytest.mark.nightly
def test_a_round_trip_takes_as_long_as_said_between_two_lines_twice() -> None:
    """As the kernels themselves see it, which put it into TCP_INFO: the least of all their samples."""
    listen = "s = socket.create_server((sys.argv[1], 4000))\nprint(flush=True)\nc, _ = s.accept()\nc.recv(1)\n"
    probe = """
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
s.send(b"x")
s.recv(1)
print(struct.unpack_from("I", s.getsockopt(socket.IPPROTO_TCP, 11, 232), 148)[0])
"""
    with far(["a", "b"], Shape(10, 100, 0.06)) as (a, b):
        with socket.create_server((a.address, 0)) as server, behind(a, probe, *server.getsockname()) as probing:
            connection, _ = server.accept()
            with connection:
                connection.recv(1)
            assert int(probing.communicate()[0]) >= 60_000
        with behind(b, listen, b.far_address) as listening:
            assert listening.stdout is not None
            listening.stdout.readline()
            with behind(a, probe, b.far_address, 4000) as probing:
                assert int(probing.communicate()[0]) >= 120_000


@pytest.mark.nightly
def test_lines_end_with_their_parent_and_leave_nothing(tmp_path: Path) -> None:
    """kill -9: not even then."""
    code = "import sys, time\nfrom harness.lines import Shape, slow_lines\n"
    code += "with slow_lines({'w': Shape(10, 10)}) as made:\n"
    code += "    line = made['w'].program\n    print(line.device, line.pid, flush=True)\n    time.sleep(600)\n"
    with far([], Shape(10, 10)):
        pass  # or a skip
    root = Path(__file__).parents[1]
    with subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        device, pid = parent.stdout.readline().split()
        assert Path(f"/sys/class/net/{device}").exists()
        parent.send_signal(signal.SIGKILL)
    while Path(f"/proc/{pid}").exists() or Path(f"/sys/class/net/{device}").exists():
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("user", "absent", "said"),
    [
        (1000, (), "not root"),
        (0, ("openssl",), "no openssl (Debian: apt install openssl)"),
        (0, ("cc", "ip"), "no cc and no ip (Debian: apt install gcc iproute2)"),
        (0, (), "no /nowhere/tun"),
    ],
)
def test_a_machine_without_root_tools_or_devices_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, user: int, absent: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool in absent else tool)
    monkeypatch.setattr(lines, "TUN", Path("/nowhere/tun"))
    assert lines.why_not("openssl") == said
