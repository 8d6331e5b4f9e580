"""Other systems over the same lines: each worker is a process behind its line, and reaches the others through the
coordinator's side. The processes' code is in benchmarks/peers/remote_*.py, and for gloo in worker.py."""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.peers.comparison import WRONG_MEAN
from benchmarks.peers.environments import Unavailable, cache, last_line, prepare
from harness.lines import Line
from harness.remote import Remote, remote, together

PEERS = ("gloo", "torchft", "hivemind")


def gloo(workers: Sequence[Remote], elements: int, rounds: int) -> list[list[dict[str, Any]]]:
    """Return the workers' answers for each all-reduce."""
    with tempfile.TemporaryDirectory(prefix="outerstep-wan-") as folder:
        for rank, worker in enumerate(workers):
            order = {"do": "gloo", "elements": elements, "rounds": rounds}
            worker.order(rank=rank, workers=len(workers), meeting=f"{folder}/store", **order)
        return together(workers, rounds, 0.0)


def other(peer: str, lines: Sequence[Line], elements: int, rounds: int) -> list[list[dict[str, Any]]]:
    """Return the answers of a peer's processes for each sync after a warm-up. Raises `Unavailable`."""
    python, log = prepare(peer), cache() / f"remote-{peer}.log"
    with log.open("w") as file, ExitStack() as stack:
        workers = [stack.enter_context(remote(line, f"benchmarks.peers.remote_{peer}", python, file)) for line in lines]
        meeting: Any = None
        try:
            for rank, worker in enumerate(workers):
                order = {"elements": elements, "rounds": rounds + 1, "address": worker.line.far_address}
                worker.order(rank=rank, workers=len(workers), meeting=meeting, **order)
                meeting = meeting or worker.answer()["meeting"]
            answers = together(workers, rounds + 1, 0.0)[1:]
            error = max(worker.answer()["relative_error"] for worker in workers)
        except RuntimeError as ended:
            raise Unavailable(f"failed: {last_line(log.read_text())}; see {log}") from ended
    if not error <= WRONG_MEAN:
        raise Unavailable(f"not the mean: its relative error is {error:.2g}")
    return answers
