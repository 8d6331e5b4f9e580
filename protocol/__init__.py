"""What coordinator and workers agree on: messages, codecs, wire format, fragments, the outer step.

Pure: numpy, msgpack, zstandard, blake3 and pydantic. No I/O, no clock, no torch, no SQL. A third party could write its
own worker with this package, or from `docs/wire-format.md` and `docs/rest.md` without it.
"""

__version__ = "0.1.0"  # of the software, on both sides

# Both sides must speak the same protocol; otherwise they reject each other (versions.py). docs/releasing.md lists which
# changes need a new number.
PROTOCOL_VERSION = 2
