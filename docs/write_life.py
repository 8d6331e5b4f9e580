"""Write the last section of docs/rest.md, the life of a worker: run `python -m docs.write_life` in the repository.

The section is recorded from a real coordinator. A test fails while the page has anything else.
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
One worker in a run of one round, from the run's creation to its leaving: each request with its answer below it. The
values are those of the example in [wire-format.md](wire-format.md#6-an-example). `docs/write_life.py` recorded it from
a real coordinator. Tokens are shown by their names, points in time as 1767225600.0, and payloads in hexadecimal. Left
out are headers that HTTP libraries add, those of [every answer](#the-rest-interface), and `Content-Type` and
`Content-Length` of JSON, which is formatted for reading.
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

# The first training set in docs/vectors/training-sets.json.
DATA = {"digest": "3475be2e4d7d187e0355fa545f1e2465463fe7934ae8ee5fc048d1245524a478", "units": 10}
PAYLOAD = "application/vnd.outerstep.payload"
CASE = {"etag": "ETag", "www-authenticate": "WWW-Authenticate"}
NO_TIME = 1767225600.0
UNTOLD = {"host", "user-agent", "accept", "accept-encoding", "connection", "date", "server", "x-request-id"}
UNTOLD |= {"x-content-type-options"} | {name.lower() for name in RESPONSE_HEADERS}
UNTOLD_VALUES = {("cache-control", "private, no-store"), ("content-type", "application/json")}


class Play:
    """Sends requests and records them with their answers as Markdown. `secrets` are shown by their names."""

    def __init__(self, http: httpx.Client, secrets: dict[str, str]) -> None:
        self._http = http
        self.secrets = secrets
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
        """Send one request with the token of this name, as JSON unless `body` is bytes."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named["Authorization"] = f"Bearer {self.secrets[token]}"
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        answer = self._http.request(method, path, headers=named, **content)
        asked = message(f"{method} {path} HTTP/1.1", answer.request.headers, body)
        status = f"HTTP/1.1 {answer.status_code} {answer.reason_phrase}"
        replied = message(status, answer.headers, answer.content if is_bytes(answer) else timeless(answer.json()))
        self._text += f"\n```http\n{asked}\n{replied}```\n"
        return answer

    def upload(self, path: str, payload: bytes) -> None:
        """Upload `payload` with the member token."""
        announced = content_digest(digest(payload))
        self.send("MEMBER_TOKEN", "PUT", path, payload, Content_Type=PAYLOAD, Content_Digest=announced)


def is_bytes(answer: httpx.Response) -> bool:
    return "json" not in answer.headers.get("content-type", "")


def timeless(value: Any) -> Any:
    """Return `value` with every time replaced by the same one, so that two recordings are equal, and without specs."""
    if isinstance(value, dict):
        times = {key: NO_TIME for key, each in value.items() if key.endswith("_at") and each}
        specs = {key: "…" for key in value if key == "spec"}
        return {key: timeless(each) for key, each in value.items()} | times | specs
    return [timeless(each) for each in value] if isinstance(value, list) else value


def message(start: str, headers: httpx.Headers, body: Any) -> str:
    """Return a request or an answer as the page shows it."""
    untold = UNTOLD if headers.get("content-type") == PAYLOAD else UNTOLD | {"content-length"}
    lines = [
        start,
        *(
            f"{CASE.get(name, name.title())}: {value}"
            for name, value in headers.items()
            if name not in untold and (name, value) not in UNTOLD_VALUES
        ),
    ]
    if isinstance(body, bytes) and headers.get("content-type") == "application/toml":
        lines += ["", body.decode().rstrip("\n")]
    elif isinstance(body, bytes):
        lines += ["", *(body[at : at + 40].hex(" ") for at in range(0, len(body), 40))] if body else []
    elif body is not None:
        lines += ["", laid_out(body)]
    return "\n".join(lines) + "\n"


def laid_out(value: Any, indent: str = "", room: int = WIDTH) -> str:
    """Return `value` as JSON, with as many members on a line as fit into `room` columns."""
    line = json.dumps(value, ensure_ascii=False)
    if len(line) <= room - len(indent) or not isinstance(value, dict | list) or not value:
        return line
    deeper = indent + "  "
    if isinstance(value, list):
        opening, closing = "[", "]"
        parts = [laid_out(each, deeper, room - 1) for each in value]
    else:
        opening, closing = "{", "}"
        parts = [f"{json.dumps(key)}: {laid_out(each, deeper, room - len(key) - 5)}" for key, each in value.items()]
    lines = parts[:1]
    for part in parts[1:]:
        longer = f"{lines[-1]}, {part}"
        if "\n" not in longer and len(deeper) + len(longer) < room:
            lines[-1] = longer
        else:
            lines.append(part)
    return f"{opening}\n" + ",\n".join(deeper + each for each in lines) + f"\n{indent}{closing}"


def perform(play: Play, await_state: Callable[[str, int], None]) -> None:
    """Send all requests of the section. `await_state` waits for the coordinator's own outer step."""
    run, worker = "/v1/runs/demo", "/v1/runs/demo/workers/a"
    theta, momentum = array(1, -2, 0.5, 0, 3), np.zeros(5, np.float32)
    question: dict[str, Any] = {"state_round": None, "carried": []}

    play.scene(
        "Create the run",
        "An admin does this, with the token that the coordinator wrote at its first start. A worker starts by reading "
        "the same from `GET /v1/runs/demo`. Its `spec`, left out here, says what to train and how: it has all sections "
        "of [the run spec](settings.md#the-run-spec), with all defaults.",
    )
    play.send("ADMIN_TOKEN", "POST", "/v1/runs", SPEC.encode(), Content_Type="application/toml")

    play.secrets |= {"WORKER_TOKEN": "ost_" + "w" * 43, "MEMBER_TOKEN": "ost_" + "m" * 43}
    play.scene(
        "Exchange a join token",
        "An admin has made the join token, for all boxes. The worker has drawn the secret of its own worker token and "
        "saved it. The same request again is answered 200 with the same message.",
    )
    exchanged = play.send("JOIN_TOKEN", "POST", f"{worker}/token", {"token": play.secrets["WORKER_TOKEN"]}).json()
    play.secrets["WORKER_TOKEN_ID"] = exchanged["id"]

    play.scene(
        "Join",
        "The worker has chosen its member token, so that it can repeat this request. `lease_s` is how long it may be "
        "silent; `layout` is how its tensors are cut into fragments.",
    )
    told = {"tensors": [{"name": "w", "shape": [5]}], "data": DATA, "member_token": play.secrets["MEMBER_TOKEN"]}
    play.send("WORKER_TOKEN", "PUT", worker, told)

    play.scene("Ask what to do", "The worker holds no state yet, and no other worker does.")
    play.send("MEMBER_TOKEN", "PUT", f"{worker}/assignment", question, Prefer="wait=30")

    play.scene("Seed state 0", "One request for each fragment: θ, then u, which is zero.")
    play.upload(f"{run}/checkpoints/0/fragments/0", state(np.concatenate([theta, momentum]), wire.CHUNK_ELEMENTS))

    play.scene(
        "Ask again",
        "Round 0 opens: one inner step, on work unit 0, after the held-out loss of state 0 has been measured.",
    )
    play.send("MEMBER_TOKEN", "PUT", f"{worker}/assignment", question | {"state_round": 0}, Prefer="wait=30")

    play.scene(
        "Report the evaluation", "The assignment had `evaluate`. The loss is measured before the parameters change."
    )
    play.send("MEMBER_TOKEN", "PUT", f"{run}/rounds/0/evaluation", {"loss": 5.625, "tokens": 65536})

    play.scene("Heartbeat", "Three times per `lease_s`, whatever else the worker does. All metrics are optional.")
    metrics = {"round": 0, "inner_step": 1, "loss": 5.5, "phase": "train"}
    play.send("MEMBER_TOKEN", "PUT", f"{worker}/lease", metrics)

    play.scene(
        "Contribute",
        "One request for each fragment. Once it is answered, the contribution is in the delta, or will be.",
    )
    ours = contribution(array(0.5, -0.25, 0.125, 0, -1))
    play.upload(f"{run}/rounds/0/fragments/0/contributions/a", ours)

    play.scene("Fetch the delta", "One request for each fragment. The answer waits until the round has closed.")
    delta = play.send("MEMBER_TOKEN", "GET", f"{run}/rounds/0/fragments/0/delta", Prefer="wait=30").content
    values = np.empty(5, np.float32)
    wire.Payload.from_bytes(delta).decode(values)
    outer_step(theta, momentum, values, learning_rate=0.7, beta=0.9)

    play.scene(
        "Ask for the next round",
        f"The outer step has produced state 1, θ = `{hexadecimal(theta)}`. The answer has `evaluate`: the worker "
        "reports the loss of this state as above (left out here) and leaves.",
    )
    report = {"round": 0, "epoch": 1, "upload_bytes": len(ours), "download_bytes": len(delta)}
    question |= {"state_round": 1, "report": report | {"seconds": {"train": 2.5, "sync": 0.25}}}
    play.send("MEMBER_TOKEN", "PUT", f"{worker}/assignment", question, Prefer="wait=30")
    await_state("demo", 1)

    play.scene(
        "Leave", "The coordinator compares the model digest with its own; a different one is the event `diverged`."
    )
    left = {"state_round": 1, "state_digest": model_digest([state_digest(theta, momentum)]).hex()}
    play.send("MEMBER_TOKEN", "DELETE", worker, left)

    play.scene(
        "After the end",
        "The member token has ended with the lease. In the middle of a run the worker would join again.",
    )
    play.send("MEMBER_TOKEN", "PUT", f"{worker}/lease", {})


def check_end(http: httpx.Client) -> None:
    """Raise ValueError unless the worker on the page left with the run's state."""
    worker = http.get("/v1/runs/demo/workers/a").raise_for_status().json()
    if worker["divergences"]:
        raise ValueError("the worker of docs/rest.md has left with another state than the run's")


def page() -> str:
    """Return the whole page: the text before the section, and the section as recorded now."""
    before = PAGE.read_text(encoding="utf-8").partition(HEADING)[0]
    with (
        tempfile.TemporaryDirectory() as directory,
        coordinator_thread(Path(directory)) as running,
        running.client() as http,
    ):
        join = http.post("/v1/tokens", json={"scope": "join", "note": "boxes", "uses": 10}).raise_for_status().json()
        secrets = {"ADMIN_TOKEN": running.admin_token, "JOIN_TOKEN": join["token"], "JOIN_TOKEN_ID": join["id"]}
        play = Play(http, secrets)
        perform(play, running.await_state)
        check_end(http)
    return before + HEADING + "\n" + INTRODUCTION + play.text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
