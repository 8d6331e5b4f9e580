"""Bit for bit the same as on a CPU: the bytes of every codec, what is decoded from them, and fragments of a model."""

from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from protocol.codecs import REFERENCE
from protocol.fragments import plan_fragments
from worker.codecs.torch_codecs import IN_TORCH
from worker.state.fragments import Fragments
from worker.state.parameters import tensor_specs

LARGE, MINIATURE = (1 << 24) + 77, (1 << 14) + 77

F32 = npt.NDArray[np.float32]


def extremes(n: int) -> F32:
    """Blocks of all magnitudes that a codec carries: denormals, zeros of both signs, powers of two, the largest."""
    random = np.random.default_rng(2)
    exponents = np.repeat(random.integers(-149, 55, n // 64 + 1), 64)[:n]
    values: F32 = np.ldexp(random.choice([-1.0, -0.75, -0.0, 0.0, 0.5, 1.0], n), exponents)
    return values.astype(np.float32)


def gaussian(n: int) -> F32:
    return (np.random.default_rng(0).standard_normal(n) * 1e-3).astype(np.float32)


def heavy_tails(n: int) -> F32:
    return (np.asarray(np.random.default_rng(1).standard_t(2, n)) * 1e-6).astype(np.float32)


DRAWS = {"gaussian": gaussian, "heavy tails": heavy_tails, "extremes": extremes}


def elements(device: torch.device) -> int:
    return LARGE if device.type == "cuda" else MINIATURE


@pytest.mark.parametrize("codec", REFERENCE)
def test_every_codec_gives_the_reference_s_bytes_and_values(codec: str, device: torch.device) -> None:
    n = elements(device)
    for name, draw in DRAWS.items():
        values = draw(n)
        raw = np.empty(REFERENCE[codec].size(n), np.uint8)
        REFERENCE[codec].encode(values, raw)
        encoded = IN_TORCH[codec].encode(torch.from_numpy(values).to(device))
        assert np.array_equal(encoded.cpu().numpy(), raw), name
        expected = np.empty(n, np.float32)
        REFERENCE[codec].decode(raw, expected)
        decoded = IN_TORCH[codec].decode(torch.from_numpy(raw).to(device), n)
        assert np.array_equal(decoded.cpu().numpy().view(np.uint32), expected.view(np.uint32)), name


def model(dtype: torch.dtype, width: int) -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Embedding(40 * width, width), nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, 7)]
    return nn.Sequential(*layers).to(dtype)


def trained(of: nn.Module, seed: int) -> None:
    """Change the parameters as an inner step does, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in of.parameters():
            parameter.sub_((torch.randn(parameter.shape, generator=generator) * 1e-3).to(parameter))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pseudo_gradients_are_those_of_a_cpu(dtype: torch.dtype, device: torch.device) -> None:
    """Also with progress that no mean has, and of a model whose parameters are rounded to bf16."""

    width = 1024 if device.type == "cuda" else 48

    def ways(to: torch.device) -> list[Tensor]:
        local = model(dtype, width).to(to)
        layout = plan_fragments(tensor_specs(local), 1 << 23)
        fragments = Fragments(local, layout)
        found: list[Tensor] = []
        for p, carried in product(range(len(fragments)), (False, True)):
            theta = fragments.gather(p).cpu() * 1.01
            carry = theta * 1e-3 if carried else None
            fragments.rebase(p, theta, carry)
            trained(local, seed=p)
            sent = fragments.gather(p)
            found.append(fragments.pseudo_gradient(p, theta, carry, local=sent.clone(), after=fragments.mark()))
            trained(local, seed=p + 1)
            found += [fragments.progress_since(p, sent), fragments.pseudo_gradient(p, theta, carry)]
        return [each.cpu() for each in found]

    for here, there in zip(ways(torch.device("cpu")), ways(device), strict=True):
        assert torch.equal(here.view(torch.int32), there.view(torch.int32))
