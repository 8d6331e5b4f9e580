"""The exit codes of the commands, for scripts and supervisors."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of `outerstep` and all its commands."""

    DONE = 0
    USAGE = 2  # a flag, a file or a spec is wrong
    REFUSED = 3  # retrying does not help
    WRONG = 4  # `coordinator status` has found something
    RETRY = 75  # worth a retry: the coordinator is unreachable or failing (EX_TEMPFAIL of sysexits.h)


IN_WORDS = (
    f"Exit codes: {Exit.DONE:d} done, {Exit.USAGE:d} usage, {Exit.REFUSED:d} refused (do not retry), "
    f"{Exit.RETRY:d} worth retrying."
)
