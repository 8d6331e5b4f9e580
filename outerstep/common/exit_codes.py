"""The exit codes of the commands, for scripts and supervisors to act upon."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of `outerstep` and all its commands."""

    DONE = 0
    USAGE = 2  # a flag, a file or a spec is wrong
    REFUSED = 3  # trying again does not help
    RETRY = 75  # worth trying again: the coordinator cannot be reached or has a fault (EX_TEMPFAIL of sysexits.h)


IN_WORDS = (
    f"Exit codes: {Exit.DONE:d} done, {Exit.USAGE:d} usage, {Exit.REFUSED:d} refused (do not retry), "
    f"{Exit.RETRY:d} worth retrying."
)
