"""What a worker's contributions have been worth lately, and when it had better take no part for a while. Pure."""

from dataclasses import dataclass, replace

MEMORY = 0.8  # of the score, per round; the rest is the round's
QUARANTINED = 0.35  # a score below it: five rounds in a row for nothing
BACK = 0.6  # the score afterwards: three more are enough
FIRST_ROUNDS, MOST_ROUNDS = 10, 320  # in quarantine: twice as many each time


@dataclass(frozen=True)
class Standing:
    """score  between 0 and 1: how much of its rounds' contributions has counted, the last ones most
    times  that it was in quarantine
    until  the round from which on it takes part again; 0 where it never was"""

    score: float = 1.0
    times: int = 0
    until: int = 0

    def after(self, round_: int, counted: float) -> "Standing":
        """Return the standing after a round whose contribution counted so much, 0 to 1."""
        score = MEMORY * self.score + (1 - MEMORY) * min(counted, 1.0)
        if score >= QUARANTINED:
            return replace(self, score=score)
        rounds = min(FIRST_ROUNDS << self.times, MOST_ROUNDS)
        return Standing(BACK, min(self.times + 1, MOST_ROUNDS.bit_length()), round_ + 1 + rounds)

    def readmitted(self) -> "Standing":
        """Return the standing as an operator's word has it."""
        return replace(self, score=max(self.score, BACK), until=0)
