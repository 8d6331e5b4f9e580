"""What a codec leaves out of a contribution is in the ones after it: nothing is lost, over crashes neither."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protocol.codecs import CODECS
from protocol.wire import Payload, pack_header
from tests.worker import toy
from tests.worker.toy import Killed, MortalClient, Toy, coordinator_thread
from worker.diloco import DiLoCo

pytestmark = pytest.mark.slow

ROUNDS = 5
WITH_ERROR_FEEDBACK = [name for name, codec in CODECS.items() if codec.error_feedback]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Recorder(MortalClient):
    """`sent`: the decoded contribution of each (round, fragment)."""

    def __init__(self, *arguments: Any, sent: dict[tuple[int, int], np.ndarray], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._sent = sent

    def contribute(self, member_token, header, frames, **options):
        values = np.empty(header.elements, np.float32)
        Payload.from_bytes(b"".join([pack_header(header), *frames])).decode(values)
        self._sent[header.round, header.fragment] = values
        super().contribute(member_token, header, frames, **options)


def recorded(
    tmp_path: Path, codec: str, *, dies: tuple[str, int] | None = None, trains: int = ROUNDS
) -> tuple[dict[tuple[int, int], np.ndarray], str]:
    """One worker that learns in the first `trains` rounds only and, where it dies, is started again: what it sent, and
    the run's state digest."""
    sent: dict[tuple[int, int], np.ndarray] = {}
    client = partial(Recorder, sent=sent, dies=lambda what, number: (what, number) == dies)

    def learn(diloco: DiLoCo) -> float:
        return toy.LR if diloco.round < trains else 0.0

    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        text = toy.spec(rounds=ROUNDS, upload=codec, download="fp32", momentum=0.0)
        run = Toy(coordinator, text, tmp_path)
        if dies is not None:
            with pytest.raises(Killed):
                run.worker("a", client_class=client, state_dir=tmp_path / "a", lr=learn)
            client = partial(Recorder, sent=sent, dies=lambda what, number: False)
        run.worker("a", client_class=client, state_dir=tmp_path / "a", lr=learn)
        return sent, str(run.final().state_digest)


@pytest.mark.parametrize("codec", WITH_ERROR_FEEDBACK)
def test_what_was_left_out_is_sent_in_the_rounds_after(tmp_path: Path, codec: str) -> None:
    """The worker learns in round 0 only. What is sent from then on adds up to that round's pseudo-gradient."""
    whole, _ = recorded(tmp_path / "fp32", "fp32", trains=1)
    sent, _ = recorded(tmp_path / codec, codec, trains=1)
    for p in range(3):
        delta = whole[0, p]
        missing = [float(np.linalg.norm(delta - sum(sent[r, p] for r in range(upto + 1)))) for upto in range(ROUNDS)]
        assert missing[0] > 0.2 * float(np.linalg.norm(delta)), "the codec left out nothing, so nothing is proved"
        assert missing[-1] < (0.95 if codec == "sparse" else 0.25) * missing[0]
        assert missing == sorted(missing, reverse=True)


@pytest.fixture(scope="module", params=["ternary", "sparse"])
def undisturbed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[tuple[int, int], np.ndarray], str]:
    """Codec, what was sent, and the run's state digest."""
    return request.param, *recorded(tmp_path_factory.mktemp("undisturbed"), request.param)


@pytest.mark.system
@pytest.mark.parametrize("point", ["before upload", "after upload", "before download", "after download"])
def test_what_was_left_out_survives_a_crash(
    tmp_path: Path, undisturbed: tuple[str, dict[tuple[int, int], np.ndarray], str], point: str
) -> None:
    codec, expected, expected_digest = undisturbed
    sent, digest = recorded(tmp_path, codec, dies=(point, 2))
    assert digest == expected_digest
    assert sent.keys() == expected.keys()
    for key, values in sent.items():
        assert values.tobytes() == expected[key].tobytes()
