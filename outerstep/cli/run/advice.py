"""Notes on a run spec's settings that are outside the tested range, before the run costs days. Nothing is rejected.

The bounds were measured with a small model (docs/log.md). The notes show what to check, and how much it cost there.
"""

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from outerstep.plan import diloco_gap, is_extrapolated
from protocol.codecs import CODECS
from protocol.spec.model import ModelSpec, positions_key
from protocol.spec.run import RunSpec
from protocol.spec.sections import DataSpec

TRIAL_STEPS = 1000  # inner steps; shorter runs get no such notes
FEW_ROUNDS = 50
FEW_FOR_MOMENTUM, MUCH_MOMENTUM = 30, 0.9
SHORT_ROUND, MOMENTUM_OF_SHORT = 10, 0.6
LEAST_GAIN, LARGEST_RATE = 1.5, 2.0


def advice(spec: RunSpec) -> list[str]:
    """Return a note for each setting that is outside the tested range."""
    if spec.total_inner_steps < TRIAL_STEPS:
        return [*_end_of_text(spec)]
    return [*_rounds(spec), *_outer(spec), *_end_of_text(spec)]


def _end_of_text(spec: RunSpec) -> Iterator[str]:
    """Compare the spec's eos_token_id with the tokenizer's, if this machine has the tokenizer."""
    given = (spec.model.config or {}).get("eos_token_id")
    end = None if given is None else _known_end(spec.data)
    if end is not None and end not in (given if isinstance(given, list) else [given]):
        yield (
            f"model.config.eos_token_id = {given}, but the run's tokenizer ends documents with {end}, which exports "
            "get: leave model.config.eos_token_id out"
        )


def _known_end(data: DataSpec) -> int | None:
    """Return the id that ends a document; None if this machine has neither the tokenizer nor the token set."""
    from worker.data.tokens.index import FILE, is_token_set, read_index
    from worker.data.tokens.tokenizer import load_tokenizer
    from worker.errors import DataError

    source = Path(data.source).expanduser()
    try:
        if data.tokenizer is not None and Path(data.tokenizer).expanduser().is_dir():
            return load_tokenizer(data.tokenizer).end
        return read_index(source / FILE).end if is_token_set(source) else None
    except DataError:  # the workers will report it
        return None


def known_config(model: ModelSpec) -> dict[str, Any]:
    """Return the model's configuration, as far as this machine knows it: from the spec, a directory or the cache of the
    hub, with the number of positions that transformers adds if none is given. Empty if it is unknown."""
    given = model.config or {} if model.pretrained is None else _pretrained_config(model.pretrained, model.revision)
    if positions_key(given) is not None or "model_type" not in given:
        return given
    try:
        from transformers import CONFIG_MAPPING
    except ModuleNotFoundError:
        return given
    kind = given["model_type"]
    return {**CONFIG_MAPPING[kind]().to_dict(), **given} if kind in CONFIG_MAPPING else given


def _pretrained_config(source: str, revision: str | None) -> dict[str, Any]:
    file: Any = Path(source).expanduser() / "config.json"
    if not file.is_file():
        with suppress(ModuleNotFoundError, ValueError):  # not installed; not a repository's name
            from huggingface_hub import try_to_load_from_cache

            file = try_to_load_from_cache(source, "config.json", revision=revision)
    try:
        found = json.loads(Path(file).read_bytes()) if isinstance(file, str | Path) else None
    except (OSError, ValueError):  # the workers will report it
        return {}
    return found if isinstance(found, dict) else {}


def _rounds(spec: RunSpec) -> Iterator[str]:
    rounds, h = spec.sync.rounds, spec.sync.inner_steps
    if rounds >= FEW_ROUNDS or h <= SHORT_ROUND:
        return
    shorter = max(rounds * h // FEW_ROUNDS, 1)
    guess = " (extrapolated)" if is_extrapolated(h, rounds) or is_extrapolated(shorter, FEW_ROUNDS) else ""
    now, then = (math.expm1(diloco_gap(*each)) for each in ((h, rounds), (shorter, FEW_ROUNDS)))
    yield (
        f"sync.rounds = {rounds}: with so few rounds, DiLoCo's perplexity per byte ends about {now:.0%} above "
        f"synchronous training; the same {rounds * h:,} inner steps in at least {FEW_ROUNDS} rounds, of "
        f"sync.inner_steps = {shorter:,}, end about {then:.0%} above it{guess}"
    )
    if rounds < FEW_FOR_MOMENTUM and spec.outer.momentum >= MUCH_MOMENTUM:
        yield (
            f"outer.momentum = {spec.outer.momentum} is high for {rounds} rounds: in 20 rounds, learning rate 0.7 with "
            "momentum 0.9 ended 6% above learning rate 1.0 with momentum 0.6"
        )


def _outer(spec: RunSpec) -> Iterator[str]:
    rate, momentum, h = spec.outer.learning_rate, spec.outer.momentum, spec.sync.inner_steps
    if rate > LARGEST_RATE:
        yield f"outer.learning_rate = {rate}: 2.8 made training diverge, even without momentum"
    if h <= SHORT_ROUND and momentum > MOMENTUM_OF_SHORT:
        yield (
            f"outer.momentum = {momentum} with rounds of {h} inner steps: 0.8 ended 7% higher in rounds of 10 than "
            "in rounds of 50"
        )
    all_is_sent = CODECS[spec.sync.upload_codec].add_weight is None  # otherwise the unsent rest acts as momentum
    if h > SHORT_ROUND and spec.members.min_workers > 1 and all_is_sent and rate / (1 - momentum) < LEAST_GAIN:
        yield (
            f"outer.learning_rate = {rate} and momentum = {momentum} move only {rate / (1 - momentum):.2g} times as "
            "far as the mean of the workers: without momentum, perplexity ended 5% above momentum 0.4"
        )
