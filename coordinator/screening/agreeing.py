"""Whether those who measured the same thing agree, and who is alone with what it says. Pure."""

import statistics
from collections.abc import Mapping

NEAR = 0.05  # nats per token: hardware and precision make a tenth of that


def alone(losses: Mapping[str, float]) -> set[str] | None:
    """Return who is further than NEAR from the median of `losses`, by worker; None where no majority is that near."""
    median = statistics.median_low(losses.values())
    far = {worker for worker, loss in losses.items() if abs(loss - median) > NEAR}
    return far if 2 * len(far) < len(losses) else None
