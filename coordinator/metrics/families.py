"""Every metric, with its type, unit, labels and meaning: docs/metrics.md is made of this table.

Names stay as they are. A label has few values, or its values are bounded (`runs.py`), as each of them is a time series.
"""

from dataclasses import dataclass
from typing import Literal

Type = Literal["gauge", "counter", "histogram"]
PREFIX = "outerstep_"


@dataclass(frozen=True)
class Family:
    """One metric. `name` as it is scraped, of a histogram without the endings of its parts."""

    name: str
    type: Type
    unit: str
    labels: tuple[str, ...]
    meaning: str


def _family(name: str, unit: str, labels: tuple[str, ...], meaning: str) -> Family:
    return Family(PREFIX + name, "counter" if name.endswith("_total") else "gauge", unit, labels, meaning)


def _of_runs(name: str, unit: str, meaning: str, *labels: str) -> Family:
    return _family(f"run_{name}", unit, ("run", *labels), meaning)


def _of_workers(name: str, unit: str, meaning: str) -> Family:
    return _family(f"worker_{name}", unit, ("run", "worker"), meaning)


def _of_the_server(name: str, unit: str, meaning: str, *labels: str) -> Family:
    return _family(name, unit, labels, meaning)


OF_RUNS = (
    _family("runs", "runs", ("state",), "how many runs are in each state"),
    _family("runs_not_shown", "runs", (), "those beyond the bound, which have no series"),
    _of_runs("state", "1", "1 at the state that the run is in, 0 at the others", "state"),
    _of_runs("paused_by_guard", "1", "1 while the run is paused because the guard took its model for spoilt"),
    _of_runs(
        "held_up", "1", "1 at the cause that holds the run up, 0 at the others (`held_up_by`, docs/rest.md)", "cause"
    ),
    _of_runs("round", "rounds", "the open or next round, counted from 0"),
    _of_runs("rounds_expected", "rounds", "how many the run has in all, as far as is known"),
    _of_runs("step", "inner steps", "inner steps of the schedule before that round"),
    _of_runs("tokens", "tokens", "what the model was trained on; a gauge, as going back to a checkpoint lowers it"),
    _of_runs("live_workers", "workers", "workers that hold a lease"),
    _of_runs("quarantined_workers", "workers", "those of them that are in quarantine"),
    _of_runs("workers_not_shown", "workers", "those of them beyond the bound, which have no series"),
    _of_runs("open_round_age_seconds", "s", "since the open round opened; absent between two rounds"),
    _of_runs("last_round_age_seconds", "s", "since the last round was published"),
    _of_runs("last_round_duration_seconds", "s", "from the opening of that round to its last delta"),
    _of_runs("last_round_tokens", "tokens", "what its contributions were trained on"),
    _of_runs("loss", "nats per token", "its training loss; absent where workers tell none"),
    _of_runs("held_out_loss", "nats per token", "of the latest state that was evaluated"),
    _of_runs("checkpoint_age_seconds", "s", "since the latest checkpoint was complete"),
    _of_runs("divergences_total", "times", "a worker was found to hold another state than the run's"),
    _of_runs(
        "contributions_total",
        "contributions",
        "to fragments, by what came of them: `counted`, `shortened`, `left_out`, `late`",
        "outcome",
    ),
    _of_runs("upload_bytes_total", "bytes", "payloads that workers have sent, repeated ones included"),
    _of_runs("download_bytes_total", "bytes", "payloads that they have fetched"),
    _of_runs("stage_seconds_total", "s", "workers' time in each stage (docs/performance.md)", "stage"),
    _of_runs("events_total", "events", "by kind (docs/rest.md)", "kind"),
    _of_runs(
        "disk_bytes",
        "bytes",
        "the run's files: `contributions`, `deltas`, `checkpoints`, `state`, `set_aside`",
        "kind",
    ),
    _of_workers("last_seen_seconds", "s", "since its last heartbeat, or its join"),
    _of_workers("rounds_behind", "rounds", "how far the run is ahead of the round that it is at"),
    _of_workers("tokens_per_second", "tokens/s", "its own measurement"),
    _of_workers("inner_step", "inner steps", "which one of its round it is at"),
    _of_workers("joins_total", "times", "it has joined the run; more than once where a lease was lost"),
)

OF_THE_SERVER = (
    _of_the_server("build_info", "1", "always 1; the label has the coordinator's version", "version"),
    _of_the_server(
        "http_requests_total",
        "requests",
        "answered, by route as docs/rest.md has it (`none`: refused before, or not there), and class of status",
        "method",
        "route",
        "status",
    ),
    Family(
        f"{PREFIX}http_request_duration_seconds",
        "histogram",
        "s",
        ("method", "route"),
        "from a request's head to the end of its answer: long polls, bodies and streams take as long as they take",
    ),
    _of_the_server("http_requests_refused_total", "requests", "answered with a problem, by its status", "code"),
    _of_the_server("connections_open", "connections", "as many as there are"),
    _of_the_server(
        "connections_refused_total",
        "connections",
        "closed before a request was there, by problem: `not-ready` (too many), `head-too-large`, `request-timeout`",
        "problem",
    ),
    _of_the_server("event_streams_open", "streams", "of server-sent events"),
    _of_the_server("disk_free_bytes", "bytes", "free for the coordinator where its `data` or `database` lies", "place"),
    _of_the_server("disk_size_bytes", "bytes", "the size of that file system", "place"),
    _of_the_server("backup_interval_seconds", "s", "from one backup of the schedule to the next; absent without one"),
    _of_the_server(
        "last_backup_timestamp_seconds", "s", "when its last good one was made, since 1970; absent before the first"
    ),
    _of_the_server("notifications_pending", "notifications", "that the webhook has not taken yet"),
    _of_the_server(
        "notification_attempts_total",
        "attempts",
        "to send one to the webhook, by outcome: `sent`, `failed`",
        "outcome",
    ),
)

FAMILIES = (*OF_RUNS, *OF_THE_SERVER)
