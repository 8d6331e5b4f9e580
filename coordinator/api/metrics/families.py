"""Every metric, with its type, unit, labels and meaning. docs/metrics.md is generated from this table.

Names are stable. Every value of a label is a time series, so a label has few values, or `runs.py` limits them.
"""

from dataclasses import dataclass
from typing import Literal

Type = Literal["gauge", "counter", "histogram"]
PREFIX = "outerstep_"


@dataclass(frozen=True)
class Family:
    """One metric. `name` is the scraped name; for a histogram without the suffixes `_bucket`, `_count`, `_sum`."""

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
    _family("runs", "runs", ("state",), "number of runs in each state"),
    _family("runs_not_shown", "runs", (), "number of runs beyond the bound, which have no series"),
    _of_runs("state", "1", "1 for the run's state, 0 for the others", "state"),
    _of_runs("paused_by_guard", "1", "1 while the guard has paused the run because its model looks spoilt"),
    _of_runs(
        "held_up", "1", "1 for the cause that holds up the run, 0 for the others (`held_up_by`, docs/rest.md)", "cause"
    ),
    _of_runs("round", "rounds", "the open or next round, counted from 0"),
    _of_runs("rounds_expected", "rounds", "the run's total number of rounds, if known"),
    _of_runs("step", "inner steps", "inner steps of the schedule completed before the open or next round"),
    _of_runs("tokens", "tokens", "tokens that the model was trained on; a gauge, because a rollback lowers it"),
    _of_runs("live_workers", "workers", "workers that hold a lease"),
    _of_runs("quarantined_workers", "workers", "live workers in quarantine"),
    _of_runs("workers_not_shown", "workers", "live workers beyond the bound, which have no series"),
    _of_runs("open_round_age_seconds", "s", "time since the open round opened; absent between two rounds"),
    _of_runs("last_round_age_seconds", "s", "time since the last round was published"),
    _of_runs("last_round_duration_seconds", "s", "time from the last round's opening to its last delta"),
    _of_runs("last_round_tokens", "tokens", "tokens that the last round's contributions were trained on"),
    _of_runs("loss", "nats per token", "the last round's training loss; absent if workers do not report it"),
    _of_runs("held_out_loss", "nats per token", "held-out loss of the latest evaluated state"),
    _of_runs("checkpoint_age_seconds", "s", "time since the latest checkpoint was completed"),
    _of_runs("divergences_total", "times", "how often a worker was found to hold another state than the run"),
    _of_runs(
        "contributions_total",
        "contributions",
        "contributions to fragments by outcome: `counted`, `shortened`, `left_out`, `late`",
        "outcome",
    ),
    _of_runs("upload_bytes_total", "bytes", "payloads sent by workers, including repeated ones"),
    _of_runs("download_bytes_total", "bytes", "payloads fetched by workers"),
    _of_runs("stage_seconds_total", "s", "workers' total time in each stage (docs/performance.md)", "stage"),
    _of_runs("events_total", "events", "events by kind (docs/rest.md)", "kind"),
    _of_runs(
        "disk_bytes",
        "bytes",
        "size of the run's files by kind: `contributions`, `deltas`, `checkpoints`, `state`, `set_aside`",
        "kind",
    ),
    _of_workers("last_seen_seconds", "s", "time since the worker's last heartbeat, or since it joined"),
    _of_workers("rounds_behind", "rounds", "how far the worker's round is behind the run's"),
    _of_workers("tokens_per_second", "tokens/s", "training speed, as measured by the worker"),
    _of_workers("inner_step", "inner steps", "the worker's current inner step within its round"),
    _of_workers("joins_total", "times", "how often the worker has joined the run; more than once if it lost its lease"),
)

OF_THE_SERVER = (
    _of_the_server("build_info", "1", "always 1; the label is the coordinator's version", "version"),
    _of_the_server(
        "http_requests_total",
        "requests",
        "requests by route (docs/rest.md; `none`: no such route, or rejected before routing) and class of status",
        "method",
        "route",
        "status",
    ),
    Family(
        f"{PREFIX}http_request_duration_seconds",
        "histogram",
        "s",
        ("method", "route"),
        "time from a request's head to the end of its answer, including long polls, large bodies and streams",
    ),
    _of_the_server("http_requests_refused_total", "requests", "requests answered with an error, by its status", "code"),
    _of_the_server("connections_open", "connections", "open connections"),
    _of_the_server(
        "connections_refused_total",
        "connections",
        "connections closed before a request was complete, by problem: `not-ready` (too many), `head-too-large`, "
        "`invalid-request`, `request-timeout`",
        "problem",
    ),
    _of_the_server("event_streams_open", "streams", "open streams of server-sent events"),
    _of_the_server(
        "disk_free_bytes", "bytes", "free disk space for the coordinator's `data` or its `database`", "place"
    ),
    _of_the_server("disk_size_bytes", "bytes", "size of the file system of `data` or `database`", "place"),
    _of_the_server("backup_interval_seconds", "s", "interval of scheduled backups; absent if there is no schedule"),
    _of_the_server(
        "last_backup_timestamp_seconds", "s", "Unix time of the last good scheduled backup; absent before the first"
    ),
    _of_the_server(
        "leads", "1", "1 while this coordinator leads, 0 on standby; this and the next four only with PostgreSQL"
    ),
    _of_the_server("leader_term", "takeovers", "the leader's fencing token, which grows by one with every takeover"),
    _of_the_server("coordinators", "coordinators", "coordinators that were seen within the last 10 s"),
    _of_the_server(
        "superseded_writes_total", "writes", "writes of this process that failed because another coordinator led"
    ),
    _of_the_server(
        "store_answer_seconds", "s", "how long the store took to answer the last probe; absent if it did not"
    ),
    _of_the_server(
        "aggregators", "aggregators", "aggregators that can do tasks; this and the next two only on a leader"
    ),
    _of_the_server("aggregation_tasks_waiting", "tasks", "deltas and outer steps that no aggregator works on yet"),
    _of_the_server(
        "aggregation_tasks_total",
        "tasks",
        "deltas and outer steps since it began to lead, by outcome: `done` by an aggregator, or left to the leader "
        "because the aggregator `failed`, the task was `withdrawn`, or the result was `refused` after it was done",
        "outcome",
    ),
    _of_the_server(
        "notifications_total",
        "notifications",
        "notifications, one for each receiver, by outcome: `sent`, `failed`",
        "outcome",
    ),
)

FAMILIES = (*OF_RUNS, *OF_THE_SERVER)
