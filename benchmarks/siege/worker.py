"""An honest worker as a separate process: a script with `outerstep.DiLoCo` whose inner steps take a fixed time, as on
an accelerator."""

import argparse
import time
from pathlib import Path

import torch
from torch import nn

from outerstep import DiLoCo


class Flat(nn.Module):
    """A model that is one vector, float32[elements]."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(elements))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("url", "run", "name", "token"):
        parser.add_argument(name)
    parser.add_argument("state", type=Path)
    parser.add_argument("elements", type=int)
    parser.add_argument("step_s", type=float)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = Flat(given.elements)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(sum(given.name.encode()))
    with DiLoCo.connect(
        model, optimizer, url=given.url, run=given.run, token=given.token, name=given.name, state_dir=given.state
    ) as diloco:
        for _ in diloco.units():
            time.sleep(given.step_s)
            model.w.grad = torch.randn(given.elements, generator=generator)
            optimizer.step()


if __name__ == "__main__":
    main()
