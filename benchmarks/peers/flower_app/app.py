"""FedAvg over pseudo-gradients in memory; each worker writes to a file when it had sent and received.

A sync lasts from when every worker holds its pseudo-gradient until the last one holds the mean as an array: from the
reply of one round to the message of the next. Messages before the first sync and after the last have one element.
Workers start together, as each waits for the last one's file.
"""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from benchmarks.peers import deltas

server = ServerApp()
client = ClientApp()


@server.main()
def serve(grid: Grid, context: Context) -> None:
    workers, syncs = int(context.run_config["workers"]), int(context.run_config["syncs"])
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=workers, min_available_nodes=workers)
    strategy.start(grid, ArrayRecord([np.zeros(1, np.float32)]), num_rounds=syncs + 1)


@client.train()
def train(message: Message, context: Context) -> Message:
    values = message.content["arrays"].to_numpy_ndarrays()[0]
    received = _now()
    settings, rank = context.run_config, int(context.node_config["rank"])
    exchange, workers, elements = Path(settings["exchange"]), int(settings["workers"]), int(settings["elements"])
    round_ = int(message.content["config"]["server-round"]) - 1
    report: dict[str, Any] = {"rank": rank, "round": round_, "received": received}
    if round_ < int(settings["syncs"]):
        delta = deltas.draw(rank, elements)
    else:
        delta = np.zeros(1, np.float32)
        report["relative_error"] = deltas.relative_error(values, deltas.mean(workers, elements))
    (exchange / f"{round_}-{rank}.ready").touch()
    while len(list(exchange.glob(f"{round_}-*.ready"))) < workers:
        time.sleep(0.002)
    report["sent"] = _now()
    arrays = ArrayRecord([delta])
    report["payload_bytes"] = sum(len(array.data) for array in arrays.values())
    unfinished = exchange / f"{round_}-{rank}.part"
    unfinished.write_text(json.dumps(report))
    unfinished.rename(unfinished.with_suffix(".json"))
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
    return Message(content=content, reply_to=message)


def _now() -> dict[str, float]:
    """Return the time on the clock that all processes share, and the bytes that `lo` has carried until then."""
    return {"s": time.monotonic(), "lo": deltas.loopback_bytes()}
