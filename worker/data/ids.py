"""Token ids in memory, and places of them: what the modules that have no need of torch agree on."""

import numpy as np
import numpy.typing as npt

BYTES = 256  # ids of text that is read as bytes

Tokens = npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Integers = npt.NDArray[np.int64]
