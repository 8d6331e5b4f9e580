"""The figures of the demo's summary, from what coordinator and workers told."""

from dataclasses import asdict

import pytest

from outerstep.demo.spec import demo_spec
from outerstep.demo.summary import replicas_identical, summarise, summary_text
from outerstep.plan import allreduce_bytes
from protocol.codecs import DownloadCodecName
from protocol.messages import RoundInfo, RunDetail, WorkerInfo
from protocol.spec.run import parse_spec
from tests.outerstep.examples import DIGEST, round_document, run_document, worker_document

FINISHED = RunDetail.model_validate(
    run_document(state="finished", round=4, held_out_loss=1.5, held_out_bits_per_byte=2.0, state_digest=DIGEST)
)
ROUNDS = [RoundInfo.model_validate(round_document(number, held_out_loss=5 - number)) for number in (3, 2, 1, 0)]


def workers(*changes: dict) -> list[WorkerInfo]:
    return [WorkerInfo.model_validate(worker_document(f"worker-{n}", **change)) for n, change in enumerate(changes)]


def test_the_json_has_exactly_the_documented_keys():
    summary = summarise(
        FINISHED, ROUNDS, workers({}, {"metrics": {"upload_bytes": 2000}}), seconds=61.234, sample="def f():\n    pass"
    )
    assert asdict(summary) == {
        "workers": 2,
        "rounds": 4,
        "seconds": 61.2,
        "first_loss": 5.0,
        "final_loss": 1.5,
        "first_bits_per_byte": None,
        "final_bits_per_byte": 2.0,
        "replicas_identical": True,
        "upload_bytes": 3000,
        "download_bytes": 3000,
        "allreduce_bytes": 160_000,  # 2 · 1/2 · 4 bytes · 1000 parameters · 40 steps
        "stage_seconds": {"train": 4.5, "sync": 0.3, "wait": 0.2, "upload": 0.15, "encode": 0.03},
        "codec": "int8",
        "sample": "def f():\n    pass",
    }


@pytest.mark.parametrize(("n", "sent"), [(1, 0), (2, 4000), (4, 6000), (8, 7000)])
def test_a_ring_all_reduce_sends_twice_the_vector_less_one_share(n: int, sent: int):
    assert allreduce_bytes(n, parameters=1000, steps=1) == sent


@pytest.mark.parametrize(
    ("change", "identical"),
    [
        ({}, True),
        ({"state_digest": "cd" * 32}, False),
        ({"state_digest": None}, False),
        ({"state_round": 3}, False),
        ({"state_round": None}, False),
    ],
)
def test_one_worker_that_differs_or_is_silent_is_told(change: dict, identical: bool):
    assert replicas_identical(FINISHED, workers({}, change, {})) is identical
    text = summary_text(summarise(FINISHED, ROUNDS, workers({}, change), seconds=1, sample=""), FINISHED, "def ")
    assert ("NOT identical" in text) is not identical
    assert (DIGEST in text) is identical


def test_a_run_without_a_digest_is_not_identical_to_anything():
    run = FINISHED.model_copy(update={"state_digest": None})
    assert not replicas_identical(run, workers({"state_digest": None}))


def test_one_worker_has_no_all_reduce_to_compare_with():
    text = summary_text(summarise(FINISHED, ROUNDS, workers({}), seconds=1, sample=""), FINISHED, "def ")
    assert "all-reduce" not in text


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
def test_the_demos_run_is_what_its_options_say(codec: DownloadCodecName):
    spec = parse_spec(demo_spec(workers=3, rounds=7, codec=codec))
    assert (spec.members.min_workers, spec.sync.rounds) == (3, 7)
    assert (spec.sync.upload_codec, spec.sync.download_codec) == (codec, codec)
