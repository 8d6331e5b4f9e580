"""docs/wire-format.md is complete: code written from its text alone, without this package, reproduces the vectors."""

import base64
import hashlib
import itertools
import json
import math
import re
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from blake3 import blake3

from tests.support.twister import shuffled

VECTORS = Path(__file__).parents[2] / "docs" / "vectors"
F32 = np.float32
F32Array = np.ndarray[Any, np.dtype[np.float32]]
BLOCKS = {"int8": 256, "int4": 256, "2bit": 256, "ternary": 64, "sparse": 4096}


def vectors(name: str) -> list[dict[str, Any]]:
    return json.loads((VECTORS / f"{name}.json").read_text(encoding="utf-8"))


# --- section 3 ----------------------------------------------------------------------------------------------------


def scale(data: bytes, block: int) -> F32:
    """Return the scale of a block; its two bytes are the upper half of an fp32 number."""
    return F32(struct.unpack("<f", b"\0\0" + data[2 * block : 2 * block + 2])[0])


def codes(codec: str, data: bytes, n: int) -> dict[int, int]:
    """Return q by index from the bytes that follow the scales."""
    match codec:
        case "int8":
            return dict(enumerate(struct.unpack(f"<{n}b", data)))
        case "int4":
            halves = [byte & 15 for byte in data] + [byte >> 4 for byte in data]
            return {i: half - 16 * (half > 7) for i, half in enumerate(halves[:n])}
        case "2bit":
            return {i: (-1 if pair & 2 else 1) * (97 if pair & 1 else 29) for i, pair in enumerate(pairs(data)[:n])}
        case "ternary":
            return {i: pair - 4 * (pair > 1) for i, pair in enumerate(pairs(data)[:n])}
    m = -(-n // 64)
    second = -(-m // 4)
    third = second + -(-3 * m // 4)
    low, values = bits(data[second:third]), bits(data[third:])
    ones = [place for place, bit in enumerate(bits(data[:second])) if bit]
    result = {}
    for j, place in enumerate(ones):
        index = 64 * (place - j) + sum(bit << i for i, bit in enumerate(low[6 * j : 6 * j + 6]))
        result[index] = (-1 if values[2 * j + 1] else 1) * (10 if values[2 * j] else 7)
    return result


def pairs(data: bytes) -> list[int]:
    return [byte >> 2 * quarter & 3 for quarter in range(4) for byte in data]


def bits(data: bytes) -> list[int]:
    return [byte >> i & 1 for byte in data for i in range(8)]


def terms(codec: str, data: bytes, n: int) -> dict[int, tuple[F32, F32]]:
    """Return (q, s) by index; a value is their product."""
    if codec == "fp32":
        return {i: (F32(x), F32(1)) for i, (x,) in enumerate(struct.iter_unpack("<f", data))}
    if codec == "bf16":
        return {i: (scale(data, i), F32(1)) for i in range(n)}
    block = BLOCKS[codec]
    return {i: (F32(q), scale(data, i // block)) for i, q in codes(codec, data[2 * -(-n // block) :], n).items()}


@pytest.mark.parametrize("case", vectors("codecs"), ids=lambda case: f"{case['codec']} {case['name']}")
def test_bytes_mean_what_the_page_says(case: dict[str, Any]) -> None:
    values = np.zeros(case["elements"], F32)
    for index, (q, s) in terms(case["codec"], bytes.fromhex(case["encoded"]), case["elements"]).items():
        values[index] = q * s
    assert values.tobytes().hex() == case["decoded"]


def top_half(x: F32) -> F32:
    """Return x with its lower 16 bits set to zero, but at least 2^-126."""
    return max(F32(struct.unpack("<f", b"\0\0" + struct.pack("<f", x)[2:])[0]), F32(2.0**-126))


def tree_mean(values: list[F32], block: int) -> F32:
    sums = values + [F32(0)] * (block - len(values))
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [a + b for a, b in zip(sums[:half], sums[half:], strict=True)]
    return sums[0] / F32(len(values))


def quantised(codec: str, x: list[F32]) -> tuple[F32, dict[int, int]]:
    """Return the scale of a block, and q by index for the values that are sent."""
    match codec:
        case "int8" | "int4":
            most = 127 if codec == "int8" else 7
            s = max(map(abs, x)) / F32(most)
            cut = top_half(s)
            s = cut if cut >= s else F32(np.uint32(cut.view(np.uint32) + 0x10000).view(F32))
            return s, {i: int(np.rint(each * (F32(1) / s))) for i, each in enumerate(x)}
        case "2bit":
            s = top_half(np.sqrt(tree_mean([each * each for each in x], 256)) / F32(64))
            return s, {i: (-1 if each < 0 else 1) * (97 if abs(each) >= 63 * s else 29) for i, each in enumerate(x)}
        case "ternary":
            s = top_half(np.sqrt(tree_mean([each * each for each in x], 64)) * F32(1.5))
            return s, {i: int(np.sign(each)) if F32(1.5) * abs(each) >= s else 0 for i, each in enumerate(x)}
    largest = sorted(range(len(x)), key=lambda i: (-abs(x[i]), i))[: -(-len(x) // 64)]
    s = top_half(tree_mean([abs(x[i]) for i in sorted(largest)], 64) / F32(8))
    sizes = {i: 10 if abs(x[i]) >= F32(8.5) * s else 7 for i in sorted(largest) if abs(x[i]) >= F32(3.5) * s}
    return s, {i: -q if x[i] < 0 else q for i, q in sizes.items()}


@pytest.mark.parametrize(
    "case",
    [case for case in vectors("codecs") if "values" in case and case["codec"] in BLOCKS],
    ids=lambda case: f"{case['codec']} {case['name']}",
)
def test_values_are_encoded_as_the_page_says(case: dict[str, Any]) -> None:
    codec, n = case["codec"], case["elements"]
    x, block = list(np.frombuffer(bytes.fromhex(case["values"]), "<f4").astype(F32)), BLOCKS[case["codec"]]
    with np.errstate(all="ignore"):
        blocks = [quantised(codec, x[start : start + block]) for start in range(0, n, block)]
    encoded = bytes.fromhex(case["encoded"])
    assert [scale(encoded, j) for j in range(len(blocks))] == [s for s, _ in blocks]
    ours = {j * block + i: q for j, (_, sent) in enumerate(blocks) for i, q in sent.items()}
    assert ours == codes(codec, encoded[2 * len(blocks) :], n)


# --- sections 1 and 4 ---------------------------------------------------------------------------------------------


def opened(payload: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header and the only frame, raw."""
    magic, version, reserved, length = struct.unpack("<4sHHI", payload[:12])
    assert (magic, version, reserved) == (b"OSTP", 1, 0)
    return msgpack.unpackb(payload[12 : 12 + length]), payload[12 + length :]


@pytest.mark.parametrize("case", vectors("means"), ids=lambda case: f"{case['codec']} to {case['download_codec']}")
def test_a_mean_is_what_the_page_says(case: dict[str, Any]) -> None:
    codec = case["codec"]
    arrived = {
        header["worker"]: (header, frame) for header, frame in map(opened, map(bytes.fromhex, case["contributions"]))
    }
    total = sum(header["tokens"] for header, _ in arrived.values())
    n = next(header["elements"] for header, _ in arrived.values())
    mean, shares = np.zeros(n, F32), np.zeros(n, F32)
    for worker, factor in zip(sorted(arrived, key=str.encode), case["factors"], strict=True):
        header, frame = arrived[worker]
        w = F32(header["tokens"] / total * factor)
        for index, (q, s) in terms(codec, frame, n).items():
            mean[index] += q * F32(w * s)
            shares[index] += F32(header["tokens"] / total)
    if codec == "sparse":
        mean[shares != 0] /= shares[shares != 0]
    assert mean.tobytes().hex() == case["mean"]
    delta = np.zeros(n, F32)
    for index, (q, s) in terms(case["download_codec"], bytes.fromhex(case["encoded"]), n).items():
        delta[index] = q * s
    assert delta.tobytes().hex() == case["decoded"]


def test_residuals_are_what_the_page_says() -> None:
    """Without the int8 in between, or without rounding each sum to fp32, the next delta differs."""

    def decoded(codec: str, x: F32Array) -> F32Array:
        block, values = BLOCKS[codec], np.zeros(len(x), F32)
        for start in range(0, len(x), block):
            s, sent = quantised(codec, list(x[start : start + block]))
            for i, q in sent.items():
                values[start + i] = F32(q) * s
        return values

    def values(codec: str, data: str, n: int) -> F32Array:
        found = np.zeros(n, F32)
        for index, (q, s) in terms(codec, bytes.fromhex(data), n).items():
            found[index] = q * s
        return found

    for case in vectors("residuals"):
        n, exact = case["elements"], np.zeros(case["elements"], F32)
        residual, differs = exact, 0
        for each in case["rounds"]:
            mean = np.frombuffer(bytes.fromhex(each["mean"]), "<f4").astype(F32)
            delta = decoded("2bit", mean + residual)
            assert delta.tobytes().hex() == each["decoded"] == values("2bit", each["delta"], n).tobytes().hex()
            differs += decoded("2bit", mean + exact).tobytes() != delta.tobytes()
            exact = mean + residual - delta
            residual = decoded("int8", exact)
            assert residual.tobytes() == values("int8", each["residual"], n).tobytes()
        assert differs, "8 bits make no difference, so nothing is proved"


@pytest.mark.parametrize("case", vectors("outer-steps"), ids=lambda case: f"momentum {case['momentum']}")
def test_an_outer_step_is_what_the_page_says(case: dict[str, Any]) -> None:
    theta, u, (eta,), (mu,) = (
        np.frombuffer(bytes.fromhex(case[name]), "<f4").astype(F32)
        for name in ("theta", "u", "learning_rate_bits", "momentum_bits")
    )
    for step in case["steps"]:
        delta = np.frombuffer(bytes.fromhex(step["delta"]), "<f4").astype(F32)
        u = mu * u
        u = u + delta
        t = mu * u
        t = t + delta
        t = eta * t
        theta = theta - t
        assert (theta.tobytes().hex(), u.tobytes().hex()) == (step["theta"], step["u"])
        t = mu * u
        t = eta * t
        assert (theta + t).tobytes().hex() == step["reached"]


# --- sections 2, 5 and 8 ------------------------------------------------------------------------------------------


def test_digests_are_what_the_page_says() -> None:
    for case in vectors("digests"):
        match case["of"]:
            case "payload":
                hashed = bytes.fromhex(case["bytes"])
            case "state":
                hashed = blake3(bytes.fromhex(case["theta"])).digest() + blake3(bytes.fromhex(case["u"])).digest()
            case "model":
                hashed = b"".join(map(bytes.fromhex, case["states"]))
        assert blake3(hashed).hexdigest() == case["digest"]


def test_announcements_are_what_the_pages_say() -> None:
    for case in vectors("announcements"):
        payload, announced = bytes.fromhex(case["payload"]), case["announcement"]
        (header_bytes,) = struct.unpack("<I", payload[8:12])
        assert base64.b64decode(announced["header"]) == payload[: 12 + header_bytes]
        assert announced["bytes"] == len(payload)
        assert announced["digest"] == blake3(payload).hexdigest()
        assert announced["sha256"] == hashlib.sha256(payload).hexdigest()


def test_layouts_are_what_the_page_says() -> None:
    """Tapered and strided ones too."""
    for case in vectors("layouts"):
        tensors, sync = case["layout"]["tensors"], case["sync"]
        sizes = [math.prod(tensor["shape"]) for tensor in tensors]
        total = sum(sizes)
        count = -(-total // sync["fragment_elements"])
        bounds = [total * p // count for p in range(count)]
        while sync["offsets"] == "together" and total - bounds[-1] >= 1 << 20:
            bounds.append((bounds[-1] + total) // 2)
        fragments: list[list[dict[str, int]]] = []
        order = range(len(tensors)) if sync["fragment_layers"] == "sequential" else strided(tensors, count)
        for low, high in itertools.pairwise([*bounds, total]):
            fragments.append([])
            first = 0  # of the tensor, in the long vector
            for index in order:
                start, stop = max(low, first), min(high, first + sizes[index])
                if start < stop:
                    fragments[-1].append({"tensor": index, "start": start - first, "stop": stop - first})
                first += sizes[index]
        assert fragments == case["layout"]["fragments"]


def strided(tensors: list[dict[str, Any]], count: int) -> list[int]:
    found = [re.search(r"\.([0-9]+)\.", tensor["name"]) for tensor in tensors]
    layers = {index: int(match[1]) for index, match in enumerate(found) if match}
    before = [index for index in range(len(tensors)) if layers and index < min(layers)]
    groups = [[index for index in layers if layers[index] % count == p] for p in range(count)]
    numbered = [index for group in groups for index in sorted(group, key=lambda index: (layers[index], index))]
    after = [index for index in range(len(tensors)) if index not in before and index not in layers]
    return before + numbered + after


def test_training_sets_are_what_the_page_says() -> None:
    """The digest, and what is held out."""
    for case in vectors("training-sets"):
        files = {name: case["files"][name].encode() for name in sorted(case["files"])}
        hashed = b"".join(b"%b\0%d\0%b" % (name.encode(), len(text), text) for name, text in files.items())
        assert blake3(hashed).hexdigest() == case["digest"]

        holdout = case["spec"]["holdout"]
        if len(files) == 1:
            (text,) = files.values()
            at = len(text) - math.floor(len(text) * holdout)
            assert [text[:at].decode(), text[at:].decode()] == [case["training"], case["held_out"]]
            continue
        draws = {name: int.from_bytes(blake3(name.encode()).digest()[:8], "little") / 2**64 for name in files}
        held = {name for name in files if draws[name] < holdout}
        if not held and holdout:
            held = {min(draws, key=draws.__getitem__)}
        assert b"".join(text for name, text in files.items() if name in held).decode() == case["held_out"]
        assert b"".join(text for name, text in files.items() if name not in held).decode() == case["training"]


def test_the_order_of_rows_is_what_the_page_says() -> None:
    """With a Mersenne twister and nothing else of numpy."""
    for case in vectors("training-sets"):
        spec, training = case["spec"], case["training"].encode()
        length, batch = spec["sequence_length"], spec["batch_size"]
        sequences = (len(training) - 1) // length
        per_epoch = sequences // batch
        assert per_epoch == case["units"]
        rows = []
        for epoch in range(len(case["rows"]) // per_epoch):
            order = shuffled(sequences, spec["seed"], epoch)
            for unit in range(per_epoch):
                starts = [sequence * length for sequence in order[unit * batch : (unit + 1) * batch]]
                rows.append([training[start : start + length + 1].hex() for start in starts])
        assert rows == case["rows"]


def test_token_sets_are_what_the_page_says() -> None:
    """The digests, and the order of two levels."""
    for case in vectors("token-sets"):
        index, spec = case["index"], case["spec"]
        for shard in index["training"] + index["held_out"]:
            content = bytes.fromhex(case["shards"][shard["file"]])[shard["offset"] :]
            assert blake3(content).hexdigest() == shard["digest"]
        keys = ("format", "dtype", "vocabulary", "tokenizer_digest", "end", "training", "held_out")
        kept = {key: index[key] for key in keys}
        talk = index["format"] == 2
        if talk:
            kept["sequence_length"] = index["conversations"]["sequence_length"]
        for part in ("training", "held_out"):
            kept[part] = [{k: v for k, v in each.items() if k not in ("file", "offset")} for each in index[part]]
        assert blake3(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest() == case["digest"]

        length, batch = spec["sequence_length"], spec["batch_size"]
        stride, dtype = (length + 1, "<u4") if talk else (length, "<u2")
        counts = [each["tokens"] // stride if talk else (each["tokens"] - 1) // length for each in index["training"]]
        per_epoch = sum(counts) // batch
        assert per_epoch == case["units"]
        shards = [np.frombuffer(bytes.fromhex(case["shards"][each["file"]]), dtype) for each in index["training"]]
        if talk:
            marks = [int((ids >> 31).sum()) for ids in shards]
            assert marks == [each["trained"] for each in index["training"]]
            assert case["unit_tokens"] == max(round(Fraction(batch * sum(marks), sum(counts))), 1)
            assert all((ids[::stride] >> 30 == 1).all() for ids in shards)
        rows = []
        for epoch in range(2):
            order = shuffled(len(shards), spec["seed"], epoch, 0)
            sequences: list[list[int]] = []
            for w, first in enumerate(range(0, len(order), 8)):
                of_window = [
                    shards[number][i * stride : i * stride + length + 1].tolist()
                    for number in order[first : first + 8]
                    for i in range(counts[number])
                ]
                key = [spec["seed"], epoch, w] if w else [spec["seed"], epoch]
                sequences += [of_window[place] for place in shuffled(len(of_window), *key)]
            rows += [sequences[unit * batch : (unit + 1) * batch] for unit in range(per_epoch)]
        assert rows == [json.loads(unit) for unit in case["rows"]]
