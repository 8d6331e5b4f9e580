"""The cost of keeping a run's contributions, deltas and checkpoints in a bucket: requests, storage and egress; and the
work of averaging them.

Prices are list prices with their date, in prices.toml. It is assumed that the run has the default [checkpoints], and
that its coordinator is outside the store's network, so that what it reads for the average is egress, too.
"""

import math
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from outerstep.plan import (
    DOWN_PART_BYTES,
    FP32_BYTES,
    FRAGMENT_ELEMENTS,
    Setting,
    Workload,
    fragment_sizes,
)
from protocol.errors import OuterstepError
from protocol.spec.sections import CheckpointSpec
from protocol.text import decoded

MONTH_S = 365.25 / 12 * 86_400
GB = 1e9
EVERY, KEEP = (CheckpointSpec.model_fields[name].default for name in ("every_rounds", "keep"))
READS_PER_CONTRIBUTION = 2  # its size and checksum, and its header; then its bytes, in parts
READ_BYTES = 8 << 20  # per request of the coordinator
# Core-seconds of an aggregator, for each contributed value and for each parameter: reading, judging and averaging int8;
# the delta and the outer step (`python -m benchmarks.aggregators`, docs/log.md, "Aggregators").
AVERAGE_CORE_S, STEP_CORE_S = 3.8e-9, 2.3e-9
LEADER_CORE_S = 15e-3  # of the leader, for each contribution to a fragment
AGGREGATOR_CORES = 4  # that one process uses
AVERAGING_SHARE = 0.05  # of a round's inner steps, in which the deltas should be made
LISTS_PER_CHECKPOINT = 3  # one for each kind of file, to delete what is no longer needed


class Prices(BaseModel):
    """A store's list prices in US dollars. Writes are requests that create or list objects; reads, all others; deleting
    is free."""

    model_config = ConfigDict(extra="forbid")

    name: str
    storage_per_gb_month: float = Field(ge=0, allow_inf_nan=False)
    writes_per_1000: float = Field(ge=0, allow_inf_nan=False)
    reads_per_1000: float = Field(ge=0, allow_inf_nan=False)
    egress_per_gb: float = Field(ge=0, allow_inf_nan=False)


@dataclass(frozen=True)
class PriceTable:
    """Prices by the short name of a store, and their date."""

    date: str
    stores: dict[str, Prices]


@dataclass(frozen=True)
class StoreUse:
    """What a run asks of a store. `writes`, `reads` and `egress_bytes` are per round; `stored_bytes` are there at any
    time."""

    writes: float
    reads: float
    egress_bytes: float
    stored_bytes: float


@dataclass(frozen=True)
class StoreCost:
    """US dollars: `requests`, `egress` and `storage` of a month of `rounds` rounds, and all of it per round."""

    rounds: float
    requests: float
    egress: float
    storage: float

    @property
    def month(self) -> float:
        return self.requests + self.egress + self.storage

    @property
    def per_round(self) -> float:
        return self.month / self.rounds


@dataclass(frozen=True)
class Averaging:
    """Core-seconds per round: of aggregators, and of the leader. `aggregators`: how many of them, with AGGREGATOR_CORES
    each, make the deltas within AVERAGING_SHARE of the inner steps of a round."""

    core_s: float
    leader_core_s: float
    aggregators: int


def averaging(workload: Workload, setting: Setting) -> Averaging:
    """Return the work of averaging a round's contributions, and of the outer step."""
    fragments = len(fragment_sizes(workload.parameters, FRAGMENT_ELEMENTS))
    core_s = workload.parameters * (workload.workers * AVERAGE_CORE_S + STEP_CORE_S)
    within_s = AVERAGING_SHARE * setting.inner_steps * workload.step_s
    return Averaging(
        core_s,
        workload.workers * fragments * LEADER_CORE_S,
        max(1, math.ceil(core_s / (AGGREGATOR_CORES * within_s))),
    )


def read_prices(path: Path | None = None) -> PriceTable:
    """Return the prices in a file; None: those that come with Outerstep. Raises OuterstepError."""
    source = resources.files("outerstep") / "prices.toml" if path is None else path
    try:
        document = tomllib.loads(decoded(source.read_bytes()))
        date = document.pop("date")
        return PriceTable(str(date), TypeAdapter(dict[str, Prices]).validate_python(document))
    except KeyError as error:
        raise OuterstepError(f'{source} has no date, such as date = "2026-11"') from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise OuterstepError(f"{source}: {where}: {first['msg']}") from error
    except (OSError, ValueError) as error:
        raise OuterstepError(f"{source} cannot be read as a table of prices: {error}") from error


def store_use(workload: Workload, setting: Setting) -> StoreUse:
    """Return what a run with this setting asks of its store, with direct transfers."""
    workers, cost = workload.workers, setting.cost
    fragments = len(fragment_sizes(workload.parameters, FRAGMENT_ELEMENTS))
    up, down = cost.upload_bytes / fragments, cost.download_bytes / fragments
    checkpoint_bytes = 2 * FP32_BYTES * workload.parameters  # θ and momentum
    return StoreUse(
        writes=fragments * (workers + 1 + 1 / EVERY) + LISTS_PER_CHECKPOINT / EVERY,
        reads=fragments
        * workers
        * (READS_PER_CONTRIBUTION + math.ceil(up / READ_BYTES) + math.ceil(down / DOWN_PART_BYTES)),
        egress_bytes=workers * (cost.upload_bytes + cost.download_bytes),
        # Contributions since the last checkpoint, deltas since the oldest one, and the checkpoints.
        stored_bytes=EVERY * workers * cost.upload_bytes
        + (EVERY * KEEP + 1) * cost.download_bytes
        + (KEEP + 1) * checkpoint_bytes,
    )


def store_cost(workload: Workload, setting: Setting, prices: Prices) -> StoreCost:
    """Return the cost of a month in which the workers train without a pause."""
    use, round_s = store_use(workload, setting), setting.inner_steps * workload.step_s + setting.cost.sync_s
    rounds = MONTH_S / round_s
    return StoreCost(
        rounds,
        rounds * (use.writes * prices.writes_per_1000 + use.reads * prices.reads_per_1000) / 1000,
        rounds * use.egress_bytes / GB * prices.egress_per_gb,
        use.stored_bytes / GB * prices.storage_per_gb_month,
    )
