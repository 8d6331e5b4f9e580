"""The rows: what differs from 60 rounds of 50 steps with int4 both ways, outer learning rate 1.0 and momentum 0.8."""

import itertools
from collections.abc import Sequence
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

    inner_steps   H; with `last_inner_steps`, H changes linearly from the first to that in the last round
    restart       rounds after which the outer momentum begins at 0 again (arXiv 2605.28585); 0: never
    mean_moments  rounds after which the inner optimizers' moments are averaged over all workers, with bf16 both ways
                  (arXiv 2505.22549); 0: never
    decay         of what the upload codec leaves out, beside the parameters; None: in them, all of it, as the product
    fragments     of the model, which are synced at different times of a round, as with sync.offsets = "spread"
    width, layers the model's shape; a feed-forward layer is three times as wide, and a head has 16 values
    """

    synchronous: bool = False
    inner_steps: int = 50
    last_inner_steps: int | None = None
    upload: str = "int4"
    download: str = "int4"
    outer: Outer = USUAL
    last_outer: Outer | None = None
    restart: int = 0
    mean_moments: int = 0
    learning_rate: float = 8e-3
    final_fraction: float = 0.1
    optimizer: str = "muon"
    decay: float | None = None
    fragments: int = 1
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

    def outer_at(self, part: float) -> Outer:
        """Return the outer optimizer after this part of the run, 0 to 1."""
        if self.last_outer is None:
            return self.outer
        first, last = self.outer, self.last_outer
        return Outer(
            first.learning_rate + part * (last.learning_rate - first.learning_rate),
            first.momentum + part * (last.momentum - first.momentum),
        )


SYNCHRONOUS = "synchronous"
BASE = Row()


def _named(inner_steps: Sequence[int], uploads: Sequence[str]) -> dict[str, Row]:
    return {
        f"{upload} up, H {h}": replace(BASE, inner_steps=h, upload=upload) for upload in uploads for h in inner_steps
    }


ROWS: dict[str, Row] = {
    SYNCHRONOUS: Row(synchronous=True),
    **{f"fp32, H {h}": replace(BASE, inner_steps=h, upload="fp32", download="fp32") for h in (50, 200)},
    **_named((25, 50, 75, 100, 150, 200, 300, 500), ("int4",)),
    **_named((25, 40, 50, 75, 100, 150, 200, 300, 500), ("ternary",)),
    **{
        f"ternary up, H {h}, momentum {momentum}": replace(
            BASE, inner_steps=h, upload="ternary", outer=Outer(1.0, momentum)
        )
        for h in (40, 100, 200, 500)
        for momentum in (0.4, 0.6, 0.9)
    },
    **{
        f"ternary up, H {h}, outer rate {rate}": replace(BASE, inner_steps=h, upload="ternary", outer=Outer(rate, 0.8))
        for h in (40, 100, 200)
        for rate in (0.7, 1.2)
    },
    **{
        f"{codec} both ways, H {h}": replace(BASE, inner_steps=h, upload=codec, download=codec)
        for codec in ("ternary", "2bit")
        for h in (20, 25, 30, 50, 70, 100, 200, 350)
    },
    **{
        f"ternary up, 2bit down, H {h}": replace(BASE, inner_steps=h, upload="ternary", download="2bit")
        for h in (25, 50, 65, 100, 320)
    },
    **{
        f"2bit both ways, H {first} to {last}": replace(
            BASE, inner_steps=first, last_inner_steps=last, upload="2bit", download="2bit"
        )
        for first, last in ((15, 45), (20, 50), (35, 105), (175, 525))
    },
    "2bit up, H 50": replace(BASE, upload="2bit"),
    **{
        f"{upload} up, H {first} to {last}": replace(BASE, upload=upload, inner_steps=first, last_inner_steps=last)
        for upload, first, last in (
            ("int4", 10, 150),
            ("int4", 15, 75),
            ("int4", 25, 100),
            ("int4", 100, 25),
            ("ternary", 15, 75),
            ("ternary", 20, 100),
            ("ternary", 50, 200),
            ("ternary", 40, 400),
            ("ternary", 200, 800),
            ("ternary", 100, 1000),
        )
    },
    "int4 up, H 50, momentum 0.6 to 0.9": replace(BASE, outer=Outer(1.0, 0.6), last_outer=Outer(1.0, 0.9)),
    "int4 up, H 50, momentum 0.9 to 0.6": replace(BASE, outer=Outer(1.0, 0.9), last_outer=Outer(1.0, 0.6)),
    "int4 up, H 50, spread": replace(BASE, fragments=3),
    "int4 up, H 50, restart every 10": replace(BASE, restart=10),
    "int4 up, H 50, restart every 20": replace(BASE, restart=20),
    "int4 up, H 50, moments averaged every 10": replace(BASE, mean_moments=10),
    "int4 up, H 50, moments averaged every round": replace(BASE, mean_moments=1),
    "int4 up, H 50, decay to 0.02": replace(BASE, final_fraction=0.02),
    "int4 up, H 50, decay to 0.2": replace(BASE, final_fraction=0.2),
    "int4 up, H 50, rate 0.006": replace(BASE, learning_rate=6e-3),
    "int4 up, H 50, rate 0.011": replace(BASE, learning_rate=11e-3),
    **{
        f"{millions} M, {name}": replace(row, width=width, layers=layers, learning_rate=RATES[width])
        for millions, width, layers in ((0.5, 128, 2), (1.5, 192, 3))
        for name, row in {SYNCHRONOUS: Row(synchronous=True), "int4 up, H 50": BASE}.items()
    },
    "0.5 M, synchronous, rate 0.006": Row(synchronous=True, width=128, learning_rate=6e-3),
    **{
        f"sparse {way}, H {h}{rule}": replace(
            BASE, inner_steps=h, upload="sparse", download=download, outer=Outer(1.0, momentum), decay=decay
        )
        for way, download in (("up", "int4"), ("both ways", "sparse"))
        for h in (5, 10, 20, 50)
        for rule, momentum, decay in (
            ("", 0.0, None),
            (", decay 0.95", 0.0, 0.95),
            (", decay 0.95, momentum 0.8", 0.8, 0.95),
        )
    },
}
