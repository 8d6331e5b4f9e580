"""The run spec of tests that train the real thing: the preset `tiny` on text, in steps of milliseconds."""

from pathlib import Path

from harness.member import waiting


def tiny_spec(
    name: str, text: Path, *, seed: int, rounds: int, min_workers: int, sync: str = "", members: str = ""
) -> str:
    return f"""
name = "{name}"
seed = {seed}
[model]
preset = "tiny"
[data]
source = "{text}"
sequence_length = 32
[inner]
optimizer = "adamw"
batch_size = 4
learning_rate = 4e-3
warmup_steps = 4
[sync]
rounds = {rounds}
inner_steps = 5
fragment_elements = 50000
{waiting(sync)}
[members]
min_workers = {min_workers}
{members}
"""
