"""What a contribution may count: norms and directions, of honest workers who differ and of others."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from coordinator.aggregation import measuring
from coordinator.aggregation.judging import (
    CLIPPED_OF_OTHER_DATA,
    CLIPPED_UNEQUAL,
    CLIPPED_WITH_FEEDBACK,
    LEAST_AGREEMENT,
    LEFT_OUT,
    REACH,
    SPREAD,
    Evidence,
    Judgement,
    Verdict,
    judge,
    spread,
)
from coordinator.aggregation.measuring import SKETCHED, Measure, Signs, Sketcher, measure_payload, unit
from protocol.codecs import CODECS
from protocol.compiled import COMPILED, kernels
from protocol.wire import CHUNK_ELEMENTS
from tests.coordinator.test_aggregating import contribution

F32 = npt.NDArray[np.float32]
KEY = b"of this round and fragment"
N = 4 * SKETCHED


def sketched(values: F32, key: bytes = KEY, pieces: Sequence[int] = ()) -> Measure:
    """Measure a vector that comes in pieces which end at these positions."""
    sketcher = Sketcher(len(values), key)
    for piece in np.split(values.copy(), pieces):
        sketcher.add(piece)
    return sketcher.measure()


def cosine_of(a: Measure, b: Measure) -> float:
    return float(a.direction.astype(np.float64) @ b.direction.astype(np.float64))


def honest(
    count: int, cosine: float = 0.3, n: int = N, seed: int = 0, times: Mapping[int, float] | None = None
) -> list[F32]:
    """Return vectors of norm 1, about, of which each two have this cosine, about. Some are `times` as long."""
    rng = np.random.default_rng(seed)
    common, own = math.sqrt(cosine / n), math.sqrt((1 - cosine) / n)
    direction = rng.standard_normal(n)
    found = [(common * direction + own * rng.standard_normal(n)).astype(np.float32) for _ in range(count)]
    return [each * np.float32((times or {}).get(index, 1.0)) for index, each in enumerate(found)]


def evidence_of(vectors: Sequence[F32], key: bytes = KEY, **of_the_last: Any) -> dict[str, Evidence]:
    """Return the evidence of as many workers. `of_the_last`: fields of the last one's."""
    found = {f"w{index}": Evidence(sketched(each, key), 1 / len(vectors), 1.0) for index, each in enumerate(vectors)}
    if of_the_last:
        last = f"w{len(vectors) - 1}"
        found[last] = replace(found[last], **of_the_last)
    return found


def judged(
    vectors: Sequence[F32],
    *,
    work: Sequence[float] = (),
    usual: float | None = None,
    plausible: float = math.inf,
    rule: str = "screened",
    usual_spread: float | None = None,
    key: bytes = KEY,
) -> Judgement:
    evidence = evidence_of(vectors, key)
    for worker, asked in zip(evidence, work, strict=False):
        evidence[worker] = replace(evidence[worker], work=asked)
    return judge(evidence, usual, plausible, rule=rule, usual_spread=usual_spread)


def factors(judgement: Judgement) -> list[float]:
    return [each.factor for each in judgement.verdicts.values()]


# --- measures ---------------------------------------------------------------------------------------------------------


def test_the_sketch_of_a_short_vector_is_its_direction() -> None:
    values = np.array([3.0, 0.0, -4.0], np.float32)
    of_it = sketched(values)
    assert of_it.norm == 5.0
    assert of_it.direction.tolist() == pytest.approx([0.6, 0.0, -0.8], abs=1e-3)


def test_sketches_have_the_inner_products_of_the_vectors() -> None:
    error = 0.0
    for seed in range(8):
        a, b = honest(2, cosine=0.3, seed=seed)
        found = cosine_of(sketched(a, bytes([seed])), sketched(b, bytes([seed])))
        error = max(error, abs(found - float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))))
    assert 0 < error < 4 / math.sqrt(SKETCHED)


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [[1], [SKETCHED - 1, SKETCHED + 1], [100, N - 100], range(0, N, 7777)])
@pytest.mark.parametrize("generation", [*(kernels.generations() if COMPILED else []), "numpy"])
def test_neither_the_pieces_in_which_it_comes_nor_the_cpu_matter(
    pieces: Sequence[int], generation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two aggregators on different machines shorten a contribution by the same factor, bit for bit."""
    values = honest(1, n=N + 5)[0]
    values[:100] *= np.float32(1e30)
    whole = sketched(values)
    if generation == "numpy":
        monkeypatch.setattr(measuring, "kernels", None)
    else:
        kernels.use(generation)
    in_pieces = sketched(values, pieces=pieces)
    if COMPILED:
        kernels.use(kernels.generations()[0])
    assert in_pieces.norm == whole.norm == pytest.approx(np.linalg.norm(values.astype(np.float64)))
    assert in_pieces.direction.tobytes() == whole.direction.tobytes()


@pytest.mark.covers("security:sketch-evasion")
def test_without_the_key_nobody_can_aim_at_the_sketch() -> None:
    """Two vectors that the one key folds onto each other are far apart by another."""
    (values,) = honest(1)
    signs = np.ones(N, np.float32)
    Signs(KEY).flip(signs, 0)
    moved = np.roll((values * signs).reshape(-1, SKETCHED), 1, axis=0).reshape(-1) * signs  # the same sums, elsewhere
    assert cosine_of(sketched(values), sketched(moved)) == pytest.approx(1.0, abs=1e-2)
    assert abs(cosine_of(sketched(values, b"another"), sketched(moved, b"another"))) < 0.05


@pytest.mark.parametrize("codec", list(CODECS))
@pytest.mark.parametrize("n", [5, CHUNK_ELEMENTS + 3])
def test_a_payload_is_measured_as_it_decodes(codec: str, n: int) -> None:
    values = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    payload = contribution(values, "w", codec)
    decoded = np.empty(n, np.float32)
    payload.decode(decoded)
    expected, found = sketched(decoded), measure_payload(payload, KEY)
    assert found.norm == expected.norm
    assert found.direction.tobytes() == expected.direction.tobytes()


def test_a_norm_whose_square_is_beyond_fp32_is_measured_all_the_same() -> None:
    (values,) = honest(1)
    most = values * np.float32(2.0**100 / np.abs(values).max())
    assert sketched(most).norm == pytest.approx(sketched(values).norm * 2.0**100 / np.abs(values).max())
    np.testing.assert_allclose(sketched(most).direction, sketched(values).direction, atol=1e-5)


# How workers with data of their own are judged.
OF_OTHER_DATA: dict[str, Any] = {"clipped": CLIPPED_OF_OTHER_DATA, "least_agreement": 0.0}


# --- norms ------------------------------------------------------------------------------------------------------------


def test_honest_workers_keep_all_of_their_weight() -> None:
    for seed in range(20):
        for cosine in (0.0, 0.05, 0.5, 0.95):
            assert factors(judged(honest(8, cosine, n=2000, seed=seed))) == [1.0] * 8


@pytest.mark.covers("security:giant-gradient")
@pytest.mark.parametrize("times", [100.0, 1e6])
@pytest.mark.parametrize("workers", [3, 8])
def test_what_is_far_too_long_is_left_out(times: float, workers: int) -> None:
    judgement = judged(honest(workers, times={1: times}))
    assert factors(judgement) == [1.0, 0.0] + [1.0] * (workers - 2)
    assert "more than 10 times" in judgement.verdicts["w1"].reason


@pytest.mark.covers("security:scaled-gradient")
def test_what_is_too_long_is_shortened() -> None:
    judgement = judged(honest(4, times={1: 5.0}))
    assert judgement.verdicts["w1"].factor == pytest.approx(1 / 5, rel=0.05)
    assert factors(judgement)[2:] == [1.0, 1.0]


@pytest.mark.parametrize("clipped", [CLIPPED_WITH_FEEDBACK, CLIPPED_OF_OTHER_DATA])
def test_error_feedback_and_other_data_may_lengthen_a_norm(clipped: float) -> None:
    evidence = evidence_of(honest(3, times={1: 0.95 * clipped}))
    assert factors(judge(evidence))[1] < 1
    assert factors(judge(evidence, clipped=clipped)) == [1.0, 1.0, 1.0]


@pytest.mark.covers("security:zero-gradient")
def test_zeros_are_left_out_and_do_not_count_as_the_usual() -> None:
    """And so is next to nothing."""
    four_names_of_one_token = dict.fromkeys((0, 2, 3, 5), 0.0)
    assert factors(judged(honest(6, times=four_names_of_one_token))) == [0, 1, 0, 0, 1, 0]
    judgement = judged(honest(4, times={3: 1e-3}))
    assert factors(judgement) == [1, 1, 1, 0]
    assert "less than 0.1 times" in judgement.verdicts["w3"].reason


def test_who_was_asked_for_less_or_more_work_is_judged_by_it() -> None:
    """Of a twentieth of the steps comes a twentieth of the norm, of ten times as many up to ten times as much."""
    vectors = honest(5, times={0: 0.05, 1: 10.0})
    assert factors(judged(vectors, work=[5, 1000, 100, 100, 100])) == [1.0] * 5


@pytest.mark.covers("security:scaled-gradient")
def test_a_worker_that_always_sends_too_much_never_weighs_more_than_the_others() -> None:
    """Its own history once raised its bound: one of eight that sent ten times as much had the weight of three."""
    for times in (1.6, 2.7, 9.0):
        assert judged(honest(4, times={1: times}), usual=1.0).verdicts["w1"].factor == pytest.approx(
            1 / times, rel=0.05
        )


@pytest.mark.covers("security:hoarded-work")
@pytest.mark.parametrize("late", [1, 2, 19])
def test_late_work_may_be_longer_by_half_however_many_rounds_were_missed(late: int) -> None:
    """Two rounds named as carried once allowed 3.9 times the norm, and units held for 19 rounds 36 times."""
    for norm, expected in ((1.4, 1.0), (2.0, CLIPPED_UNEQUAL / 2.0), (9.0, CLIPPED_UNEQUAL / 9.0)):
        evidence = evidence_of(honest(4, times={3: norm}), late=late)
        assert factors(judge(evidence))[3] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("late", "allowed"), [(0, 2.0), (1, 2.0 * math.sqrt(2)), (3, 4.0), (19, 4.0)])
def test_where_data_differs_late_work_may_be_as_long_as_work_with_nothing_in_common(late: int, allowed: float) -> None:
    """A worker that had been late four times in a row was shortened."""
    for norm in (0.95 * allowed, 1.05 * allowed):
        evidence = evidence_of(honest(4, 0.0, times={3: norm}), late=late)
        assert (factors(judge(evidence, **OF_OTHER_DATA))[3] == 1.0) == (norm < allowed)


def test_among_newcomers_whose_norms_are_short_the_others_may_be_as_long_as_ever() -> None:
    """As with error feedback: what a codec leaves out at first comes later."""
    vectors = honest(4, times=dict.fromkeys(range(3), 0.7))
    assert judged(vectors).verdicts["w3"].factor < 1
    assert factors(judged(vectors, usual=1.0)) == [1.0] * 4


@pytest.mark.covers("security:small-common-bias")
def test_a_majority_cannot_take_the_reference_out_of_reach_of_what_is_usual() -> None:
    vectors = [each * np.float32(1e4) for each in honest(3)] + honest(1)
    assert judged(vectors, usual=1.0).reference == REACH
    assert all(each <= LEFT_OUT for each in factors(judged(vectors, usual=1.0)))


def test_in_the_first_round_of_two_the_plausible_one_stays() -> None:
    for times in (1e6, 1e-6):
        assert factors(judged(honest(2, times={1: times}), plausible=100.0)) == [1.0, 0.0]


def test_a_worker_alone_is_shortened_to_what_is_usual_and_never_left_out() -> None:
    (alone,) = honest(1)
    judgement = judged([alone * np.float32(1e6)], usual=1.0)
    assert judgement.verdicts["w0"].factor * 1e6 == pytest.approx(judgement.reference, rel=0.05)
    assert factors(judged([alone], usual=1.0)) == [1.0]
    assert factors(judged([alone])) == [1.0]


def test_a_round_of_zeros_is_one_of_equals() -> None:
    zeros = [np.zeros(N, np.float32)] * 3
    assert factors(judged(zeros)) == [1.0] * 3
    assert judged(zeros).reference is None


# --- directions -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.covers("security:flipped-gradient")
@pytest.mark.parametrize("times", [1.0, 1.9, 3.0])
@pytest.mark.parametrize("cosine", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("hostile", [1, 2])
def test_who_opposes_the_others_is_left_out(times: float, cosine: float, hostile: int) -> None:
    judgement = judged(honest(8, cosine, times=dict.fromkeys(range(hostile), -times)))
    assert factors(judgement) == [0.0] * hostile + [1.0] * (8 - hostile)
    assert "opposes" in judgement.verdicts["w0"].reason


def test_the_cosine_of_a_verdict_is_the_median_of_those_with_each_other_one() -> None:
    vectors = honest(4, n=1000)
    with_each = sorted(
        float(vectors[0] @ each) / math.sqrt(float(vectors[0] @ vectors[0]) * float(each @ each))
        for each in vectors[1:]
    )
    assert judged(vectors).verdicts["w0"].cosine == pytest.approx(with_each[1], abs=1e-3)


def half_flipped(values: F32, share: float = 0.5) -> F32:
    """Return the values with the sign of this share of them changed, evenly spread."""
    place = np.arange(len(values)) * share
    return np.where(np.floor(place + share) > np.floor(place), -values, values).astype(np.float32)


def with_half_flipped(workers: int, hostile: int, cosine: float, share: float) -> list[F32]:
    """Return honest vectors of which the first `hostile` have this share of their signs changed."""
    vectors = honest(workers, cosine)
    for index in range(hostile):
        vectors[index] = half_flipped(vectors[index], share) * np.float32(1.2)
    return vectors


@pytest.mark.covers("security:partly-flipped-gradient")
@pytest.mark.parametrize(("workers", "hostile"), [(3, 1), (4, 1), (6, 2), (8, 3)])
@pytest.mark.parametrize("cosine", [0.4, 0.9])
@pytest.mark.parametrize("share", [0.45, 0.5])
def test_who_flips_every_second_value_is_left_out(workers: int, hostile: int, cosine: float, share: float) -> None:
    """Such a vector opposes nobody, so it once counted in full, with a higher cosine than the honest ones had where two
    colluded: it cost 0.4 nats, and no event said so."""
    vectors = with_half_flipped(workers, hostile, cosine, share)
    for round_ in range(3):
        found = factors(judged(vectors, key=b"%d" % round_))
        assert found == [0.0] * hostile + [1.0] * (workers - hostile)


@pytest.mark.covers("security:partly-flipped-gradient")
@pytest.mark.parametrize(("workers", "hostile", "at_least"), [(3, 1, 12), (4, 1, 10), (6, 2, 10), (8, 3, 12)])
def test_where_agreement_is_low_who_flips_is_left_out_now_and_then(workers: int, hostile: int, at_least: int) -> None:
    """The sketch's error is different in every round. With an agreement of 0.15 it decides, and never against an honest
    worker: of 24 rounds, three who collude are left out in about half."""
    vectors = with_half_flipped(workers, hostile, 0.15, 0.45)
    found = [factors(judged(vectors, key=b"%d" % round_)) for round_ in range(12)]
    assert all(each[hostile:] == [1.0] * (workers - hostile) for each in found)
    assert sum(each[:hostile].count(0.0) for each in found) >= at_least


@pytest.mark.covers("security:partly-flipped-gradient")
def test_noise_is_left_out_where_the_others_agree() -> None:
    vectors = honest(5)
    vectors[2] = np.random.default_rng(9).standard_normal(N).astype(np.float32) / math.sqrt(N)
    assert factors(judged(vectors)) == [1.0, 1.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("seed", range(8))
def test_where_all_agree_little_nobody_is_left_out_for_agreeing_less(seed: int) -> None:
    """As late in training: one of the demo's four honest workers had 0.02, the others 0.10 and 0.18. Whether it was left
    out depended on the sketch's error, and so did the digest of the run."""
    vectors = honest(4, 0.1, seed=seed)
    (noise,), rng = honest(1, 0.0, seed=seed + 100), np.random.default_rng(seed)
    vectors[0] = (math.sqrt(0.004 / N) * rng.standard_normal(N) + math.sqrt(0.996) * noise).astype(np.float32)
    verdicts = judged(vectors).verdicts
    assert verdicts["w0"].cosine == pytest.approx(0.02, abs=0.02)
    assert [each.factor for each in verdicts.values()] == [1.0] * 4
    vectors[0] = -vectors[1]
    assert judged(vectors).verdicts["w0"].factor == 0, "what opposes the others is left out"


def with_a_noisy_row(count: int, cosine: float, rng: np.random.Generator) -> list[F32]:
    """Return honest vectors with half of their noise in one row of 24 values, as those of an embedding have it."""
    vectors = honest(count, cosine, seed=int(rng.integers(1 << 32)))
    for vector in vectors:
        vector[:24] += (math.sqrt(0.5 / 24) * rng.standard_normal(24)).astype(np.float32)
    return vectors


@pytest.mark.slow
@pytest.mark.parametrize("workers", [4, 8])
def test_where_honest_agreements_differ_nobody_is_left_out_for_that(workers: int) -> None:
    """Late in training, one of eight honest workers was left out in every tenth round of a fragment with an embedding."""
    rng = np.random.default_rng(workers)
    spreads, strays = list[float](), 0
    for _ in range(64):
        vectors = with_a_noisy_row(workers, 0.15, rng)
        judgement = judged(vectors, usual_spread=statistics.median(spreads[-16:]) if spreads else None)
        assert factors(judgement) == [1.0] * workers
        agreements = sorted(each.cosine or 0.0 for each in judgement.verdicts.values())
        usual = agreements[workers // 2]
        strays += agreements[0] < min(LEAST_AGREEMENT * usual, usual - SPREAD)
        spreads.append(spread(agreements) or 0.0)
    assert strays >= 3, "which would be left out if the spread were not known"
    vectors[0] = -vectors[0]
    assert factors(judged(vectors, usual_spread=statistics.median(spreads))) == [0.0] + [1.0] * (workers - 1)


def test_nobody_is_left_out_for_less_than_opposition_where_noise_cannot_be_told_from_honest_work() -> None:
    """One of eight honest workers had -0.045 where 0.217 was usual, more than `FARTHEST` below it."""
    vectors, (shared,), (own,) = honest(8, 0.217), honest(1, 1.0), honest(1, 0.0, seed=9)
    vectors[0] = 0.99 * own - np.float32(0.045 / math.sqrt(0.217)) * shared
    verdicts = judged(vectors, usual_spread=0.015).verdicts
    assert verdicts["w0"].cosine == pytest.approx(-0.045, abs=0.01)
    assert [each.factor for each in verdicts.values()] == [1.0] * 8
    assert judged(vectors, usual_spread=0.005).verdicts["w0"].factor == 0, "where it is known to be an outlier"
    vectors[0] = 0.9 * own - np.float32(0.2 / math.sqrt(0.217)) * shared
    assert judged(vectors, usual_spread=0.015).verdicts["w0"].factor == 0, "which opposes them"


@pytest.mark.covers("security:partly-flipped-gradient")
def test_noise_is_left_out_where_honest_agreements_are_small_and_equal() -> None:
    vectors = honest(8, 0.08)
    vectors[2] = honest(1, 0.0, seed=9)[0]
    assert factors(judged(vectors)) == [1.0] * 8, "it is not known that they are always equal"
    assert factors(judged(vectors, usual_spread=0.003)) == [1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_a_minority_cannot_widen_the_spread() -> None:
    own = [0.15, 0.152, 0.149, 0.151, 0.15]
    assert spread(own) == pytest.approx(0.001)
    assert spread([*own, -1.0, 0.9, 0.9]) == pytest.approx(0.002)
    assert spread(own[:3]) is None


def test_less_agreement_is_asked_of_less_work_and_none_of_workers_with_data_of_their_own() -> None:
    vectors = honest(4, 0.4)
    stranger = 0.2 * vectors[0] + honest(1, seed=7)[0]  # agrees with the others, a fifth as much as they do
    evidence = evidence_of([*vectors[1:], stranger])
    evidence = {worker: replace(each, work=100.0) for worker, each in evidence.items()}
    assert factors(judge(evidence)) == [1.0, 1.0, 1.0, 0.0]
    assert factors(judge(evidence, least_agreement=0.0)) == [1.0] * 4
    evidence["w3"] = replace(evidence["w3"], work=10.0)
    assert factors(judge(evidence)) == [1.0] * 4


def test_late_work_may_hide_the_agreement_of_its_own_round() -> None:
    """One that had missed two short rounds was left out: of its length only a part was of its own round."""
    *others, own = honest(4, 0.4)
    vectors = [*others, own + 6 * honest(1, seed=5)[0]]
    assert factors(judge(evidence_of(vectors))) == [1.0, 1.0, 1.0, 0.0]
    assert 0 < factors(judge(evidence_of(vectors, late=2)))[3] < 1
    vectors = [*others, half_flipped(others[0]) * np.float32(4)]
    assert factors(judge(evidence_of(vectors, late=2)))[3] == 0.0


def test_where_data_differs_late_work_opposes_the_work_in_the_means_that_it_missed() -> None:
    """One that had missed three rounds of two workers was left out: they repeated their data in the next round."""
    own, a, b, c = honest(4, 0.0)
    late = own - (a + b) * np.float32(0.5)
    others = [a, b, a + c * np.float32(0.3)]
    for vector, missed, expected in ((late, 0.0, 0.0), (late, 0.5, 1.0), (-a, 0.5, 0.0)):
        evidence = evidence_of([*others, vector], late=1, missed=missed)
        assert factors(judge(evidence, **OF_OTHER_DATA)) == [1.0, 1.0, 1.0, expected]


def test_where_directions_have_nothing_in_common_late_work_opposes_what_others_still_send_of_the_missed_round() -> None:
    """Codecs had left it out: a cosine of -0.18, and the late one was left out."""
    *missed, late = honest(4, 0.0)
    others = [own + each for own, each in zip(honest(3, 0.0, seed=1), missed, strict=True)]
    late -= sum(missed) / np.float32(3)
    for share, expected in ((1 / 3, 1.0), (0.0, 0.0)):
        evidence = evidence_of([*others, late], late=1, missed=share, all_late=True)
        assert factors(judge(evidence)) == [1.0, 1.0, 1.0, expected]
    alike = evidence_of([*honest(3), -honest(4)[3]], late=1, missed=1.0, all_late=True)
    assert factors(judge(alike)) == [1.0, 1.0, 1.0, 0.0], "where they have, it may not"


def test_the_little_that_remains_of_late_work_is_no_measure_of_the_others() -> None:
    """Two of three were late and had a fifth of the usual norm: the third was shortened to theirs."""
    a, b, own = honest(3, 0.0)
    evidence = evidence_of([a * np.float32(0.2), b * np.float32(0.2), own])
    usual = evidence["w2"].measure.norm
    assert factors(judge(evidence, usual, **OF_OTHER_DATA))[2] < 1
    evidence |= {worker: replace(evidence[worker], late=1) for worker in ("w0", "w1")}
    assert factors(judge(evidence, usual, **OF_OTHER_DATA)) == [1.0] * 3
    evidence["w2"] = replace(evidence["w2"], measure=sketched(own * np.float32(5)))
    assert judge(evidence, usual, **OF_OTHER_DATA).reference == pytest.approx(usual), "no higher than usual"


def test_a_round_in_which_nobody_was_in_time_says_nothing_of_what_is_usual() -> None:
    """Two boxes: one's late work alone made a delta, with half of the usual norm, and the other's next work was shortened."""
    vectors = [each * np.float32(0.47) for each in honest(1)]
    judgement = judge(evidence_of(vectors, late=1, all_late=True), 1.0)
    assert judgement.reference is None
    assert factors(judgement) == [1.0]
    assert judge(evidence_of(vectors), 1.0).reference == pytest.approx(0.47, rel=0.05)


def test_work_that_is_in_time_is_not_too_short_beside_the_late_work_of_three_rounds() -> None:
    """Of two boxes; after a reference of 1.13, one sent 0.19 in time, the other 1.89."""
    evidence = evidence_of(
        [each * np.float32(norm) for each, norm in zip(honest(2), (0.187, 1.89), strict=True)], late=3
    )
    assert factors(judge(evidence, 1.13, clipped=1.5)) == [1.0, 1.0]
    assert factors(judge({**evidence, "w1": replace(evidence["w1"], late=0)}, 1.13, clipped=1.5)) == [0.0, 1.0]


def test_nobody_is_compared_with_late_work() -> None:
    """Two that had missed the same round came less its mean, which was the third one's: they agreed that it opposed them."""
    in_time, *late = honest(3, 0.05)
    evidence = evidence_of([in_time, *(each - in_time for each in late)])
    assert factors(judge(evidence))[0] == 0.0
    evidence |= {worker: replace(evidence[worker], late=1) for worker in ("w1", "w2")}
    assert all(each > 0 for each in factors(judge(evidence)))


@pytest.mark.covers("security:flipped-gradient")
def test_of_two_that_oppose_each_other_both_stay() -> None:
    (one,) = honest(1)
    assert factors(judged([one, -one])) == [1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [3, 4, 20])
def test_noise_that_drowns_all_directions_leaves_nobody_out(workers: int) -> None:
    """Cosines are chance alone."""
    rng = np.random.default_rng(0)
    for _ in range(2000):
        directions = rng.standard_normal((workers, 512), np.float32)
        evidence = {f"w{i}": Evidence(Measure(1.0, unit(each)), 1.0, 1.0) for i, each in enumerate(directions)}
        assert factors(judge(evidence)) == [1.0] * workers


def test_a_majority_always_stays() -> None:
    a, b, c, d, e = honest(5)
    assert sum(each > 0 for each in factors(judged([a, -b, c, -d, e]))) == 3
    assert sum(each > 0 for each in factors(judged([a, -b, -c, -d, e]))) == 3


@pytest.mark.covers("security:copied-contribution")
def test_what_another_one_has_sent_counts_once() -> None:
    a, b, c = honest(3)
    judgement = judged([a, b, a, c, a * np.float32(1.00001)])
    assert [each > 0 for each in factors(judgement)] == [True, True, False, True, False]
    assert judgement.verdicts["w2"].reason.startswith("it repeats the contribution of w0")
    assert judgement.reference == judged([a, b, c]).reference, "the others are judged as if it were not there"
    assert all(each > 0 for each in factors(judged([a, a * np.float32(1.01), a + b * np.float32(0.05)])))


def test_late_work_of_which_nothing_is_left_counts() -> None:
    """It comes less the delta of its round: a worker that had done just what the others did sent zeros, and was left out
    as lazy. Work of its own round it has to bring."""
    evidence, nothing = evidence_of(honest(3)), Measure(0.0, sketched(honest(3)[2]).direction)
    for all_late, expected in ((True, 1.0), (False, 0.0)):
        evidence["w2"] = replace(evidence["w2"], measure=nothing, late=1, all_late=all_late)
        assert factors(judge(evidence)) == [1.0, 1.0, expected]


def test_two_of_whose_late_work_nothing_is_left_are_compared() -> None:
    """Their norms are both 0, and the one was divided by the other: the fragment could never be aggregated."""
    evidence = evidence_of([*honest(3), honest(3)[2]])
    for worker in ("w2", "w3"):
        nothing = Measure(0.0, evidence[worker].measure.direction)
        evidence[worker] = replace(evidence[worker], measure=nothing, late=1, all_late=True)
    assert factors(judge(evidence)) == [1.0, 1.0, 1.0, 0.0]


def test_of_few_values_nobody_can_tell_who_has_copied() -> None:
    one = np.zeros(N, np.float32)
    one[7] = 1.0
    assert factors(judged([one, one, one])) == [1.0, 1.0, 1.0]


def test_only_where_directions_are_looked_at_are_copies() -> None:
    (a,) = honest(1)
    assert all(each > 0 for each in factors(judged([a, a, a], rule="clipped")))


def test_nobody_judges_nobody() -> None:
    assert judge({}) == Judgement(None, {})
    zeros, (one,) = np.zeros(N, np.float32), honest(1)
    assert judged([zeros, one]).verdicts["w0"] == Verdict(0.0, judged([zeros, one]).verdicts["w0"].reason, 0.0)
