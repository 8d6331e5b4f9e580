"""Entropy coding of uploads with zstd, where it pays off: where the coder saves bytes faster than the line sends them.

Both rates are measured on the uploads themselves, the newest counting most: the line's with every body of a megabyte or
more (worker/line/line.py), the coder's with what it codes; while nothing is coded, one fragment now and then is. So the
next body shows that the line has become slow, and data that become compressible are noticed soon after. Until both are
measured, fragments are coded.

Each frame records whether it is coded (docs/wire-format.md).
"""

import logging
from collections.abc import Callable

from torch import Tensor

from protocol import wire
from protocol.digest import Buffer
from worker.codecs import encoded_chunks, pack_fragment

DECAY = 0.5  # the weight of all earlier measurements when a fragment or a body is added
PROBE_EVERY = 16  # fragments: while none is coded, every 16th is coded to measure the coder

log = logging.getLogger(__name__)


class Rate:
    """Bytes per second, from measurements that decay. One thread adds, any thread may read."""

    def __init__(self) -> None:
        self.sums = (0.0, 0.0)  # bytes, seconds

    def add(self, amount: int, seconds: float) -> None:
        """Add a measurement of `amount` bytes."""
        self.sums = (DECAY * self.sums[0] + amount, DECAY * self.sums[1] + seconds)

    @property
    def bytes_per_s(self) -> float:
        """0 before the first measurement."""
        amount, seconds = self.sums
        return amount / max(seconds, 1e-9)

    def __str__(self) -> str:
        return f"{self.bytes_per_s / 1e6:.2f} MB/s"


class Entropy:
    """Decides whether one worker's uploads are coded. `line`: how fast they are sent; `coder`: how fast coding saves
    bytes. `clock` gives seconds. Fragments are packed one at a time."""

    def __init__(self, line: Rate, clock: Callable[[], float]) -> None:
        self.line, self.coder, self._clock = line, Rate(), clock
        self._uncoded = 0  # fragments since the last coded one
        self._logged: bool | None = None

    def pays(self) -> bool:
        """Return True if the coder saves at least as many bytes per second as the line sends, or if either is not
        measured yet."""
        (saved, coding_s), (sent, sending_s) = self.coder.sums, self.line.sums
        return saved * sending_s >= sent * coding_s

    def pack(self, vector: Tensor, codec: str, *, wanted: bool) -> list[Buffer]:
        """Encode float32[n] into frames as `pack_fragment` does, coded if that pays off; never coded unless `wanted`.

        Raises CodecError for values that the codec cannot represent.
        """
        if not (wanted and self._is_next_coded()):
            return pack_fragment(vector, codec, zstd=False)
        frames: list[Buffer] = []
        saved_bytes, seconds = 0, 0.0
        for raw in encoded_chunks(vector, codec):
            started = self._clock()
            frames.append(wire.pack_frame(raw, zstd=True))
            seconds += self._clock() - started
            saved_bytes += len(raw) - len(frames[-1])
        self.coder.add(saved_bytes, seconds)
        return frames

    def _is_next_coded(self) -> bool:
        """Return True if the next fragment is coded. Log the decision when it changes."""
        pays = self.pays()
        if pays != self._logged and self.line.sums[0] and self.coder.sums[1]:
            self._logged = pays
            how = "with" if pays else "without"
            log.info("uploads: %s zstd, which saves %s; the line sends %s", how, str(self.coder), str(self.line))
        self._uncoded = 0 if pays else (self._uncoded + 1) % PROBE_EVERY
        return self._uncoded == 0
