"""Entropy coding of uploads by zstd, where it pays: where the line is slower than what the coder saves.

A fragment is coded if that takes less time than the line would take for the bytes that it saves. Both are measured on
the uploads themselves, the newest counting most: the line with every body of a megabyte or more, coded or not; the
coder with what it codes, and while nothing is coded with one chunk now and then. So a line that becomes slow is noticed
with the next body, and data that become compressible soon after. While nothing is known, fragments are coded.

Each frame says itself whether it is coded (docs/wire-format.md).
"""

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from protocol import wire
from protocol.digest import Buffer
from worker.codecs import encoded_chunks, pack_fragment

DECAY = 0.5  # the weight of all earlier measurements, as one of a fragment or a body is added
# Less than this fits into buffers on the way at once, however slow the line: its time says nothing.
LEAST_BYTES = 1 << 20
PROBE_EVERY = 16  # fragments: while none is coded, the first chunk of every 16th is, to measure the coder

log = logging.getLogger(__name__)


@dataclass
class Measured:
    """Sums in which old measurements decay: bytes, the seconds that they took, and the bytes that coding saved."""

    bytes: float = 0.0
    seconds: float = 0.0
    saved: float = 0.0

    def add(self, amount: int, seconds: float, saved: int = 0) -> None:
        self.bytes = DECAY * self.bytes + amount
        self.seconds = DECAY * self.seconds + seconds
        self.saved = DECAY * self.saved + saved

    @property
    def megabytes_per_second(self) -> float:
        return self.bytes / max(self.seconds, 1e-9) / 1e6


class Entropy:
    """The choice whether one worker's uploads are coded. `clock` gives seconds. Thread-safe, but fragments are packed
    one at a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.line, self.coder = Measured(), Measured()
        self._raw_fragments = 0  # since one was coded or probed
        self._logged_choice: bool | None = None

    def pays(self) -> bool:
        """Return True if coding a byte takes no longer than the line takes for what that saves; also while one of the
        two is not measured yet."""
        with self._lock:
            line, coder = self.line, self.coder
            # seconds per byte to code <= seconds per byte on the line * share of the bytes that coding saves
            return not line.bytes or coder.seconds * line.bytes <= line.seconds * coder.saved

    def pack(self, vector: Tensor, codec: str, *, wanted: bool) -> list[Buffer]:
        """Encode float32[n] into frames as `pack_fragment` does, coded where it pays; never if that is not `wanted`.

        Raises CodecError for values that the codec cannot carry.
        """
        if not wanted:
            return pack_fragment(vector, codec, zstd=False)
        coded = self.pays()
        self._log_choice(coded)
        probed = coded or self._raw_fragments == PROBE_EVERY - 1
        self._raw_fragments = 0 if probed else self._raw_fragments + 1
        raw_bytes, packed_bytes, seconds = 0, 0, 0.0
        frames: list[Buffer] = []
        for index, raw in enumerate(encoded_chunks(vector, codec)):
            if not (coded or (probed and index == 0)):
                frames.append(raw.data)
                continue
            started = self._clock()
            frames.append(wire.pack_frame(raw, zstd=True))
            seconds += self._clock() - started
            raw_bytes, packed_bytes = raw_bytes + len(raw), packed_bytes + len(frames[-1])
        if probed:
            with self._lock:
                self.coder.add(raw_bytes, seconds, raw_bytes - packed_bytes)
        return frames

    def sent(self, body: Iterator[bytes]) -> Iterator[bytes]:
        """Yield `body`, and measure how long the line takes for it, from its first bytes to its last."""
        started, amount = self._clock(), 0
        for data in body:
            yield data
            amount += len(data)
        if amount >= LEAST_BYTES:
            with self._lock:
                self.line.add(amount, self._clock() - started)

    def _log_choice(self, pays: bool) -> None:
        """Log the choice if it is another one than before."""
        if pays != self._logged_choice and self.line.bytes and self.coder.bytes:
            self._logged_choice = pays
            log.info(
                "uploads: %s zstd, which saves %.1f %% at %.0f MB/s; the line takes %.2f MB/s",
                "with" if pays else "without",
                100 * self.coder.saved / self.coder.bytes,
                self.coder.megabytes_per_second,
                self.line.megabytes_per_second,
            )
