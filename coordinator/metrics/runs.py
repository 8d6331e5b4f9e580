"""The collector of the runs: whatever a token may see, read when it is scraped.

How many time series there are is bounded: of RUNS runs, those that go on first and then the newest, and of WORKERS
live workers of each (`seeing.py`). How many are left out is told.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import Metric
from prometheus_client.registry import Collector
from sqlalchemy.exc import NoResultFound

from coordinator.metrics.families import OF_RUNS, PREFIX, Family
from coordinator.metrics.seeing import see
from coordinator.metrics.values import Value, of_run
from coordinator.reports import state_of
from coordinator.run.live_run import LiveRun
from protocol.messages import RunState

RUNS = 50  # that are shown


def shown(runs: Iterable[LiveRun]) -> list[LiveRun]:
    """Return those of the runs that have series, by name."""
    first = sorted(runs, key=lambda run: (run.ended, -run.id))[:RUNS]
    return sorted(first, key=lambda run: run.name)


class RunsCollector(Collector):
    """The metrics of the runs that `runs` returns."""

    def __init__(self, runs: Callable[[], Sequence[LiveRun]]) -> None:
        self._runs = runs

    def collect(self) -> Iterator[Metric]:
        return metrics(OF_RUNS, self._values())

    def _values(self) -> Iterator[Value]:
        runs = self._runs()
        chosen = shown(runs)
        states = Counter(map(state_of, runs))
        for state in RunState:
            yield f"{PREFIX}runs", (state,), states[state]
        yield f"{PREFIX}runs_not_shown", (), len(runs) - len(chosen)
        for run in chosen:
            try:
                yield from of_run(see(run))
            except (NoResultFound, FileNotFoundError):
                continue  # it was removed meanwhile


def metrics(families: Sequence[Family], values: Iterable[Value]) -> Iterator[Metric]:
    """Yield the families with their values, as Prometheus' library has them; also those without any."""
    found: dict[str, list[Value]] = defaultdict(list)
    for value in values:
        found[value[0]].append(value)
    for family in families:
        metric = Metric(family.name.removesuffix("_total"), f"{family.meaning} ({family.unit})", family.type)
        for name, labels, number in found[family.name]:
            metric.add_sample(name, dict(zip(family.labels, labels, strict=True)), float(number))
        yield metric
