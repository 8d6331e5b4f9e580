"""What threads free serves all of them."""

import subprocess
import sys

import pytest

# As many threads as wait for each other hold memory at once; then glibc tells how many heaps it has made.
THREADS_WITH_MEMORY = """
import ctypes, sys, threading
from coordinator.server import share_free_memory

if sys.argv[1] == "shared":
    share_free_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
met = threading.Barrier(8)

def hold():
    met.wait()
    libc.free(ctypes.c_void_p(libc.malloc(1000)))
    met.wait()

threads = [threading.Thread(target=hold) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc")
def test_threads_share_two_heaps() -> None:
    heaps = {}
    for how in ("shared", "apart"):
        command = [sys.executable, "-c", THREADS_WITH_MEMORY, how]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        heaps[how] = told.count("<heap nr=")
    assert heaps["shared"] <= 2 < heaps["apart"]
