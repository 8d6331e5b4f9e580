"""How many inner steps a worker does per round: H, or as many as it manages in the round's time. Pure."""

from protocol.spec.sections import SyncSpec


def inner_steps(sync: SyncSpec, inner_steps_per_second: float | None, elapsed_s: float = 0.0) -> int:
    """Return H of one worker for a round that opened `elapsed_s` seconds ago.

    With `sync.inner_steps = "auto"`: as many as a worker of that measured speed does in the rest of `round_s`, within
    the bounds; so fast and slow workers, and those that came late or were restarted, finish at about the same time, and
    the weighting by tokens does the rest. Before the first measurement the speed is taken to be `nominal_inner_steps`
    per `round_s`.
    """
    if sync.inner_steps != "auto":
        return sync.inner_steps
    assert sync.round_s is not None  # the spec demands it
    if inner_steps_per_second is None or inner_steps_per_second <= 0:
        inner_steps_per_second = sync.nominal_inner_steps / sync.round_s
    left_s = max(sync.round_s - elapsed_s, 0.0)
    wanted = min(inner_steps_per_second * left_s, float(sync.max_inner_steps))
    return max(sync.min_inner_steps, round(wanted))
