"""Recipes of CONTRIBUTING.md, followed in a copy: a codec is one file and one line in protocol/, two functions and one
line in worker/; an inner optimizer one function and one line; a schedule one function, one line and one value of the
spec. Everything else derives from them."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.codecs import CODECS

ROOT = Path(__file__).parents[1]
SIDES = ("protocol", "worker", "coordinator", "outerstep", "migrations", "docs")

REFERENCE = '''
"""fp32, but with the other end first."""

import numpy as np

from protocol.codecs import fp32
from protocol.codecs.blocks import F32, U8

NAME = "big-endian"
ERROR_FEEDBACK = False
size = fp32.size


def encode(x: F32, out: U8) -> None:
    fp32.encode(x, out)
    out.view("<u4").byteswap(inplace=True)


def decode(data: U8, out: F32) -> None:
    fp32.decode(data.view("<u4").byteswap().view(np.uint8), out)


def accumulate(data: U8, weight: np.float32, acc: F32) -> None:
    fp32.accumulate(data.view("<u4").byteswap().view(np.uint8), weight, acc)


def check(data: U8, n: int, limit: float) -> None:
    fp32.check(data.view("<u4").byteswap().view(np.uint8), n, limit)
'''

IN_TORCH = """
def encode_big_endian(x: Tensor) -> Tensor:
    return encode_fp32(x).unflatten(-1, (-1, 4)).flip(-1).flatten(-2)


def decode_big_endian(data: Tensor, n: int) -> Tensor:
    return decode_fp32(data.view(-1, 4).flip(1).reshape(-1), n)


IN_TORCH: dict[str, TorchCodec] = {
    "big-endian": TorchCodec(encode_big_endian, decode_big_endian),
"""

USE_OF_THE_CODEC = """
import numpy as np
import torch

from coordinator.aggregation.mean import aggregate
from docs import write_commands, write_settings
from outerstep import plan
from protocol import wire
from protocol.codecs import CODECS
from protocol.spec.run import parse_spec
from worker.codecs import pack_fragment, round_trip, unpack_payload

spec = parse_spec('''
name = "r"
model.preset = "tiny"
[sync]
wait = "always"
rounds = 1
upload_codec = "big-endian"
download_codec = "big-endian"
''')

values = torch.tensor([1.0, -2.5, 3e-40])
frames = pack_fragment(values, spec.sync.upload_codec, zstd=True)
assert bytes(frames[0])[:4] == bytes.fromhex("3f800000")
assert torch.equal(round_trip(values, "big-endian"), values)
header = wire.ContributionHeader(
    run="r", round=0, fragment=0, codec="big-endian", elements=3, chunk_elements=wire.CHUNK_ELEMENTS, worker="w",
    frame_bytes=[len(frame) for frame in frames], base=bytes(32), tokens=1, inner_steps=1, loss=0.0, norm=1.0,
    units=[[0, 1]], carried=[], carried_share=1.0,
)
payload = wire.Payload.from_bytes(wire.pack_header(header) + b"".join(map(bytes, frames)))
payload.check()
assert torch.equal(unpack_payload(payload, torch.device("cpu"), payload.header.elements), values)
assert bytes(aggregate([(payload, 1)], "big-endian", zstd=False)[0]) == bytes(frames[0])

workload = plan.Workload(parameters=1000, up=1e6, down=1e6, step_s=1.0, workers=2, latency_s=0.0, steps=1000)
assert ("big-endian", "int8") in {(each.upload_codec, each.download_codec) for each in plan.sync_costs(workload)}
assert write_settings.page().count("`sparse`, `big-endian`") == 1, "as upload codec"
assert write_settings.page().count("`2bit`, `big-endian`") == 1, "as download codec"
assert "big-endian" in write_commands.page(), "outerstep demo --codec"
"""


ADAGRAD = """

def adagrad(model: nn.Module, inner: InnerSpec) -> list[Optimizer]:
    return [torch.optim.Adagrad(_trainable(model), lr=inner.learning_rate, weight_decay=inner.weight_decay)]


_BY_NAME ="""

SQUARE = """
def _square(step: int, steps: int, decay: int) -> float:
    return (1 - step / steps) ** 2


def _constant("""

USE_OF_THE_OPTIMIZER = """
import pytest
import torch

from docs import write_settings
from protocol.errors import SpecError
from protocol.spec.run import parse_spec
from worker.inner.optimizers import build_inner_optimizers
from worker.inner.schedules import Schedule

TEXT = '''
name = "r"
model.preset = "tiny"
sync.rounds = 1
sync.inner_steps = 200
[inner]
optimizer = "adagrad"
schedule = "square"
final_fraction = 0.0
learning_rate = 0.5
'''
spec = parse_spec(TEXT)
optimizers = build_inner_optimizers(torch.nn.Linear(2, 2), spec.inner)
assert [type(each).__name__ for each in optimizers] == ["Adagrad"]
Schedule(spec, optimizers).set(150)
assert optimizers[0].param_groups[0]["lr"] == 0.5 / 4
with pytest.raises(SpecError, match='beta1 = 0.5 does nothing with optimizer = "adagrad"'):
    parse_spec(TEXT + "beta1 = 0.5")
page = write_settings.page()
assert "adagrad" in page
assert "`square`" in page
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for side in (*SIDES, "harness"):
        shutil.copytree(ROOT / side, tmp_path / side, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")


def run(copy: Path, code: str) -> None:
    """Run the code with the packages of the copy."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.system
def test_a_codec_is_one_file_and_two_functions(copy: Path) -> None:
    (copy / "protocol" / "codecs" / "big_endian.py").write_text(REFERENCE)
    edit(copy / "worker/codecs/torch_codecs.py", "IN_TORCH: dict[str, TorchCodec] = {\n", IN_TORCH)
    table = copy / "protocol" / "codecs" / "__init__.py"
    edit(table, '    "sparse",\n', '    "sparse",\n    "big_endian",\n')
    run(copy, USE_OF_THE_CODEC)


@pytest.mark.system
def test_a_function_and_a_line_are_an_inner_optimizer(copy: Path) -> None:
    """And a schedule, with a value of the spec."""
    edit(copy / "worker/inner/optimizers.py", "\n\n_BY_NAME =", ADAGRAD)
    edit(
        copy / "protocol/spec/sections.py",
        "OPTIMIZERS: dict[str, set[str]] = {\n",
        'OPTIMIZERS: dict[str, set[str]] = {\n    "adagrad": set(),\n',
    )
    schedules = copy / "worker/inner/schedules.py"
    edit(schedules, "\ndef _constant(", SQUARE)
    edit(schedules, '    "constant": _constant,\n', '    "constant": _constant,\n    "square": _square,\n')
    edit(copy / "protocol/spec/sections.py", '"linear", "constant"]', '"linear", "constant", "square"]')
    run(copy, USE_OF_THE_OPTIMIZER)


DTYPES = {"fp32", "bf16"}


def test_a_codec_is_named_beside_the_codecs_only() -> None:
    """Not in a list of its own elsewhere, which somebody would have to find. Defaults and references name one codec; the
    published vectors have examples of single codecs, and may have some of a new one. fp32 and bf16 alone are dtypes."""
    lists = []
    for path in [path for side in SIDES for path in sorted((ROOT / side).rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            inner = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and each.value in CODECS]
            if (
                isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict)
                and len(set(inner)) > 1
                and {*inner} - DTYPES
            ):
                lists.append(str(path.relative_to(ROOT)))
    examples = {"docs/write_vectors.py", "docs/refused_payloads.py"}
    assert set(lists) - examples == {"protocol/codecs/__init__.py"}
