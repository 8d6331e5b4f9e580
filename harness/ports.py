"""Ports for servers that cannot choose one themselves, or that are started again at the same one.

They are below those that Linux gives to connections and to servers without a port (32,768 and more), and each process
has a block that no other one uses. So a port stays free from when it is chosen, and while its server is stopped.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import cycle, islice

_FIRST, _BLOCK, _BLOCKS = 10_240, 256, 88
_held: list[socket.socket] = []


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port at which nobody listens."""
    for port in islice(_block(os.getpid()), _BLOCK):
        with suppress(OSError), socket.create_server((host, port)):
            return port
    raise RuntimeError(f"no port of {host} is free")


@cache
def _block(pid: int) -> Iterator[int]:
    """Return the ports of the process `pid`, again and again. It holds a name for as long as it lives, which no other
    process can have."""
    for first in range(_FIRST, _FIRST + _BLOCK * _BLOCKS, _BLOCK):
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            name.bind(f"\0outerstep-ports-{first}")
        except OSError:  # another process has it
            name.close()
            continue
        _held.append(name)
        return cycle(range(first, first + _BLOCK))
    raise RuntimeError("too many processes of tests")
