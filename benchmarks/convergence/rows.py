"""The rows of the table: runs, by the keys in which they differ from a common spec."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outerstep.demo.spec import RUN

WORKERS, BATCH, LENGTH = 8, 8, 64
STEPS = 3000
ONE_ROUND = 1 << 20  # inner steps: more than a run has, so `Row.spec` makes it one round
LOOKS = 12  # number of held-out measurements

SPEC: dict[str, dict[str, Any]] = {
    "model": {"preset": "tiny"},
    "data": {"sequence_length": LENGTH},
    "inner": {"optimizer": "adamw", "batch_size": BATCH, "learning_rate": 8e-3, "warmup_steps": 100},
    "outer": {"learning_rate": 1.0, "momentum": 0.8},
    "sync": {
        "wait": "always",
        "inner_steps": 50,
        "upload_codec": "int4",
        "download_codec": "int4",
        "fragment_elements": 50_000,
    },
    # A temporarily slow machine must not leave a worker out.
    "members": {"lease_s": 60, "grace_min_s": 600},
    "evaluation": {"max_tokens": 65_536},
}


# The keys that a row of the defaults omits.
SAID = {
    "inner": ("optimizer", "learning_rate", "warmup_steps"),
    "outer": ("learning_rate", "momentum"),
    "sync": ("upload_codec", "download_codec"),
}

# An outer step that only adopts the worker's parameters.
TAKE_OVER = {
    "outer.learning_rate": 1.0,
    "outer.momentum": 0.0,
    "sync.upload_codec": "fp32",
    "sync.download_codec": "fp32",
}


@dataclass(frozen=True)
class Row:
    """A run of `workers`; `synchronous`: of one worker with the batches of all. `keys`: the dotted keys that differ
    from the common spec; `defaults`: the keys in SAID are omitted."""

    workers: int = WORKERS
    synchronous: bool = False
    defaults: bool = False
    keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        return 1 if self.synchronous else self.workers

    def spec(self, steps: int, seed: int) -> str:
        """Return the run's spec in TOML, for `steps` inner steps of each worker. Raises ValueError unless these are
        whole rounds."""
        left_out = SAID if self.defaults else {}
        document = {
            section: {key: value for key, value in keys.items() if key not in left_out.get(section, ())}
            for section, keys in SPEC.items()
        }
        synchronous = {"inner.batch_size": BATCH * self.workers, **TAKE_OVER} if self.synchronous else {}
        for name, value in {**synchronous, **self.keys}.items():
            section, key = name.split(".")
            document.setdefault(section, {})[key] = value
        sync = document["sync"]
        sync["inner_steps"] = min(sync["inner_steps"], steps)
        sync["rounds"], rest = divmod(steps, sync["inner_steps"])
        if rest:
            raise ValueError(f"{steps} steps are no whole rounds of {sync['inner_steps']}")
        document["evaluation"]["every_rounds"] = max(sync["rounds"] // LOOKS, 1)
        document["members"]["min_workers"] = self.processes
        lines = [f'name = "{RUN}"', f"seed = {seed}"]
        for section, keys in document.items():
            lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
        return "\n".join(lines) + "\n"


def _codecs(upload: str, download: str) -> dict[str, Any]:
    return {"sync.upload_codec": upload, "sync.download_codec": download}


# Inner learning rate -> the rows that DiLoCo is compared with.
SYNCHRONOUS = {rate: f"synchronous, rate {rate:g}" for rate in (4e-3, 8e-3, 16e-3)}
ONE_WORKER = {rate: f"one worker, rate {rate:g}" for rate in (8e-3,)}
# Fewer workers -> the row that they are compared with: the same tokens, at the common rate.
FEWER = {workers: f"synchronous, {workers} workers" for workers in (2, 4)}

MUON = {"inner.optimizer": "muon"}

ROWS: dict[str, Row] = {
    **{name: Row(1, True, keys={"inner.learning_rate": rate}) for rate, name in ONE_WORKER.items()},
    **{name: Row(WORKERS, True, keys={"inner.learning_rate": rate}) for rate, name in SYNCHRONOUS.items()},
    "no communication": Row(keys={"sync.inner_steps": ONE_ROUND, "outer.momentum": 0.0, **_codecs("fp32", "fp32")}),
    "DiLoCo": Row(),
    "the defaults": Row(defaults=True),
    "DiLoCo, fp32": Row(keys=_codecs("fp32", "fp32")),
    "DiLoCo, int8": Row(keys=_codecs("int8", "int8")),
    "DiLoCo, ternary up": Row(keys=_codecs("ternary", "int4")),
    **{name: Row(workers, True) for workers, name in FEWER.items()},
    "2 workers": Row(2),
    "4 workers": Row(4),
    "H 20": Row(keys={"sync.inner_steps": 20}),
    "H 100": Row(keys={"sync.inner_steps": 100}),
    "H 500": Row(keys={"sync.inner_steps": 500}),
    "overlap 6": Row(keys={"sync.overlap": 6}),
    "synchronous, Muon": Row(synchronous=True, keys=MUON),
    "Muon": Row(keys=MUON),
    "Muon, spread": Row(keys={**MUON, "sync.offsets": "spread"}),
    "Muon, ternary up": Row(keys={**MUON, **_codecs("ternary", "int4")}),
    "Muon, H 100": Row(keys={**MUON, "sync.inner_steps": 100}),
    "Muon, H 100, ternary up": Row(keys={**MUON, "sync.inner_steps": 100, **_codecs("ternary", "int4")}),
    "Muon, 2bit": Row(keys={**MUON, **_codecs("2bit", "2bit")}),
    "Muon, H 75, 2bit": Row(keys={**MUON, "sync.inner_steps": 75, **_codecs("2bit", "2bit")}),
    "Muon, sparse up": Row(keys={**MUON, "outer.momentum": 0.0, **_codecs("sparse", "int4")}),
}

# Title of a section of the table -> its rows, and what they show.
GROUPS: dict[str, tuple[list[str], str]] = {
    "Beside synchronous training": (
        [*ONE_WORKER.values(), *SYNCHRONOUS.values(), "no communication", "DiLoCo"],
        "One worker is the baseline to beat. Without communication, the models are averaged once, at the end.",
    ),
    "Codecs": (
        ["DiLoCo, fp32", "DiLoCo, int8", "DiLoCo", "DiLoCo, ternary up"],
        "Each codec both ways; ternary is for uploads, with int4 down.",
    ),
    "Workers": (
        [*ONE_WORKER.values(), FEWER[2], "2 workers", FEWER[4], "4 workers", SYNCHRONOUS[8e-3], "DiLoCo"],
        "*Same rate* and *gap closed* compare with synchronous training of as many workers, on the same tokens in as "
        "many steps. One worker has trained for the same time, on fewer tokens.",
    ),
    "Inner optimizer": (
        [
            "DiLoCo",
            "synchronous, Muon",
            "Muon",
            "Muon, spread",
            "the defaults",
            "Muon, ternary up",
            "Muon, H 100",
            "Muon, H 100, ternary up",
            "Muon, 2bit",
            "Muon, H 75, 2bit",
            "Muon, sparse up",
        ],
        "Muon for the hidden matrices, AdamW for the rest (MuLoCo, arXiv 2505.23725), both at 8e-3. *same rate* and "
        "*best rate* compare with synchronous AdamW. The defaults are a spec that names neither optimizer nor codecs, "
        "from when the default outer momentum was 0.8.",
    ),
    "Inner steps per round": (["H 20", "DiLoCo", "H 100", "H 500"], "The same inner steps in fewer rounds."),
    "Overlap": (["DiLoCo", "overlap 6"], "Training goes on for an eighth of a round while fragments travel."),
}

QUICK = [ONE_WORKER[8e-3], SYNCHRONOUS[8e-3], "DiLoCo"]
QUICK_STEPS = 200
