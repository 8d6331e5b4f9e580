"""What a seed fails with: an invariant that does not hold."""


class Violation(AssertionError):
    """An invariant does not hold."""


def demand(holds: bool, invariant: str, message: str) -> None:
    if not holds:
        raise Violation(f"{invariant}: {message}")
