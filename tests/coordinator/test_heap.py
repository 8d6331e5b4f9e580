"""What is freed serves whoever asks next, on whatever thread."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="settings of glibc")

# As many threads as wait for each other hold memory at once; then glibc tells how many heaps it has made.
THREADS_WITH_MEMORY = """
import ctypes, sys, threading
from coordinator.process import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
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

# Page faults as four blocks of 8 MB are written, the tenth time that they are asked for and freed.
FAULTS = """
import resource, sys
import numpy as np
from coordinator.process import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
for _ in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [np.empty(8 << 20, np.uint8) for _ in range(4)]
    for block in blocks:
        block[::4096] = 1
    del blocks, block
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


def told(script: str, how: str) -> str:
    return subprocess.run([sys.executable, "-c", script, how], capture_output=True, text=True, check=True).stdout


def test_threads_share_two_heaps() -> None:
    heaps = {how: told(THREADS_WITH_MEMORY, how).count("<heap nr=") for how in ("kept", "apart")}
    assert heaps["kept"] <= 2 < heaps["apart"]


@pytest.mark.slow
def test_blocks_of_the_size_of_fragments_are_used_again() -> None:
    faults = {how: int(told(FAULTS, how)) for how in ("kept", "given back")}
    assert faults["kept"] < 10 < faults["given back"]
