"""What a check has found, and what all findings together say."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from outerstep.common.exit_codes import Exit


class State(StrEnum):
    FINE = "fine"
    WARNING = "warning"  # the worker can train all the same
    WRONG = "wrong"
    SKIPPED = "skipped"  # something that it needs is wrong


@dataclass(frozen=True)
class Finding:
    """`remedy`: what to do about it, where `said` does not say it. `passing`: what is wrong is the network's or the
    coordinator's, and trying again may do."""

    name: str
    state: State
    said: str
    remedy: str = ""
    passing: bool = False


def fine(name: str, said: str) -> Finding:
    return Finding(name, State.FINE, said)


def warning(name: str, said: str, remedy: str = "") -> Finding:
    return Finding(name, State.WARNING, said, remedy)


def wrong(name: str, said: str, remedy: str = "", *, passing: bool = False) -> Finding:
    return Finding(name, State.WRONG, said, remedy, passing)


def skipped(name: str, why: str) -> Finding:
    return Finding(name, State.SKIPPED, f"not checked: {why}")


@dataclass(frozen=True)
class Verdict:
    code: Exit
    lines: list[str]


def verdict(findings: Sequence[Finding], command: str) -> Verdict:
    """Return how the examination ends: with `command`, which starts the worker, or with what is to be mended first."""
    faults = [each for each in findings if each.state is State.WRONG]
    if not faults:
        return Verdict(Exit.DONE, [f"ready to train: start it with: {command}"])
    code = Exit.RETRY if all(each.passing for each in faults) else Exit.REFUSED
    listed = [f"{each.name}: {each.said}" + (f"; {each.remedy}" if each.remedy else "") for each in faults]
    return Verdict(code, [f"not ready: {len(faults)} {'thing' if len(faults) == 1 else 'things'} to mend", *listed])
