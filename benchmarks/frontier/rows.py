"""The rows: what differs from 60 rounds of 50 steps with int4 both ways, outer learning rate 1.0 and momentum 0.8."""

import itertools
from dataclasses import dataclass, fields, replace
from typing import Any

from benchmarks.frontier.training import Outer
from protocol.spec.model import PRESETS

WORKERS = 8
USUAL = Outer(1.0, 0.8)
RATES = {width: 8e-3 * 64 / width for width in (64, 128, 192)}  # width -> learning rate


@dataclass(frozen=True)
class Row:
    """A DiLoCo run, or with `synchronous` one of one worker with the batches of all.

    inner_steps    H; with `last_inner_steps`, H changes linearly from the first to that in the last round
    width, layers  the model's shape; a feed-forward layer is three times as wide, and a head has 16 values
    """

    synchronous: bool = False
    inner_steps: int = 50
    last_inner_steps: int | None = None
    upload: str = "int4"
    download: str = "int4"
    outer: Outer = USUAL
    learning_rate: float = 8e-3
    width: int = 64
    layers: int = 2

    @property
    def config(self) -> dict[str, Any]:
        """The model's configuration; for the usual shape that of the preset `tiny`."""
        shape = {
            "hidden_size": self.width,
            "intermediate_size": 3 * self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.width // 16,
            "initializer_range": 0.08 * (64 / self.width) ** 0.5,
        }
        return {"model_type": "llama"} | PRESETS["tiny"] | shape

    @property
    def parameters(self) -> int:
        """The number of the model's parameters."""
        layer = 4 * self.width**2 + 3 * 3 * self.width**2 + 2 * self.width
        return 2 * PRESETS["tiny"]["vocab_size"] * self.width + self.layers * layer + self.width

    @property
    def base(self) -> "Row":
        """The synchronous row that this one is compared with."""
        return Row(synchronous=True, width=self.width, layers=self.layers, learning_rate=RATES[self.width])

    def differs(self) -> dict[str, Any]:
        """Return the fields in which the row differs from the usual one."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value != getattr(BASE, name)}

    def rounds(self, steps: int) -> list[int]:
        """Return the inner steps of each round, `steps` in all."""
        first, last = self.inner_steps, self.last_inner_steps or self.inner_steps
        count = max(round(2 * steps / (first + last)), 1)
        ends = [round(steps * self._share(each / count, first, last)) for each in range(count + 1)]
        return [after - before for before, after in itertools.pairwise(ends)]

    def _share(self, part: float, first: int, last: int) -> float:
        """Return the share of the steps that is done after this part of the rounds."""
        return (first * part + (last - first) * part * part / 2) / ((first + last) / 2)


SYNCHRONOUS = "synchronous"
BASE = Row()


ROWS: dict[str, Row] = {
    SYNCHRONOUS: Row(synchronous=True),
    **{f"fp32, H {h}": replace(BASE, inner_steps=h, upload="fp32", download="fp32") for h in (50, 200)},
    **{
        f"{upload} up, H {h}": replace(BASE, inner_steps=h, upload=upload)
        for upload, each in (("int4", (50, 200)), ("ternary", (40, 100, 500)))
        for h in each
    },
    **{
        f"ternary up, H {h}, momentum {momentum}": replace(
            BASE, inner_steps=h, upload="ternary", outer=Outer(1.0, momentum)
        )
        for h, momentum in ((100, 0.4), (100, 0.6), (200, 0.4))
    },
    **{
        f"{codec} both ways, H {h}": replace(BASE, inner_steps=h, upload=codec, download=codec)
        for codec, each in (("ternary", (25, 50, 100)), ("2bit", (30, 50, 70, 100, 200, 350)))
        for h in each
    },
    "ternary up, 2bit down, H 50": replace(BASE, upload="ternary", download="2bit"),
    **{
        f"{way}, H {first} to {last}": replace(
            BASE, inner_steps=first, last_inner_steps=last, upload=upload, download=download
        )
        for way, upload, download, first, last in (
            ("2bit both ways", "2bit", "2bit", 35, 105),
            ("2bit both ways", "2bit", "2bit", 175, 525),
            ("int4 up", "int4", "int4", 25, 100),
            ("int4 up", "int4", "int4", 100, 25),
        )
    },
    **{
        f"{millions} M, {name}": replace(row, width=width, layers=layers, learning_rate=RATES[width])
        for millions, width, layers in ((0.5, 128, 2), (1.5, 192, 3))
        for name, row in {SYNCHRONOUS: Row(synchronous=True), "int4 up, H 50": BASE}.items()
    },
    "sparse up, H 10": replace(BASE, inner_steps=10, upload="sparse", outer=Outer(1.0, 0.0)),
}
