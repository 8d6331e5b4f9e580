"""TCP's congestion control, asked for per socket, on both sides.

BBR keeps to a far line's rate through loss and after a silence, where CUBIC, Linux's default, falls to a fraction of it
(Cardwell et al. 2016). A kernel has it or not, and gives it to everybody or to root alone; no sysctl is needed to ask.
"""

import os
import socket
from contextlib import suppress

VARIABLE = "OUTERSTEP_TCP"  # another one to ask for, by its name in the kernel
BBR = WANTED = "bbr"


def ask(opened: socket.socket) -> str:
    """Ask for it on a socket, or on a listening one for all that it accepts. Return what the kernel gives."""
    option = getattr(socket, "TCP_CONGESTION", None)
    if option is None:
        return "the system's own"
    with suppress(OSError):  # the kernel lacks it, or keeps it for root
        opened.setsockopt(socket.IPPROTO_TCP, option, os.environ.get(VARIABLE, WANTED).encode())
    return opened.getsockopt(socket.IPPROTO_TCP, option, 16).rstrip(b"\0").decode()
