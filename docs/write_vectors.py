"""Write docs/vectors/*.json, the test vectors of the wire format: run `python -m docs.write_vectors` in the repository.

A test fails while the files are not what this writes. docs/wire-format.md describes them. docs/refused_payloads.py has
the payloads that must be rejected.
"""

import itertools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from docs import refused_payloads
from docs.vector_parts import (
    F32,
    array,
    contribution,
    decoded,
    delta,
    encoded,
    hexadecimal,
    spread,
    state,
    state_digest,
)
from docs.zstd_frames import FROM_A_COMPRESSOR
from protocol import wire
from protocol.codecs import REFERENCE
from protocol.digest import content_digest, digest, model_digest
from protocol.fragments import TensorSpec, plan_fragments
from protocol.outer_step import in_numpy, reached
from protocol.spec.model import ModelSpec
from protocol.spec.run import RunSpec
from protocol.spec.sections import DataSpec, InnerSpec, SyncSpec
from worker.data.open_training_set import TextData, open_training_set
from worker.data.tokens.index import Conversations, Index, Shard
from worker.data.tokens.marks import BEGINS, IDS, TRAINED
from worker.line.store_upload import announcement

DIRECTORY = Path(__file__).parent / "vectors"
Document = list[dict[str, Any]]

LEAST, LARGEST = 2.0**-149, float(np.finfo(np.float32).max)
NOT_FULL = {"ternary": 150, "sparse": 4200}  # elements of a chunk whose last block is not full; of the others 300
HUGE = {"fp32": LARGEST, "bf16": 255 * 2.0**120, "int8": 127 * 2.0**120, "int4": 7 * 2.0**120, "sparse": 2.0**123}

# Allowed, though no writer would choose these bytes: codec, name, elements, bytes.
UNUSUAL: list[tuple[str, str, int, str]] = [
    ("int8", "a scale of 2 where 2^-5 would do", 3, "0040 01 ff 00"),
    ("int8", "the largest scale and code; of a contribution this is too large", 2, "807b 7f 81"),
    ("int4", "the smallest scale, and no code uses all of it", 3, "8000 01 03"),
    ("2bit", "the largest scale", 5, "807b 1b 02"),
    ("ternary", "a scale, and nothing but zeros", 6, "803f 00 00"),
    ("sparse", "nothing is sent", 130, "803f 00 000000 00"),
    ("sparse", "one of the three that may be: the last element", 130, "803f 04 010000 02"),
]  # fmt: skip


# --- codecs -------------------------------------------------------------------------------------------------------


def codecs() -> Document:
    """Return for every codec: values, their bytes, and the decoded values."""
    result: Document = []
    for codec in REFERENCE:
        for name, values in chunks(codec).items():
            raw = encoded(codec, values)
            back = hexadecimal(decoded(codec, raw, len(values)))
            case = {"codec": codec, "name": name, "elements": len(values), "values": hexadecimal(values)}
            result.append(case | {"encoded": raw.tobytes().hex(), "decoded": back})
        for of, name, elements, data in UNUSUAL:
            if of == codec:
                raw = np.frombuffer(bytes.fromhex(data), np.uint8)
                REFERENCE[codec].check(raw, elements, wire.MAX_FINITE)
                back = hexadecimal(decoded(codec, raw, elements))
                case = {"codec": codec, "name": name, "elements": elements}
                result.append(case | {"encoded": raw.tobytes().hex(), "decoded": back})
    return result


def chunks(codec: str) -> dict[str, F32]:
    """Return the values to encode, by name."""
    n, huge = NOT_FULL.get(codec, 300), HUGE.get(codec, 2.0**60)  # where squares are added up
    blocks = spread(n, seed=1)
    blocks[: n // 2] *= np.float32(1e-6)
    return {
        "zeros of both signs": array(0.0, -0.0, 0.0),
        "one value": array(-1.5),
        "ties, which go to even": array(127.0, 0.5, 1.5, 2.5, -126.5, -0.5, 1 + 2**-8, 1 + 3 * 2**-8),
        "equal magnitudes": array(1.0, -1.0, 1.0, 1.0, -1.0, 1.0),
        "denormals": array(LEAST, -LEAST, 2.0**-130, -(2.0**-126 - LEAST), 2.0**-126, -(2.0**-126)),
        "the largest values": array(huge, -huge, huge / 2),
        "a last block that is not full": spread(n, seed=0),
        "blocks of unlike magnitudes": blocks,
    }


# --- payloads -----------------------------------------------------------------------------------------------------


def payloads() -> Document:
    """Return whole payloads of each kind, raw and compressed, with one chunk and with several."""
    theta, momentum = array(1, -2, 0.5, 0, 3), array(0.25, 0, -0.125, LEAST, -1)
    two_chunks = np.zeros(wire.CHUNK_ELEMENTS + 300, np.float32)
    two_chunks[[0, 255, 256]] = array(0.5, -1, 1e-3)
    two_chunks[wire.CHUNK_ELEMENTS :] = spread(300, seed=2)
    large_state = np.concatenate([np.repeat(array(0.5, -0.25, 1.5), [200, 60, 40]), np.zeros(300, np.float32)])
    late: dict[str, Any] = {
        "carried": [3, 4],
        "carried_share": 0.75,
        "round": 5,
        "units": [[40, 42], [50, 52]],
        "tokens": 2 * 2048,
    }
    cases = [
        ("a contribution, raw: the example of section 6", contribution(array(0.5, -0.25, 0.125, 0, -1))),
        ("a contribution of two chunks, the first compressed", contribution(two_chunks, compress=[0])),
        ("a contribution that carries the late work of rounds 3 and 4", contribution(spread(5, seed=3), **late)),
        ("a delta, raw", delta(spread(300, seed=4))),
        ("a delta, compressed by zstd 1.5", delta(few_values(), frame=FROM_A_COMPRESSOR)),
        ("a state in chunks of 4, raw", state(np.concatenate([theta, momentum]), 4, round=7)),
        ("a state in chunks of 256, all but the first compressed", state(large_state, 256, compress=[1, 2], round=8)),
    ]
    return [{"name": name, **described(body)} for name, body in cases]


def announcements() -> Document:
    """Return contributions, and how each is announced for a direct upload."""
    result: Document = []
    for case in payloads()[:3]:
        payload = memoryview(bytes.fromhex(case["payload"]))
        head = wire.Payload.from_bytes(payload).offsets[0]
        announced = announcement([payload[:head], payload[head:]])
        result.append({"name": case["name"], "payload": case["payload"], "announcement": announced.model_dump()})
    return result


def few_values() -> F32:
    """Return 320 values, of which six differ, so that they compress well."""
    kinds = array(1, -1, 0.5, 0, 0.25, 0, 0, -0.5, 0, 0)
    return kinds[np.random.RandomState(3).randint(0, len(kinds), 320)]


def described(body: bytes) -> dict[str, Any]:
    """Return a payload with its header, digests and values; of the values only those that are not +0, as runs."""
    payload = wire.Payload.from_bytes(body)
    payload.check()
    header = payload.header.model_dump()
    values = np.empty(payload.header.elements, np.float32)
    payload.decode(values)
    return {
        "payload": body.hex(),
        "header": header | {"base": header["base"].hex()} if "base" in header else header,
        "decoded": [{"start": start, "values": hexadecimal(run)} for start, run in runs(values)],
        "digest": digest(body).hex(),
        "content_digest": content_digest(digest(body)),
    }


def runs(values: F32, gap: int = 16) -> list[tuple[int, F32]]:
    """Return runs of values as (start, values), split at gaps of more than `gap` times +0."""
    there = np.flatnonzero(values.view(np.uint32))
    parts = np.split(there, np.flatnonzero(np.diff(there) > gap) + 1)
    return [(int(part[0]), values[part[0] : part[-1] + 1]) for part in parts if len(part)]


# --- arithmetic ---------------------------------------------------------------------------------------------------


def means() -> Document:
    """Return means of three workers with different weights, for every codec: all factors 1 and `int8` as the download
    codec, then factors below 1 with the other download codecs. `contributions` are in the order of arrival."""
    arrived = {"w9": 3 * 2048, "w10": 7 * 2048, "w-1": 5 * 2048}
    whole, screened = dict.fromkeys(arrived, 1.0), {"w9": 0.3, "w10": 1.0, "w-1": 0.875}
    cases = [(codec, whole, "int8") for codec in REFERENCE]
    cases += zip(REFERENCE, itertools.repeat(screened), itertools.cycle(("int4", "fp32", "bf16")))
    result: Document = []
    for codec, factors, download in cases:
        n = 640 if codec == "sparse" else 200
        sent = {worker: spread(n, seed) for seed, worker in enumerate(arrived, start=5)}
        for each, magnitude in zip(sent.values(), (1, 0.03, 5), strict=True):
            each[7::64] += 9  # values that all of them send, also with `sparse`
            each *= np.float32(magnitude)  # so that the order of summation matters
        bodies = {
            worker: contribution(sent[worker], codec, worker=worker, tokens=tokens, units=[[0, tokens // 2048]])
            for worker, tokens in arrived.items()
        }
        order, total = sorted(arrived, key=str.encode), sum(arrived.values())
        shares = [np.float32(arrived[worker] / total) for worker in order]
        weights = [np.float32(arrived[worker] / total * factors[worker]) for worker in order]
        mean = mean_of(codec, [bodies[worker] for worker in order], shares, weights)
        raw = encoded(download, mean)
        result.append(
            {
                "codec": codec,
                "contributions": [bodies[worker].hex() for worker in arrived],
                "order": order,
                "factors": [factors[worker] for worker in order],
                "shares": hexadecimal(np.array(shares)),
                "weights": hexadecimal(np.array(weights)),
                "mean": hexadecimal(mean),
                "download_codec": download,
                "encoded": raw.tobytes().hex(),
                "decoded": hexadecimal(decoded(download, raw, n)),
            }
        )
    return result


def residuals() -> Document:
    """Return rounds in a row with `2bit` deltas, whose encoding error goes into the next delta by way of `int8`."""
    n = 600  # three blocks, the last one not whole
    rounds, residual = [], np.zeros(n, np.float32)
    for seed in (21, 22, 23):
        mean = spread(n, seed)
        raw = encoded("2bit", mean + residual)
        error = encoded("int8", mean + residual - decoded("2bit", raw, n))
        residual = decoded("int8", error, n)
        rounds.append(
            {
                "mean": hexadecimal(mean),
                "delta": raw.tobytes().hex(),
                "decoded": hexadecimal(decoded("2bit", raw, n)),
                "residual": error.tobytes().hex(),
            }
        )
    return [{"elements": n, "rounds": rounds}]


def mean_of(codec: str, bodies: list[bytes], shares: list[np.float32], weights: list[np.float32]) -> F32:
    """Return the weighted mean of contributions of one chunk each, summed in the given order."""
    payloads = [wire.Payload.from_bytes(body) for body in bodies]
    total = np.zeros(payloads[0].header.elements, np.float32)
    sent = np.zeros_like(total)  # the shares of those that sent each value
    add_weight = REFERENCE[codec].add_weight
    for payload, share, weight in zip(payloads, shares, weights, strict=True):
        REFERENCE[codec].accumulate(payload.chunk(0), weight, total)
        if add_weight is not None:
            add_weight(payload.chunk(0), share, sent)
    return total if add_weight is None else np.divide(total, sent, out=total, where=sent != 0)


def outer_steps() -> Document:
    """Return several steps with momentum, on values where fused operations or flushed denormals give other results."""
    theta = np.concatenate([array(1, -2, 0.5, 0, -0.0, 1e30, LEAST, 2.0**-126), spread(24, seed=8)])
    momentum = np.concatenate([array(0, 0.25, -1, 3, 0, -1e30, 0, 2.0**-126), spread(24, seed=9)])
    result: Document = []
    for learning_rate, beta in ((0.7, 0.9), (0.5, 0.0)):
        ours, u = theta.copy(), momentum.copy() if beta else np.zeros_like(momentum)
        case: dict[str, Any] = {"learning_rate": learning_rate, "momentum": beta}
        case |= {"learning_rate_bits": hexadecimal(array(learning_rate)), "momentum_bits": hexadecimal(array(beta))}
        case |= {"theta": hexadecimal(ours), "u": hexadecimal(u), "steps": []}
        for step in range(4):
            by = np.concatenate([array(0.5, -0.25, 0.125, -0.0, 1e-3, 3e29, -LEAST, 2.0**-127), spread(24, 10 + step)])
            case["steps"].append({"delta": hexadecimal(by)})
            in_numpy(ours, u, by, learning_rate=learning_rate, beta=beta)
            point = reached(ours, u, learning_rate=learning_rate, beta=beta)
            case["steps"][-1] |= {"theta": hexadecimal(ours), "u": hexadecimal(u), "reached": hexadecimal(point)}
        result.append(case)
    return result


# --- digests, layouts, data ---------------------------------------------------------------------------------------


def digests() -> Document:
    """Return digests of payloads, of the state of each fragment, and of the whole model."""
    texts = [b"", b"OSTP", bytes(range(256)) * 5]
    states = [(spread(3, 20), spread(3, 21)), (array(-0.0), array(0.0)), (spread(300, 22), np.zeros(300, np.float32))]
    of_states = [state_digest(theta, u) for theta, u in states]
    result: Document = []
    for text in texts:
        announced = content_digest(digest(text))
        result.append({"of": "payload", "bytes": text.hex(), "digest": digest(text).hex(), "content_digest": announced})
    for (theta, u), each in zip(states, of_states, strict=True):
        result.append({"of": "state", "theta": hexadecimal(theta), "u": hexadecimal(u), "digest": each.hex()})
    model = {"of": "model", "states": [each.hex() for each in of_states], "digest": model_digest(of_states).hex()}
    return [*result, model]


def layouts() -> Document:
    """Return layouts and their digests."""
    layers = [f"layers.{i}.{each}.weight" for i in range(12) for each in ("norm", "mlp")]
    names = ["embedding.weight", *layers[:8], "shared.weight", *layers[8:], "norm.weight"]
    small = [TensorSpec(name=name, shape=[8] if "norm" in name else [40, 8]) for name in names]
    shapes = {"scale": [], "none": [0, 4], "w": [7, 100]}
    odd = [TensorSpec(name=name, shape=shape) for name, shape in shapes.items()]
    large = [TensorSpec(name="embedding", shape=[32_000, 300]), TensorSpec(name="head", shape=[1_200_000])]
    cases: list[tuple[list[TensorSpec], int, str, str]] = [
        (small, 512, "sequential", "spread"),
        (small, 512, "strided", "spread"),
        (small, 1 << 23, "sequential", "together"),
        (odd, 256, "strided", "together"),
        (large, 1 << 22, "sequential", "together"),
        (large, 1 << 22, "sequential", "spread"),
    ]
    result: Document = []
    for tensors, fragment_elements, order, offsets in cases:
        layout = plan_fragments(tensors, fragment_elements, strided=order == "strided", taper=offsets == "together")
        sync = {"fragment_elements": fragment_elements, "fragment_layers": order, "offsets": offsets}
        result.append({"sync": sync, "layout": layout.model_dump(), "digest": layout.digest().hex()})
    return result


TEXT = {
    "b/two.txt": "Fünf Arbeiter. " * 9,
    "a.txt": "four score and seven",
    "c.txt": "held out " * 4,
    "z.txt": "0123456789",
}


def data() -> Document:
    """Return training sets: digest, held-out text, and the rows of the work units of two epochs."""
    result: Document = []
    every, single = list(TEXT), ["b/two.txt"]
    for seed, holdout, names in ((0, 0.3, every), (7, 0.001, every), (7, 0.0, every), (7, 0.25, single)):
        files = {name: TEXT[name] for name in names}
        read = read_text(files, seed=seed, sequence_length=8, batch_size=2, holdout=holdout)
        result.append(
            {
                "spec": {"seed": seed, "sequence_length": 8, "batch_size": 2, "holdout": holdout},
                "files": files,
                **read.summary.model_dump(),
                "training": read.training.tobytes().decode(),
                "held_out": read.held_out.tobytes().decode(),
                "rows": [rows(read.unit(unit)) for unit in range(2 * read.units_per_epoch)],
            }
        )
    return result


def rows(unit: Tensor) -> list[str]:
    """Return the bytes of each row of a work unit, int64[batch_size, sequence_length + 1], in hexadecimal."""
    return [bytes(row).hex() for row in unit.tolist()]


def token_sets() -> Document:
    """Return token sets, of text and of conversations."""
    return [text_tokens(), conversations()]


def text_tokens() -> dict[str, Any]:
    """Return a token set of two windows with shards of different lengths: its digest, and the rows of two epochs."""
    sizes = [9, 30, 4, 17, 23, 12, 5, 26, 14, 20]
    parts = [(((np.arange(n) + 50 * i) * 7) % 1000).astype("<u2") for i, n in enumerate([*sizes, 11])]
    shards = [
        Shard(file=f"{i}.bin", tokens=len(ids), digest=digest(ids.tobytes()).hex(), documents=1, bytes=4 * len(ids))
        for i, ids in enumerate(parts)
    ]
    index = Index(
        dtype="uint16",
        vocabulary=1000,
        tokenizer="demo",
        tokenizer_digest=digest(b"demo").hex(),
        end=None,
        source="demo",
        training=shards[:-1],
        held_out=shards[-1:],
    )
    return token_set(index, parts, seed=7, sequence_length=4, batch_size=3)


def conversations() -> dict[str, Any]:
    """Return a set of conversations with their marks, in shards of 6, 9 and 4 sequences of 4 tokens and one."""
    draw = np.random.RandomState(3)
    parts = []
    for sequences in (6, 9, 4):
        ids = draw.randint(1, 1000, (sequences, 5)).astype("<u4")
        ids[:, 1:] |= (draw.random_sample((sequences, 4)) < 0.4) * np.uint32(TRAINED)
        ids[:, 4] |= np.uint32(TRAINED)
        ids[:, 0] |= np.uint32(BEGINS)
        ids[::2, 2] = ids[::2, 2] & np.uint32(IDS) | np.uint32(BEGINS)  # a second one begins there
        parts.append(ids.reshape(-1))
    shards = [
        Shard(
            file=f"{i}.bin",
            tokens=len(ids),
            digest=digest(ids.tobytes()).hex(),
            documents=int(np.count_nonzero(ids & np.uint32(BEGINS))),
            bytes=4 * len(ids),
            trained=int(np.count_nonzero(ids & np.uint32(TRAINED))),
        )
        for i, ids in enumerate(parts)
    ]
    index = Index(
        format=2,
        dtype="uint32",
        vocabulary=1000,
        tokenizer="demo",
        tokenizer_digest=digest(b"demo").hex(),
        end=0,
        source="demo",
        training=shards[:-1],
        held_out=shards[-1:],
        conversations=Conversations(
            sequence_length=4, train_on="assistant", packing=True, longest=5, truncated=0, dropped={}
        ),
    )
    return token_set(index, parts, seed=7, sequence_length=4, batch_size=2)


def token_set(
    index: Index, parts: Sequence[npt.NDArray[Any]], *, seed: int, sequence_length: int, batch_size: int
) -> dict[str, Any]:
    """Return a token set with the ids `parts` in its shards: its digest, and the rows of two epochs."""
    shards = index.shards
    with tempfile.TemporaryDirectory() as directory:
        for shard, ids in zip(shards, parts, strict=True):
            Path(directory, shard.file).write_bytes(ids.tobytes())
        Path(directory, "index.json").write_text(index.text())
        inner, sync, model = InnerSpec(batch_size=batch_size), SyncSpec(rounds=1), ModelSpec(preset="tiny")
        source = DataSpec(
            source=directory, sequence_length=sequence_length, format="text" if index.format == 1 else "chat"
        )
        read = open_training_set(RunSpec(name="demo", seed=seed, model=model, data=source, inner=inner, sync=sync))
        return {
            "spec": {"seed": seed, "sequence_length": sequence_length, "batch_size": batch_size},
            "index": json.loads(index.text()),
            "shards": {shard.file: ids.tobytes().hex() for shard, ids in zip(shards, parts, strict=True)},
            "digest": read.summary.digest,
            "units": read.units_per_epoch,
            "unit_tokens": read.summary.unit_tokens,
            "rows": [json.dumps(read.unit(unit).tolist()) for unit in range(2 * read.units_per_epoch)],
        }


def read_text(files: dict[str, str], *, seed: int, sequence_length: int, batch_size: int, holdout: float) -> TextData:
    """Return the training set of a directory with these files."""
    with tempfile.TemporaryDirectory() as directory:
        for name, text in files.items():
            path = Path(directory, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        source = DataSpec(source=directory, sequence_length=sequence_length, holdout=holdout)
        inner, sync = InnerSpec(batch_size=batch_size), SyncSpec(rounds=1)
        model = ModelSpec(preset="tiny")
        return TextData(RunSpec(name="demo", seed=seed, model=model, data=source, inner=inner, sync=sync))


FILES = {
    "codecs": codecs,
    "payloads": payloads,
    "announcements": announcements,
    "means": means,
    "residuals": residuals,
    "outer-steps": outer_steps,
    "digests": digests,
    "layouts": layouts,
    "training-sets": data,
    "token-sets": token_sets,
    "refused": refused_payloads.cases,
}


def files() -> dict[str, str]:
    """Return the text of each file by its name."""
    return {f"{name}.json": json.dumps(make(), indent=1, ensure_ascii=False) + "\n" for name, make in FILES.items()}


if __name__ == "__main__":
    for name, text in files().items():
        (DIRECTORY / name).write_text(text, encoding="utf-8")
