"""Seeds that a worker and a round have for themselves."""

from blake3 import blake3


def round_seed(seed: int, worker: str, round_number: int, rank: int = 0) -> int:
    """Return the seed of the random numbers (dropout, for example) of one worker, or one of its processes, in one
    round, below 2^63."""
    name = f"{seed}\0{worker}\0{round_number}" + (f"\0{rank}" if rank else "")
    return int.from_bytes(blake3(name.encode()).digest()[:8], "little") >> 1
