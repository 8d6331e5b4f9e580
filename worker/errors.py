"""The exceptions of a worker, beside those of `protocol.errors`.

OuterstepError (protocol)
├── ModelError          the model cannot be built or trained in this run
├── DataError           the training set cannot be read, or is too small
├── NotAllowed          the run spec asks for what the machine's owner has not allowed
├── BoxError            this machine cannot do what its settings ask for
├── StateDirBusy        another process uses the same state directory
├── Resync              the worker's outer state is not the run's: take a checkpoint, drop the round's work
├── WorkLost            the contribution's units were assigned to another worker: drop the round's work
├── Unwanted            the coordinator does not accept the round's work any more: drop it
├── RankLost            another process of this worker has died
├── RunEnded            the run ended while the worker waited for something
└── Stopped             the worker was asked to stop while it waited
"""

from protocol.errors import OuterstepError


class ModelError(OuterstepError):
    """The model cannot be built or trained in this run."""


class DataError(OuterstepError):
    """The training set cannot be read, or is too small."""


class NotAllowed(OuterstepError):
    """The run spec asks for what the owner of this machine has not allowed."""


class BoxError(OuterstepError):
    """This machine cannot do what its settings ask for."""


class StateDirBusy(OuterstepError):
    """Another process uses the same state directory."""


class Resync(OuterstepError):
    """The worker's outer state is not the run's."""


class WorkLost(OuterstepError):
    """The contribution's units were assigned to another worker."""


class Unwanted(OuterstepError):
    """The coordinator does not accept the round's work any more."""


class RankLost(OuterstepError):
    """Another process of this worker has died."""


class RunEnded(OuterstepError):
    """The run ended while the worker waited for something."""


class Stopped(OuterstepError):
    """The worker was asked to stop while it waited."""
