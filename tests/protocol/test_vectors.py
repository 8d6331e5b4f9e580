"""docs/vectors/*.json: what docs/write_vectors.py writes, and what every implementation here makes of them."""

import json
import re
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from coordinator.aggregation.mean import aggregate, encoded
from coordinator.aggregation.residual import Residual
from harness.member import pack_frames
from protocol.codecs import CODECS, REFERENCE
from protocol.codecs.base import Codec
from protocol.digest import StateHash, content_digest, digest, model_digest, parse_content_digest
from protocol.errors import CodecError, WireError, WireFault
from protocol.fragments import Layout, plan_fragments
from protocol.messages import DirectUpload
from protocol.outer_step import in_numpy, outer_step
from protocol.spec.model import ModelSpec
from protocol.spec.run import RunSpec
from protocol.spec.sections import DataSpec, InnerSpec, SyncSpec
from protocol.wire import ContributionHeader, Payload, pack_header
from worker.codecs import TORCH_CODECS, unpack_payload
from worker.codecs.torch_codecs import IN_TORCH, TorchCodec
from worker.data.open_training_set import TextData
from worker.line.store_upload import announcement

F32 = npt.NDArray[np.float32]
DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "wire-format.md").read_text(encoding="utf-8")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def vectors(name: str) -> list[dict[str, Any]]:
    return json.loads((DOCS / "vectors" / f"{name}.json").read_text(encoding="utf-8"))


def floats(text: str) -> F32:
    return np.frombuffer(bytes.fromhex(text), "<f4").astype(np.float32)


def same(ours: F32, expected: str) -> bool:
    """Return True if they are the same bits, the signs of zeros included."""
    return ours.tobytes() == bytes.fromhex(expected)


@dataclass(frozen=True)
class InNumpy:
    codec: Codec

    def encode(self, values: F32) -> bytes:
        out = np.empty(self.codec.size(len(values)), np.uint8)
        self.codec.encode(values.copy(), out)
        return out.tobytes()

    def decode(self, data: bytes, n: int) -> F32:
        out = np.empty(n, np.float32)
        self.codec.decode(np.frombuffer(data, np.uint8), out)
        return out


@dataclass(frozen=True)
class InTorch:
    codec: TorchCodec
    device: str

    def encode(self, values: F32) -> bytes:
        return self.codec.encode(torch.from_numpy(values.copy()).to(self.device)).cpu().numpy().tobytes()

    def decode(self, data: bytes, n: int) -> F32:
        return self.codec.decode(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device), n).cpu().numpy()


def implementations(name: str) -> list[InNumpy | InTorch]:
    """The reference, the compiled kernels where there are any, and torch on every device that is here."""
    in_torch = [InTorch(codecs[name], device) for codecs in (IN_TORCH, TORCH_CODECS) for device in DEVICES]
    return [InNumpy(REFERENCE[name]), InNumpy(CODECS[name]), *in_torch]


def test_the_files_are_current() -> None:
    written = runpy.run_path(str(DOCS / "write_vectors.py"))["files"]()
    there = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "vectors").iterdir()}
    assert there.keys() == written.keys()
    for name, text in written.items():
        assert there[name] == text, f"{name}: run: python -m docs.write_vectors"


def test_the_page_tells_of_every_file_and_every_kind_of_fault() -> None:
    for path in (DOCS / "vectors").iterdir():
        assert f"`{path.name}`" in PAGE
    kinds = {case["kind"] for case in vectors("refused")}
    assert kinds == {*WireFault, "values"}
    assert set(re.findall(r"^- `(\w+)`: ", PAGE, re.MULTILINE)) == kinds


@pytest.mark.parametrize("name", CODECS)
def test_codecs(name: str) -> None:
    cases = [case for case in vectors("codecs") if case["codec"] == name]
    assert len(cases) >= 8
    for case in cases:
        data, n = bytes.fromhex(case["encoded"]), case["elements"]
        for codec in implementations(name):
            assert same(codec.decode(data, n), case["decoded"]), case["name"]
            if "values" in case:
                assert codec.encode(floats(case["values"])).hex() == case["encoded"], case["name"]


@pytest.mark.parametrize("case", vectors("payloads"), ids=lambda case: case["name"])
def test_payloads(case: dict[str, Any]) -> None:
    body = bytes.fromhex(case["payload"])
    payload = Payload.from_bytes(body)
    payload.check()
    header = payload.header.model_dump()
    if "base" in header:
        header["base"] = header["base"].hex()
    assert header == case["header"]
    assert body.startswith(pack_header(payload.header))

    expected = np.zeros(header["elements"], np.float32)
    for run in case["decoded"]:
        values = floats(run["values"])
        expected[run["start"] : run["start"] + len(values)] = values
    ours = np.empty_like(expected)
    payload.decode(ours)
    assert ours.tobytes() == expected.tobytes()
    for device in DEVICES:
        assert (
            unpack_payload(payload, torch.device(device), payload.header.elements).cpu().numpy().tobytes()
            == expected.tobytes()
        )

    assert digest(body).hex() == case["digest"]
    assert content_digest(digest(body)) == case["content_digest"]
    assert parse_content_digest(case["content_digest"]) == digest(body)

    # What this package makes of the same values, compressed by whatever zstd is installed, means the same.
    frames = pack_frames(expected, payload.codec, zstd=True, chunk_elements=header["chunk_elements"])
    again = payload.header.model_copy(update={"frame_bytes": [len(frame) for frame in frames]})
    written = Payload.from_bytes(pack_header(again) + b"".join(frames))
    back = np.empty_like(expected)
    written.decode(back)
    assert len(frames) == len(header["frame_bytes"])
    if header["codec"] == "fp32":
        assert back.tobytes() == expected.tobytes()


def mean(codec: Codec, payloads: list[Payload], shares: F32, weights: F32) -> F32:
    """By the rules of section 4, from the parts that the package has for them."""
    total = np.zeros(payloads[0].header.elements, np.float32)
    sent = np.zeros_like(total)
    for payload, share, weight in zip(payloads, shares, weights, strict=True):
        codec.accumulate(payload.chunk(0), weight, total)
        if codec.add_weight is not None:
            codec.add_weight(payload.chunk(0), share, sent)
    return total if codec.add_weight is None else np.divide(total, sent, out=total, where=sent != 0)


@pytest.mark.parametrize("case", vectors("means"), ids=lambda case: f"{case['codec']} to {case['download_codec']}")
def test_means(case: dict[str, Any]) -> None:
    arrived = {}
    for text in case["contributions"]:
        payload = Payload.from_bytes(bytes.fromhex(text))
        assert isinstance(payload.header, ContributionHeader)
        arrived[payload.header.worker] = (payload, payload.header.tokens)
    order = sorted(arrived, key=str.encode)
    assert order == case["order"]
    assert order != list(arrived), "nothing is to be put in order, so nothing is proved"
    total = sum(tokens for _, tokens in arrived.values())
    shares = np.array([arrived[worker][1] / total for worker in order], np.float32)
    counted = zip(order, case["factors"], strict=True)
    weights = np.array([arrived[worker][1] / total * factor for worker, factor in counted], np.float32)
    assert (same(shares, case["shares"]), same(weights, case["weights"])) == (True, True)

    payloads = [arrived[worker][0] for worker in order]
    for codecs in (REFERENCE, CODECS):
        assert same(mean(codecs[case["codec"]], payloads, shares, weights), case["mean"])
    reverse = mean(REFERENCE[case["codec"]], payloads[::-1], shares[::-1], weights[::-1])
    assert not same(reverse, case["mean"]), "the order of summation makes no difference, so nothing is proved"

    arguments = {"zstd": False, "factors": case["factors"]}
    (frame,) = aggregate([arrived[worker] for worker in order], case["download_codec"], **arguments)
    assert bytes(frame).hex() == case["encoded"]
    for codec in implementations(case["download_codec"]):
        assert same(codec.decode(bytes.fromhex(case["encoded"]), len(reverse)), case["decoded"])


def test_residuals() -> None:
    """What the coordinator makes of the same means, with the residual that it has kept as a blob."""
    (case,) = vectors("residuals")
    n, kept, without = case["elements"], None, []
    for each in case["rounds"]:
        residual = Residual(n, kept)
        (frame,) = encoded(floats(each["mean"]).copy(), "2bit", residual, zstd=False)
        assert (bytes(frame).hex(), residual.content.hex()) == (each["delta"], each["residual"])
        for codec in implementations("2bit"):
            assert same(codec.decode(bytes(frame), n), each["decoded"])
        without.append(bytes(encoded(floats(each["mean"]).copy(), "2bit", zstd=False)[0]).hex())
        kept = residual.content
    assert [frame == each["delta"] for frame, each in zip(without, case["rounds"], strict=True)] == [True, False, False]


@pytest.mark.parametrize("case", vectors("outer-steps"), ids=lambda case: f"momentum {case['momentum']}")
@pytest.mark.parametrize("step", [in_numpy, outer_step], ids=["numpy", "kernels"])
def test_outer_steps(step: Callable[..., None], case: dict[str, Any]) -> None:
    theta, u, lr, beta = floats(case["theta"]), floats(case["u"]), case["learning_rate"], case["momentum"]
    assert same(np.array([lr], np.float32), case["learning_rate_bits"])
    assert same(np.array([beta], np.float32), case["momentum_bits"])
    for each in case["steps"]:
        step(theta, u, floats(each["delta"]), learning_rate=lr, beta=beta)
        assert (same(theta, each["theta"]), same(u, each["u"])) == (True, True)


def test_digests() -> None:
    states = []
    for case in vectors("digests"):
        match case["of"]:
            case "payload":
                assert digest(bytes.fromhex(case["bytes"])).hex() == case["digest"]
                assert content_digest(digest(bytes.fromhex(case["bytes"]))) == case["content_digest"]
            case "state":
                states.append(case["digest"])
                state = StateHash()
                state.update(floats(case["theta"]).data, floats(case["u"]).data)
                assert state.digest().hex() == case["digest"]
            case "model":
                assert case["states"] == states
                assert model_digest(map(bytes.fromhex, states)).hex() == case["digest"]


def test_announcements() -> None:
    for case in vectors("announcements"):
        payload, announced = memoryview(bytes.fromhex(case["payload"])), case["announcement"]
        head = Payload.from_bytes(payload).offsets[0]
        assert announcement([payload[:head], payload[head:]]) == DirectUpload.model_validate(announced)


def test_layouts() -> None:
    for case in vectors("layouts"):
        expected, sync = Layout.model_validate(case["layout"]), case["sync"]
        strided, taper = sync["fragment_layers"] == "strided", sync["offsets"] == "together"
        layout = plan_fragments(expected.tensors, sync["fragment_elements"], strided=strided, taper=taper)
        assert layout == expected
        assert layout.digest().hex() == case["digest"]
        compact = json.dumps(case["layout"], separators=(",", ":"), ensure_ascii=False)
        assert digest(compact.encode()).hex() == case["digest"]


def test_training_sets(tmp_path: Path) -> None:
    for index, case in enumerate(vectors("training-sets")):
        source = tmp_path / str(index)
        for name, text in case["files"].items():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_text(text, encoding="utf-8")
        spec = case["spec"]
        data = TextData(
            RunSpec(
                name="demo",
                seed=spec["seed"],
                model=ModelSpec(preset="tiny"),
                data=DataSpec(source=str(source), sequence_length=spec["sequence_length"], holdout=spec["holdout"]),
                inner=InnerSpec(batch_size=spec["batch_size"]),
                sync=SyncSpec(rounds=1),
            )
        )
        assert data.summary.model_dump() == {"digest": case["digest"], "units": case["units"]}
        assert data.training.tobytes().decode() == case["training"]
        assert data.held_out.tobytes().decode() == case["held_out"]
        assert [[bytes(row).hex() for row in data.unit(unit).tolist()] for unit in range(len(case["rows"]))] == case[
            "rows"
        ]


def test_what_must_be_refused_is_refused_for_its_reason() -> None:
    for case in vectors("refused"):
        if case["kind"] == "values":
            for codec in implementations(case["codec"]):
                with pytest.raises(CodecError, match=case["codec"]):
                    codec.encode(floats(case["values"]))
            continue
        with pytest.raises(WireError) as refusal:
            Payload.from_bytes(bytes.fromhex(case["payload"])).check()
        assert refusal.value.fault == case["kind"], case["name"]
