"""The synchronous baseline of a run: a single worker that trains on the batches of all workers."""

import json
import math
import tomllib
from typing import Any

from outerstep.cli.errors import UsageError
from protocol.spec.run import RunSpec, parse_spec

SUFFIX = "-baseline"
# With these, the outer step adopts the worker's parameters.
ADOPTING = {"learning_rate": 1.0, "momentum": 0.0}
CODECS = {"upload_codec": "fp32", "download_codec": "fp32"}
# Keys of [sync] that only matter with several workers.
OF_SEVERAL = ("overlap", "offsets", "most_steps", "alpha", "aggregation", "fragment_layers")


def baseline_of(text: str, spec: RunSpec, workers: int) -> str:
    """Return the synchronous baseline of `spec`, as TOML: a single worker that trains on the batches of all `workers`
    in each inner step, with the same seed. Both runs see the same number of tokens, and have the same learning rate
    after each of them. `text`: the TOML that `spec` was parsed from. Raises UsageError for a run without a baseline."""
    if spec.data.private:
        raise UsageError("--baseline: with data.private, no worker has the text of all")
    document = tomllib.loads(text)
    document["name"] = spec.name + SUFFIX
    sync = {key: value for key, value in document.get("sync", {}).items() if key not in OF_SEVERAL}
    document["sync"] = sync | CODECS | {"wait": "always"}
    if "offsets" in document.get("sync", {}) or "fragment_layers" in document.get("sync", {}):
        document.get("pins", {}).pop("layout", None)  # that of other fragments
    document["inner"] = document.get("inner", {}) | {"batch_size": spec.inner.batch_size * workers}
    document["outer"] = document.get("outer", {}) | ADOPTING
    document["members"] = document.get("members", {}) | {"min_workers": 1}
    parsed = parse_spec(made := _toml(document))
    assert parsed.unit_tokens == workers * spec.unit_tokens
    assert parsed.total_inner_steps == spec.total_inner_steps
    return made


def _toml(document: dict[str, Any]) -> str:
    """Return TOML whose top level has values and sections."""
    lines = [f"{key} = {_value(value)}" for key, value in document.items() if not isinstance(value, dict)]
    for name, section in document.items():
        if isinstance(section, dict):
            lines += [f"[{name}]", *(f"{_key(key)} = {_value(value)}" for key, value in section.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    match value:
        case bool() | str():
            return json.dumps(value, ensure_ascii=False)
        case float() if not math.isfinite(value):
            return str(value)  # inf and nan
        case dict():
            return "{ " + ", ".join(f"{_key(key)} = {_value(each)}" for key, each in value.items()) + " }"
        case list():
            return "[" + ", ".join(map(_value, value)) + "]"
        case _:
            return str(value)


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)
