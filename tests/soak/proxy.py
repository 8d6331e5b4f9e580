"""A TCP proxy that does harm: it delays, cuts connections in the middle of a body, stalls, and flips bits.

After how many bytes of a connection comes from one seed; what it does then is what it has done least so far. Bits are
flipped inside long bodies only, which carry tensors and a digest: control messages have TLS for that, in any real run.
"""

import asyncio
import random

from tests.soak.relay import Relay

PIECE_BYTES = 1 << 14
ANYWHERE = ("cut", "stall")
FAULTS = (*ANYWHERE, "corrupt")


class Proxy(Relay):
    """Forwards connections to 127.0.0.1:`port`. `harm` counts what was done."""

    def __init__(self, port: int, seed: int, *, mean_bytes: int, delay_s: float) -> None:
        super().__init__(port, seed)
        self._mean_bytes, self._delay_s = mean_bytes, delay_s

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
        """Until the end, or until a fault that ends the connection."""
        left = rng.expovariate(1 / self._mean_bytes)
        while piece := await reader.read(PIECE_BYTES):
            await asyncio.sleep(self._delay_s * rng.random())
            left -= len(piece)
            if left < 0:
                left = rng.expovariate(1 / self._mean_bytes)
                in_body = len(piece) >= PIECE_BYTES // 2 and b"\r\n\r\n" not in piece
                fault = min(FAULTS if in_body else ANYWHERE, key=lambda each: self.harm[each])
                self.harm[fault] += 1
                if fault == "cut":
                    writer.write(piece[: len(piece) // 2])
                    return
                if fault == "stall":
                    await asyncio.sleep(rng.uniform(0.5, 4))
                else:
                    piece = bytes([piece[0] ^ 1 << rng.randrange(8)]) + piece[1:]
            writer.write(piece)
            await writer.drain()
