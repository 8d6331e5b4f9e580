"""The coordinator's judging of contributions, for benchmarks that train in one process."""

import statistics
from collections.abc import Mapping

from coordinator.screening.judging import CLIPPED, CLIPPED_WITH_FEEDBACK, Evidence, Judgement, judge, spread
from coordinator.screening.measuring import measure_payload
from coordinator.trust.verdicts import EARLIER_ROUNDS
from protocol.codecs import CODECS
from protocol.digest import digest
from protocol.spec.run import RunSpec
from protocol.wire import Payload


class Screening:
    """Judges contributions like the coordinator, with the references and spreads of earlier rounds by fragment."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._references: dict[int, list[float]] = {}
        self._spreads: dict[int, list[float]] = {}

    def judge(self, p: int, sent: Mapping[int, tuple[Payload, int]], late: Mapping[int, int]) -> dict[int, float]:
        """Judge the contributions to fragment p, (payload, tokens) by worker; return the factor of each weight. `late`:
        the number of missed rounds whose work is in them, by worker; default 0."""
        total, known = sum(tokens for _, tokens in sent.values()), self._references.setdefault(p, [])
        spreads = self._spreads.setdefault(p, [])
        evidence = {
            str(worker): Evidence(
                measure_payload(payload, digest(f"{payload.header.round}/{p}".encode())),
                weight=tokens / total,
                work=tokens / self._spec.unit_tokens,
                late=late.get(worker, 0),
            )
            for worker, (payload, tokens) in sent.items()
        }
        judgement: Judgement = judge(
            evidence,
            statistics.median(known[-EARLIER_ROUNDS:]) if known else None,
            rule=self._spec.sync.aggregation,
            clipped=CLIPPED_WITH_FEEDBACK if CODECS[self._spec.sync.upload_codec].error_feedback else CLIPPED,
            usual_spread=statistics.median(spreads[-EARLIER_ROUNDS:]) if spreads else None,
        )
        found = spread(each.cosine for each in judgement.verdicts.values())
        if found is not None:
            spreads.append(found)
        if judgement.reference is not None:
            known.append(judgement.reference)
        return {worker: judgement.verdicts[str(worker)].factor for worker in sent}
