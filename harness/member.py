"""A worker without a model: it joins, seeds, contributes and steps with the numpy reference alone, over real HTTP."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from protocol.codecs import CODECS
from protocol.codecs.base import Codec
from protocol.digest import Buffer, StateHash, content_digest, digest
from protocol.errors import PROBLEM_PREFIX
from protocol.fragments import TensorSpec
from protocol.messages import Assignment, DataSummary, JoinReply, JoinRequest, UploadGrant
from protocol.outer_step import outer_step
from protocol.spec.run import RunSpec
from protocol.wire import CHUNK_ELEMENTS, ContributionHeader, Payload, StateHeader, pack_frame, pack_header
from worker.state.work import count, first_units

F32 = npt.NDArray[np.float32]
TENSORS = [TensorSpec(name="a", shape=[300, 3]), TensorSpec(name="b", shape=[77])]
DATA = DataSummary(digest="ab" * 32, units=1000)


def pack_frames(values: F32, codec: Codec, *, zstd: bool, chunk_elements: int = CHUNK_ELEMENTS) -> list[Buffer]:
    """Encode float32[n] into frames. Raises CodecError for values that the codec cannot represent."""
    frames: list[Buffer] = []
    for start in range(0, len(values), chunk_elements):
        chunk = values[start : start + chunk_elements]
        raw = np.empty(codec.size(len(chunk)), np.uint8)
        codec.encode(chunk, raw)
        frames.append(pack_frame(raw, zstd=zstd))
    return frames


def waiting(sync: str) -> str:
    """Return these lines of [sync] with `wait = "always"`, unless they set `wait`. All workers have one H then, and the
    result does not depend on their speeds."""
    return sync if "wait = " in sync else f'wait = "always"\n{sync}'


def spec_toml(
    name: str = "r", *, rounds: int = 2, inner_steps: int = 5, min_workers: int = 1, lines: str = "", **sections: str
) -> str:
    """Return a run spec. `sections`: additional TOML lines by section, for example sync='zstd = false'."""
    return f"""
name = "{name}"
[model]
preset = "tiny"
[data]
sequence_length = 16
{sections.get("data", "")}
[inner]
batch_size = 2
[sync]
rounds = {rounds}
inner_steps = {inner_steps}
fragment_elements = 512
{waiting(sections.get("sync", ""))}
[members]
min_workers = {min_workers}
{sections.get("members", "")}
[checkpoints]
{sections.get("checkpoints", "")}
[guard]
{sections.get("guard", "")}
[pins]
{sections.get("pins", "")}
"""


@dataclass
class Member:
    """A member of a run. `http`: a client of the coordinator; joining replaces its token by the member token."""

    http: httpx.Client
    run: str
    name: str
    tensors: list[TensorSpec] = field(default_factory=lambda: list(TENSORS))
    data: DataSummary | None = field(default_factory=lambda: DATA)

    def ask_to_join(self, token: str | None = None, **fields: Any) -> httpx.Response:
        """Return the response to a join request with `token` (default: the client's). `fields`: more fields of
        JoinRequest."""
        request = JoinRequest(tensors=self.tensors, data=self.data, **fields)
        headers = None if token is None else {"Authorization": f"Bearer {token}"}
        return self.http.put(self.path(), json=request.model_dump(mode="json"), headers=headers)

    def join(self, token: str, previous: str | None = None, member_token: str | None = None) -> JoinReply:
        reply = self.ask_to_join(token, previous=previous, member_token=member_token).raise_for_status()
        self.joined = JoinReply.model_validate(reply.json())
        self.http.headers["Authorization"] = f"Bearer {self.joined.member_token}"
        self.spec = RunSpec.model_validate(self.http.get(f"/v1/runs/{self.run}").raise_for_status().json()["spec"])
        elements = self.joined.layout.elements
        self.theta = [np.zeros(n, np.float32) for n in elements]
        self.momentum = [np.zeros(n, np.float32) for n in elements]
        return self.joined

    def path(self, rest: str = "") -> str:
        return f"/v1/runs/{self.run}/workers/{self.name}{rest}"

    def assignment(self, state_round: int | None, wait_s: int = 0) -> Assignment:
        reply = self.http.put(
            self.path("/assignment"), json={"state_round": state_round}, headers={"Prefer": f"wait={wait_s}"}
        )
        reply.raise_for_status()
        return Assignment.model_validate(reply.json())

    def seed(self, value: float = 0.5) -> None:
        """Upload state 0: θ all `value`, u zero."""
        for p in range(len(self.theta)):
            self.seed_fragment(p, value).raise_for_status()

    def seed_fragment(self, fragment: int, value: float) -> httpx.Response:
        theta = self.theta[fragment]
        theta[:] = value
        return self.put_state(fragment, np.concatenate([theta, self.momentum[fragment]]))

    def put_state(self, fragment: int, both: F32, chunk_elements: int = CHUNK_ELEMENTS) -> httpx.Response:
        """Upload `both` (θ, then u) as a fragment of state 0."""
        frames = pack_frames(both, CODECS["fp32"], zstd=True, chunk_elements=chunk_elements)
        return self.put_frames(fragment, len(both), frames, chunk_elements)

    def put_frames(
        self, fragment: int, elements: int, frames: Sequence[Buffer], chunk_elements: int = CHUNK_ELEMENTS
    ) -> httpx.Response:
        header = StateHeader(
            run=self.run,
            round=0,
            fragment=fragment,
            codec="fp32",
            elements=elements,
            chunk_elements=chunk_elements,
            frame_bytes=[len(frame) for frame in frames],
        )
        body = pack_header(header) + b"".join(frames)
        return self.put(f"/v1/runs/{self.run}/checkpoints/0/fragments/{fragment}", body)

    def put(self, path: str, body: bytes, **headers: str) -> httpx.Response:
        headers = {"Content-Digest": content_digest(digest(body)), **headers}
        return self.http.put(path, content=body, headers=headers)

    @property
    def unit_tokens(self) -> int:
        """The weight of a unit of its training set."""
        return (self.data and self.data.unit_tokens) or self.spec.unit_tokens

    def base(self, fragment: int) -> bytes:
        state = StateHash()
        state.update(self.theta[fragment].data, self.momentum[fragment].data)
        return state.digest()

    def payload(self, assignment: Assignment, fragment: int, values: F32, **changes: object) -> bytes:
        """Return a contribution as bytes. `changes` replace header fields."""
        codec = CODECS[str(changes.get("codec", self.spec.sync.upload_codec))]
        frames = pack_frames(values, codec, zstd=self.spec.sync.zstd)
        units = first_units(assignment.units, assignment.inner_steps)  # those beyond are for late deltas
        fields: dict[str, object] = {
            "run": self.run,
            "round": assignment.round,
            "fragment": fragment,
            "codec": codec.name,
            "elements": len(values),
            "chunk_elements": CHUNK_ELEMENTS,
            "frame_bytes": [len(frame) for frame in frames],
            "worker": self.name,
            "base": self.base(fragment),
            "tokens": count(units) * self.unit_tokens,
            "inner_steps": assignment.inner_steps,
            "loss": 1.5,
            "norm": float(np.linalg.norm(values)),
            "units": units,
            "carried": [],
            "carried_share": 1.0,
        }
        return pack_header(ContributionHeader.model_validate({**fields, **changes})) + b"".join(frames)

    def contribution_path(self, round_: int, fragment: int) -> str:
        return f"/v1/runs/{self.run}/rounds/{round_}/fragments/{fragment}/contributions/{self.name}"

    def contribute(self, assignment: Assignment, fragment: int, values: F32, **changes: object) -> httpx.Response:
        body = self.payload(assignment, fragment, values, **changes)
        return self.put(self.contribution_path(assignment.round, fragment), body)

    def report_loss(self, state: int, loss: float, redone: int = 0) -> httpx.Response:
        """Report the held-out loss of a state."""
        path = f"/v1/runs/{self.run}/rounds/{state}/evaluation?redone={redone}"
        return self.http.put(path, json={"loss": loss, "tokens": 100})

    def announcement(self, payload: bytes, **changes: object) -> dict[str, object]:
        """Return the message that announces a direct upload. `changes` replace its fields."""
        head = Payload.from_bytes(payload).offsets[0]
        fields = {
            "header": base64.b64encode(payload[:head]).decode(),
            "bytes": len(payload),
            "digest": digest(payload).hex(),
            "sha256": hashlib.sha256(payload).hexdigest(),
        }
        return {**fields, **changes}

    def grant(self, round_: int, fragment: int, announcement: dict[str, object]) -> httpx.Response:
        return self.http.post(f"{self.contribution_path(round_, fragment)}/grant", json=announcement)

    def commit(self, round_: int, fragment: int, announcement: dict[str, object]) -> httpx.Response:
        return self.http.post(f"{self.contribution_path(round_, fragment)}/commit", json=announcement)

    def contribute_directly(
        self, round_: int, fragment: int, payload: bytes, uploaded: bytes | None = None, **changes: object
    ) -> httpx.Response:
        """Announce a payload, upload it to the store (or `uploaded` in its place), and return the response to the
        commit."""
        announcement = self.announcement(payload, **changes)
        granted = UploadGrant.model_validate(self.grant(round_, fragment, announcement).raise_for_status().json())
        assert granted.url is not None, granted.reason
        content = payload if uploaded is None else uploaded
        httpx.put(granted.url, content=content, headers=granted.headers).raise_for_status()
        return self.commit(round_, fragment, announcement)

    def delta(self, round_: int, fragment: int, wait_s: int = 30) -> httpx.Response:
        path = f"/v1/runs/{self.run}/rounds/{round_}/fragments/{fragment}/delta"
        return self.http.get(path, headers={"Prefer": f"wait={wait_s}"})

    def step(self, round_: int, asks: int = 4) -> None:
        """Download the deltas of `round_` and take the outer step. An unpublished delta is asked for again, as workers
        do: `asks` times, for 2 minutes, which only turns a hang into a failure."""
        for p in range(len(self.theta)):
            replies = (self.delta(round_, p) for _ in range(asks))
            reply = next((each for each in replies if not is_unpublished(each)), None)
            assert reply is not None, f"fragment {p} of round {round_} was not published within {asks} long polls"
            self.apply(p, Payload.from_bytes(reply.raise_for_status().content))

    def apply(self, fragment: int, delta: Payload) -> None:
        """Take the outer step of a fragment."""
        theta, momentum, outer = self.theta[fragment], self.momentum[fragment], self.spec.outer
        values = np.empty(len(theta), np.float32)
        delta.decode(values)
        outer_step(theta, momentum, values, learning_rate=outer.learning_rate, beta=outer.momentum)

    def pseudo_gradients(self, round_: int) -> list[F32]:
        """Return pseudo-gradients that differ for every worker, round and fragment."""
        random = np.random.RandomState(abs(hash_of(self.name, round_)) % (1 << 32))
        return [random.standard_normal(len(theta)).astype(np.float32) * np.float32(0.01) for theta in self.theta]

    def take_part(self, round_: int, wait_s: int = 30) -> Assignment:
        """Play a round without the outer step: get an assignment and contribute every fragment."""
        assignment = self.assignment(round_, wait_s)
        assert assignment.action == "train", assignment
        self.contribute_all(assignment)
        return assignment

    def contribute_all(self, assignment: Assignment, fragments: Sequence[F32] | None = None, **changes: object) -> None:
        """Contribute every fragment: its own pseudo-gradients unless others are given. `changes` replace header
        fields."""
        for p, values in enumerate(fragments or self.pseudo_gradients(assignment.round)):
            self.contribute(assignment, p, values, **changes).raise_for_status()


def is_unpublished(reply: httpx.Response) -> bool:
    """Return whether the reply says that the delta is not published yet."""
    return reply.is_error and reply.json()["type"] == PROBLEM_PREFIX + "not-published"


def hash_of(name: str, round_: int) -> int:
    """Return a hash that is stable between processes, unlike hash()."""
    return int.from_bytes(digest(f"{name}/{round_}".encode())[:4], "big")
