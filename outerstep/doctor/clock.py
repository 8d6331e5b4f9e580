"""This machine's clock against the coordinator's, by the Date header of an answer."""

from email.utils import parsedate_to_datetime

from outerstep.common.quantities import duration_text
from outerstep.doctor.address import Greeting
from outerstep.doctor.finding import Finding, fine, warning

TOLERATED_S = 5.0
_HALF_A_SECOND = 0.5  # Date has whole seconds, rounded down


def offset_s(seen: Greeting) -> float | None:
    """Return by how much this machine's clock is ahead of the coordinator's; None where its answer has no Date."""
    try:
        date = parsedate_to_datetime(seen.answer.headers["Date"])
    except (KeyError, ValueError):
        return None
    return seen.at - (date.timestamp() + _HALF_A_SECOND)


def judge(ahead_s: float | None) -> list[Finding]:
    if ahead_s is None:
        return [warning("clock", "the answer has no Date to compare this machine's clock with")]
    if abs(ahead_s) <= TOLERATED_S:
        return [fine("clock", f"within {TOLERATED_S:.0f} s of the coordinator's")]
    which = "ahead of" if ahead_s > 0 else "behind"
    said = (
        f"{duration_text(abs(ahead_s))} {which} the coordinator's: certificates look expired or not begun, stores of "
        "data (s3://, gs://) refuse what is signed with it, and logs of several machines do not go together. Leases "
        "are not concerned: they go by the coordinator's clock alone"
    )
    return [warning("clock", said, "let NTP set it on both machines: timedatectl set-ntp true")]
