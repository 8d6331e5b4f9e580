"""Seeds that a worker and a round have for themselves."""

from blake3 import blake3


def round_seed(seed: int, worker: str, round_number: int) -> int:
    """Return the seed of one worker's random numbers (dropout, for example) in one round, below 2^63."""
    name = f"{seed}\0{worker}\0{round_number}"
    return int.from_bytes(blake3(name.encode()).digest()[:8], "little") >> 1
