"""Writes the last section of docs/rest.md, the life of a worker: `python -m docs.write_life`, in the repository.

It is played on a real coordinator, and what is said is written down. A test fails while the page has anything else.
"""

import json
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from docs.vector_parts import array, contribution, hexadecimal, state, state_digest
from harness.coordinator import coordinator_thread
from protocol import wire
from protocol.digest import content_digest, digest, model_digest
from protocol.outer_step import outer_step
from protocol.versions import RESPONSE_HEADERS

PAGE = Path(__file__).parent / "rest.md"
HEADING = "## The life of a worker\n"
WIDTH = 120  # columns

INTRODUCTION = """\
One worker's way through a run of one round, from the run's creation to its leaving: every request with its answer. It
is the example of [wire-format.md](wire-format.md#6-an-example), and was played on a real coordinator by
`docs/write_life.py`. Tokens stand as `ADMIN_TOKEN`, `JOIN_TOKEN`, `WORKER_TOKEN` and `MEMBER_TOKEN`, points in time as
1767225600.0, and payloads in hexadecimal. JSON is laid out to be read, so its `Content-Length` is left out. So are
`Host`, `User-Agent`, `Accept`, `Accept-Encoding` and `Connection` of requests; `Date`, `Server`,
`X-Request-Id`, `Outerstep-Version` and `Outerstep-Protocol` of answers.
"""

SPEC = """\
name = "demo"

[model]
factory = "my_model:build"

[data]
sequence_length = 256

[inner]
batch_size = 8

[outer]
learning_rate = 0.7
momentum = 0.9

[sync]
rounds = 1
inner_steps = 1
"""

# Of the first training set in docs/vectors/training-sets.json.
DATA = {"digest": "3475be2e4d7d187e0355fa545f1e2465463fe7934ae8ee5fc048d1245524a478", "units": 10}
PAYLOAD = "application/vnd.outerstep.payload"
CASE = {"etag": "ETag", "www-authenticate": "WWW-Authenticate"}
NO_TIME = 1767225600.0
UNTOLD = {"host", "user-agent", "accept", "accept-encoding", "connection", "date", "server", "x-request-id"}
UNTOLD |= {name.lower() for name in RESPONSE_HEADERS}


class Play:
    """Sends requests, and keeps them with their answers as Markdown. `secrets` are shown by their names."""

    def __init__(self, http: httpx.Client, admin_token: str) -> None:
        self._http = http
        self.secrets = {"ADMIN_TOKEN": admin_token}
        self._text = ""

    @property
    def text(self) -> str:
        shown = self._text
        for name, secret in self.secrets.items():
            shown = shown.replace(secret, name)
        return shown

    def scene(self, title: str, text: str) -> None:
        self._text += f"\n### {title}\n\n{textwrap.fill(text, WIDTH, break_on_hyphens=False)}\n"

    def send(self, token: str, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        """One request with the token of this name; JSON unless `body` is bytes."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named["Authorization"] = f"Bearer {self.secrets[token]}"
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        answer = self._http.request(method, path, headers=named, **content)
        asked = message(f"{method} {path} HTTP/1.1", answer.request.headers, body)
        status = f"HTTP/1.1 {answer.status_code} {answer.reason_phrase}"
        replied = message(status, answer.headers, answer.content if is_bytes(answer) else timeless(answer.json()))
        self._text += f"\n{asked}\n{replied}"
        return answer

    def upload(self, path: str, payload: bytes) -> None:
        """As a member."""
        announced = content_digest(digest(payload))
        self.send("MEMBER_TOKEN", "PUT", path, payload, Content_Type=PAYLOAD, Content_Digest=announced)


def is_bytes(answer: httpx.Response) -> bool:
    return "json" not in answer.headers.get("content-type", "")


def timeless(value: Any) -> Any:
    """The same with one point in time for all: no two plays have theirs in common."""
    if isinstance(value, dict):
        return {key: NO_TIME if key.endswith("_at") and each else timeless(each) for key, each in value.items()}
    return [timeless(each) for each in value] if isinstance(value, list) else value


def message(start: str, headers: httpx.Headers, body: Any) -> str:
    """A request or an answer as it stands on the page."""
    untold = UNTOLD if headers.get("content-type") == PAYLOAD else UNTOLD | {"content-length"}
    lines = [
        start,
        *(f"{CASE.get(name, name.title())}: {value}" for name, value in headers.items() if name not in untold),
    ]
    if isinstance(body, bytes) and headers.get("content-type") == "application/toml":
        lines += ["", body.decode().rstrip("\n")]
    elif isinstance(body, bytes):
        lines += ["", *(body[at : at + 32].hex(" ") for at in range(0, len(body), 32))] if body else []
    elif body is not None:
        lines += ["", laid_out(body)]
    return "```http\n" + "\n".join(lines) + "\n```\n"


def laid_out(value: Any, indent: str = "", room: int = WIDTH) -> str:
    """JSON, on one line where that fits into `room` columns."""
    line = json.dumps(value, ensure_ascii=False)
    if len(line) <= room - len(indent) or not isinstance(value, dict | list) or not value:
        return line
    deeper = indent + "  "
    if isinstance(value, list):
        parts = [laid_out(each, deeper, room - 1) for each in value]
        return "[\n" + ",\n".join(deeper + part for part in parts) + f"\n{indent}]"
    parts = [f"{json.dumps(key)}: {laid_out(each, deeper, room - len(key) - 5)}" for key, each in value.items()]
    return "{\n" + ",\n".join(deeper + part for part in parts) + f"\n{indent}}}"


def perform(play: Play, await_state: Callable[[str, int], None]) -> None:
    """Play it from the creation of the run to its end. `await_state` waits for the coordinator's own outer step."""
    run, worker = "/v1/runs/demo", "/v1/runs/demo/workers/a"
    theta, momentum = array(1, -2, 0.5, 0, 3), np.zeros(5, np.float32)
    question: dict[str, Any] = {"state_round": None, "carried": []}

    play.scene(
        "Create the run",
        "An operator does this, with the token that the coordinator has written at its first start. A worker begins by "
        "reading the same from `GET /v1/runs/demo`: its spec says what to train, and how.",
    )
    play.send("ADMIN_TOKEN", "POST", "/v1/runs", SPEC.encode(), Content_Type="application/toml")

    play.scene(
        "Make a join token",
        "An admin does this once for all boxes. The secret is shown in this answer and nowhere else. With the scope "
        "`worker` the token is used as it is, and nothing is exchanged.",
    )
    made = play.send("ADMIN_TOKEN", "POST", "/v1/tokens", {"scope": "join", "note": "boxes", "uses": 10}).json()
    play.secrets |= {"JOIN_TOKEN": made["token"], "JOIN_TOKEN_ID": made["id"]}
    play.secrets |= {"WORKER_TOKEN": "ost_" + "w" * 43, "MEMBER_TOKEN": "ost_" + "m" * 43}

    play.scene(
        "Exchange a join token",
        "The worker has drawn the secret of its own worker token and saved it before it sends this. The same request "
        "again is answered 200 with the same message. From here on the join token is not needed.",
    )
    exchanged = play.send("JOIN_TOKEN", "POST", f"{worker}/token", {"token": play.secrets["WORKER_TOKEN"]}).json()
    play.secrets["WORKER_TOKEN_ID"] = exchanged["id"]

    play.scene(
        "Join",
        "The worker has chosen its member token, so that it may repeat this request. `lease_s` says how long it may be "
        "silent, `layout` how its tensors are cut into fragments.",
    )
    told = {"tensors": [{"name": "w", "shape": [5]}], "data": DATA, "member_token": play.secrets["MEMBER_TOKEN"]}
    play.send("WORKER_TOKEN", "PUT", worker, told)

    play.scene("Ask what to do", "It holds no state yet, and nobody else does.")
    play.send("MEMBER_TOKEN", "PUT", f"{worker}/assignment", question, Prefer="wait=30")

    play.scene("Seed state 0", "One request for each fragment: θ, then u, which is zero.")
    play.upload(f"{run}/checkpoints/0/fragments/0", state(np.concatenate([theta, momentum]), wire.CHUNK_ELEMENTS))

    play.scene(
        "Ask again",
        "Round 0 opens: one inner step, on work unit 0, once the held-out loss of state 0 has been measured.",
    )
    play.send("MEMBER_TOKEN", "PUT", f"{worker}/assignment", question | {"state_round": 0}, Prefer="wait=30")

    play.scene("Report the evaluation", "Because of `evaluate`, before the parameters change.")
    play.send("MEMBER_TOKEN", "PUT", f"{run}/rounds/0/evaluation", {"loss": 5.625, "tokens": 65536})

    play.scene("Heartbeat", "Three times per `lease_s`, whatever else goes on. All metrics may be left out.")
    metrics = {"round": 0, "inner_step": 1, "loss": 5.5, "phase": "train"}
    play.send("MEMBER_TOKEN", "PUT", f"{worker}/lease", metrics)

    play.scene("Contribute", "One request for each fragment. From the answer on it is in the delta, or will be.")
    ours = contribution(array(0.5, -0.25, 0.125, 0, -1))
    play.upload(f"{run}/rounds/0/fragments/0/contributions/a", ours)

    play.scene("Fetch the delta", "One request for each fragment. The answer waits until the round has closed.")
    delta = play.send("MEMBER_TOKEN", "GET", f"{run}/rounds/0/fragments/0/delta", Prefer="wait=30").content
    values = np.empty(5, np.float32)
    wire.Payload.from_bytes(delta).decode(values)
    outer_step(theta, momentum, values, learning_rate=0.7, beta=0.9)

    play.scene("Ask for the next round", f"The outer step has led to state 1, θ = `{hexadecimal(theta)}`.")
    report = {"round": 0, "epoch": 1, "upload_bytes": len(ours), "download_bytes": len(delta)}
    question |= {"state_round": 1, "report": report | {"seconds": {"train": 2.5, "sync": 0.25}}}
    play.send("MEMBER_TOKEN", "PUT", f"{worker}/assignment", question, Prefer="wait=30")

    play.scene("Report the last evaluation", "The run is over; this worker was asked to measure where it has arrived.")
    play.send("MEMBER_TOKEN", "PUT", f"{run}/rounds/1/evaluation", {"loss": 5.25, "tokens": 65536})
    await_state("demo", 1)

    play.scene(
        "Leave", "The coordinator compares the model digest with its own; the event `diverged` tells of another."
    )
    left = {"state_round": 1, "state_digest": model_digest([state_digest(theta, momentum)]).hex()}
    play.send("MEMBER_TOKEN", "DELETE", worker, left)

    play.scene("After the end", "The member token has ended with the lease. In the middle of a run one joins again.")
    play.send("MEMBER_TOKEN", "PUT", f"{worker}/lease", {})


def check_end(http: httpx.Client) -> None:
    """Raise ValueError unless the worker on the page has left with the run's state."""
    worker = http.get("/v1/runs/demo/workers/a").raise_for_status().json()
    if worker["divergences"]:
        raise ValueError("the worker of docs/rest.md has left with another state than the run's")


def page() -> str:
    """The whole page: what stands before the section, and the section as it was just played."""
    before = PAGE.read_text(encoding="utf-8").partition(HEADING)[0]
    with (
        tempfile.TemporaryDirectory() as directory,
        coordinator_thread(Path(directory)) as running,
        running.client() as http,
    ):
        play = Play(http, running.admin_token)
        perform(play, running.await_state)
        check_end(http)
    return before + HEADING + "\n" + INTRODUCTION + play.text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
