"""Writes docs/metrics.md from the table of the metrics: `python -m docs.write_metrics`, in the repository.

A test fails while the page is not what this writes.
"""

from collections.abc import Iterable
from pathlib import Path

from coordinator.metrics.families import OF_RUNS, OF_THE_SERVER, Family
from coordinator.metrics.runs import RUNS
from coordinator.metrics.seeing import WORKERS

PAGE = Path(__file__).parent / "metrics.md"

HEAD = f"""\
# Metrics

Made by `docs/write_metrics.py` from [coordinator/metrics/families.py](../coordinator/metrics/families.py). A
coordinator answers `GET /metrics` in Prometheus' text format:

```sh
curl --header "Authorization: Bearer $(cat viewer.token)" https://coordinator.example.org/metrics
```

Any token will do; a viewer's is enough (`outerstep token create --scope viewer`). With a token for all runs there are
all runs and the server; with one for one run, that run alone. A scrape counts as one request of the token, and as one
more for each run that it shows.

Everything is read when it is scraped: from memory, and by about ten small queries for each run, on the threads that
answer listings. A run's lock is held no longer than by a listing of runs. What is not known has no series, such as the
age of a round that is not open. Ages are by the coordinator's own clock.

**How many series there are is bounded.** {RUNS} runs have series, those that go on first and then the newest, and of
each {WORKERS} live workers, the first by name; how many have none is told. Routes are those of
[rest.md](rest.md), whatever addresses are asked for.

Counters begin at 0 when the coordinator starts, but for those of divergences, bytes, seconds of stages and joins, which
are in the database.

[deployment.md](deployment.md#prometheus-and-grafana) has the scrape configuration, alerts and a dashboard.
"""

LIBRARY = """
Beside these there are `process_*` and `python_gc_*`, as the Prometheus library has them: CPU time, memory, open files,
start time.
"""


def page() -> str:
    """The page, Markdown."""
    runs, server = _table(OF_RUNS), _table(OF_THE_SERVER)
    return f"{HEAD}\n## Runs and workers\n\n{runs}\n## The server\n\n{server}{LIBRARY}"


def _table(families: Iterable[Family]) -> str:
    rows = ["| metric | type | unit | labels | meaning |", "| --- | --- | --- | --- | --- |"]
    for each in families:
        labels = ", ".join(f"`{label}`" for label in each.labels) or "–"
        rows.append(f"| `{each.name}` | {each.type} | {each.unit} | {labels} | {each.meaning} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
