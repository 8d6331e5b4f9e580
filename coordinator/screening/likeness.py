"""Which workers keep sending nearly the same: two that train on the same data, though not bit for bit. Pure.

Dropout, another precision or another GPU change every value a little, so the losses and norms of two such workers
differ. Their directions stay closer to each other than to anybody else's, round after round: measured, 0.06 to 0.3 of
the usual distance with another dropout seed, 0.4 to 0.9 with bf16 beside fp32, 0.88 to 1.1 with data of their own.
"""

from collections.abc import Collection, Mapping

MEMORY = 0.8  # of the score, for each fragment; the rest is the newest distance
SAME = 0.8  # a score below it


class Likeness:
    """Remembers how close pairs of workers have been. Not kept over a restart, after which a few rounds tell again."""

    def __init__(self) -> None:
        self._scores: dict[tuple[str, str], float] = {}

    def see(self, distances: Mapping[tuple[str, str], float], present: Collection[str]) -> list[tuple[str, str]]:
        """Note the `distances` of pairs among the workers that were `present`, as shares of the usual one; it is 1 for
        pairs that are not named. Return the pairs that send nearly the same, in order."""
        for pair in {*distances, *(pair for pair in self._scores if set(pair) <= set(present))}:
            score = MEMORY * self._scores.get(pair, 1.0) + (1 - MEMORY) * distances.get(pair, 1.0)
            self._scores[pair] = score
            if score > 0.99:
                del self._scores[pair]
        return sorted(pair for pair in distances if self._scores.get(pair, 1.0) < SAME)
