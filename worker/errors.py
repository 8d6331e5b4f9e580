"""What can go wrong on a worker, beyond the protocol's own errors.

OuterstepError (protocol)
├── ModelError          a model that cannot be built or trained in this run
├── DataError           a training set that cannot be read, or is too small
├── StateDirBusy        another process works in the same state directory
├── Resync              the worker's outer state is not the run's: take a checkpoint, drop the round's work
├── WorkLost            the work units of a contribution belong to somebody else by now: drop the round's work
├── Unwanted            the round's work is not wanted any more: drop it
├── RunEnded            the run ended while something of it was waited for
└── Stopped             the worker was asked to stop while it waited
"""

from protocol.errors import OuterstepError


class ModelError(OuterstepError):
    """A model that cannot be built or trained in this run."""


class DataError(OuterstepError):
    """A training set that cannot be read, or is too small."""


class StateDirBusy(OuterstepError):
    """Another process works in the same state directory."""


class Resync(OuterstepError):
    """The worker's outer state is not the run's."""


class WorkLost(OuterstepError):
    """The work units of a contribution belong to somebody else by now."""


class Unwanted(OuterstepError):
    """The round's work is not wanted any more."""


class RunEnded(OuterstepError):
    """The run ended while something of it was waited for."""


class Stopped(OuterstepError):
    """The worker was asked to stop while it waited."""
