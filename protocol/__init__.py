"""What coordinator and workers agree on: messages, codecs, wire format, fragments, the outer step.

Pure: numpy, msgpack, zstandard, blake3 and pydantic. No I/O, no clock, no torch, no SQL, except in direct.py (direct
I/O) and tracing.py (OpenTelemetry), which both sides use. A third party could write its own worker from this package,
or from `docs/wire-format.md` and `docs/rest.md` without it.
"""

__version__ = "0.1.0"  # of the software, on either side

# Who speaks the same one understands each other; all others refuse each other (versions.py). docs/releasing.md says
# what makes it another one.
PROTOCOL_VERSION = 2
