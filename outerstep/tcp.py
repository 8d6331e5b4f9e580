"""How long TCP takes for a transfer over a line: its slow start, and what losses leave of it. Pure arithmetic.

A connection that begins, or that was silent, sends INITIAL_WINDOW packets and twice as many in each round trip that
follows (RFC 6928, RFC 5681), until the line is full. With losses none keeps more than about sqrt(3/2 / p) packets under
way (Mathis et al. 1997, doi:10.1145/263932.264023). Many connections add up, on either way.
"""

import math
from dataclasses import dataclass

PACKET_BYTES = 1448  # payload of a full one
INITIAL_WINDOW = 10  # packets
ACK_SHARE = 0.04  # of what comes one way goes back: a packet without payload for every two that are full

# What worker/line/line.py has on far lines, but with BBR: connections up at first and at most, and down for each
# fragment; the most bytes of a part, of lines that are not so wide that line.py makes them larger.
FAR_S, UP_FIRST, UP_MOST, DOWN_EACH = 0.015, 4, 32, 8
UP_PART_BYTES, DOWN_PART_BYTES = 1 << 18, 1 << 20


@dataclass(frozen=True)
class Way:
    """One way of a line: payload bits per second, seconds of a round trip, the share of packets that are lost, and how
    many connections begin at once, and may be in use."""

    rate: float
    latency_s: float
    loss: float
    first: int
    most: int

    @property
    def connection_bytes_per_s(self) -> float:
        """What losses leave one connection."""
        if not self.loss * self.latency_s:
            return self.rate / 8
        return min(self.rate / 8, PACKET_BYTES / self.latency_s * math.sqrt(1.5 / self.loss))

    @property
    def bytes_per_s(self) -> float:
        return min(self.rate / 8, self.most * self.connection_bytes_per_s)

    def transfer_s(self, size: float) -> float:
        """Return the seconds from the first byte sent to the last, of so many bytes after a silence."""
        window, sent, seconds = self.first * INITIAL_WINDOW * PACKET_BYTES, 0.0, 0.0
        while sent + window < size and window < self.bytes_per_s * self.latency_s:
            sent, seconds, window = sent + window, seconds + self.latency_s, 2 * window
        return seconds + (size - sent) / self.bytes_per_s

    def last_part_s(self, size: float) -> float:
        """Return the seconds by which the last part of that size is later than the line would have carried it, where
        losses hold its connection back."""
        return size / self.connection_bytes_per_s - size / self.bytes_per_s


def up(rate: float, latency_s: float, loss: float) -> Way:
    """Return the way up of a worker's line."""
    return Way(rate, latency_s, loss, *((UP_FIRST, UP_MOST) if latency_s >= FAR_S else (1, UP_MOST)))


def down(rate: float, latency_s: float, loss: float) -> Way:
    """Return the way down, of one fragment."""
    return Way(rate, latency_s, loss, *((DOWN_EACH, DOWN_EACH) if latency_s >= FAR_S else (1, DOWN_EACH)))
