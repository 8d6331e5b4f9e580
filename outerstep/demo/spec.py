"""The run spec of the demo."""

from protocol.codecs import DownloadCodecName

RUN = "demo"
ROUNDS = 24
PROMPT = "def "

# Small enough for a minute on two CPU cores: 0.14 M parameters on the sources of Python's standard library. The
# learning rates suit about 20 rounds; longer runs need more outer momentum. The grace is long because a
# temporarily slow machine is no reason to leave a worker out. Fragments are small so that there are several.
SPEC = """\
name = "{name}"
seed = 0

[model]
preset = "tiny"

[data]
source = "python-stdlib"
sequence_length = 64

[inner]
batch_size = 8
learning_rate = 8e-3
warmup_steps = 50

[outer]
learning_rate = 1.0
momentum = 0.4

[sync]
wait = "always"
rounds = {rounds}
inner_steps = 40
upload_codec = "{codec}"
download_codec = "{codec}"
fragment_elements = 50_000

[members]
min_workers = {workers}
lease_s = 30
grace_min_s = 60

[evaluation]
max_tokens = 8_192
"""


def demo_spec(*, workers: int, rounds: int, codec: DownloadCodecName) -> str:
    """Return the demo's run spec, TOML."""
    return SPEC.format(name=RUN, workers=workers, rounds=rounds, codec=codec)
