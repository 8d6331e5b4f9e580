"""The exceptions of a worker, beside the protocol's own.

OuterstepError (protocol)
├── ModelError          a model that cannot be built or trained in this run
├── DataError           a training set that cannot be read, or is too small
├── NoRoom              the data cache is full of what is needed sooner
├── NotAllowed          a run spec asks for what the machine's owner has not allowed
├── BoxError            something that this machine cannot do
├── StateDirBusy        another process uses the same state directory
├── Resync              the worker's outer state is not the run's: take a checkpoint, drop the round's work
├── WorkLost            the work units of a contribution were assigned to another worker: drop the round's work
├── Unwanted            the coordinator does not accept the round's work any more: drop it
├── RankLost            another process of this worker has gone
├── RunEnded            the run ended while the worker waited for something of it
└── Stopped             the worker was asked to stop while it waited
"""

from protocol.errors import OuterstepError


class ModelError(OuterstepError):
    """A model that cannot be built or trained in this run."""


class DataError(OuterstepError):
    """A training set that cannot be read, or is too small."""


class NoRoom(OuterstepError):
    """The data cache is full of what is needed sooner."""


class NotAllowed(OuterstepError):
    """A run spec asks for what the owner of this machine has not allowed."""


class BoxError(OuterstepError):
    """Something that this machine cannot do as its settings say."""


class StateDirBusy(OuterstepError):
    """Another process uses the same state directory."""


class Resync(OuterstepError):
    """The worker's outer state is not the run's."""


class WorkLost(OuterstepError):
    """The work units of a contribution were assigned to another worker."""


class Unwanted(OuterstepError):
    """The coordinator does not accept the round's work any more."""


class RankLost(OuterstepError):
    """Another process of this worker has gone."""


class RunEnded(OuterstepError):
    """The run ended while the worker waited for something of it."""


class Stopped(OuterstepError):
    """The worker was asked to stop while it waited."""
