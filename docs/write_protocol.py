"""Write docs/protocol.json, the record of the last released protocol: run `python -m docs.write_protocol` in the
repository when you make a release (docs/releasing.md).

tests/protocol/test_protocol.py compares the record with the code: as soon as one of the changes that `breaks` lists is
in the code, `PROTOCOL_VERSION` must be larger than the recorded number. Between two releases the file stays as it is.

    version, protocol   the release
    messages            the keys of each JSON message, payload header and section of the run spec; under "…", what a
                        reader does with other keys. A key is "needed", "optional" or "unsent" (left out of requests
                        that do not use it); then come a digest of its type and limits, and its possible words
    words               the members of each enumeration
    codecs              a digest of a chunk encoded by each codec
    problems            the status of each problem
    requests            the method and path of each request

Descriptions, defaults and the arithmetic of a round are not in the record.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from coordinator.api.app import create_app
from coordinator.service import Coordinator
from protocol import PROTOCOL_VERSION, __version__, messages, wire
from protocol.codecs import REFERENCE
from protocol.errors import PROBLEMS
from protocol.spec.run import RunSpec

FILE = Path(__file__).parent / "protocol.json"
CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"
UNKNOWN_KEYS = "…"
MAY_GAIN_WORDS = frozenset({"Directive"})  # clients treat an unknown word as `continue`
FOR_PEOPLE = frozenset({"title", "description", "default", "examples"})  # of a schema

Record = dict[str, Any]


# --- what the code says -----------------------------------------------------------------------------------------------


def spoken() -> Record:
    """Return the record of the code's protocol, without `version` and `protocol`."""
    models: list[tuple[type[BaseModel], Literal["validation"]]] = [(model, "validation") for model in _models()]
    definitions = dict(sorted(models_json_schema(models)[1]["$defs"].items()))
    classes = {model.__name__: model for model, _ in models}
    return {
        "messages": {
            name: _keys(schema, classes.get(name)) for name, schema in definitions.items() if "properties" in schema
        },
        "words": {name: schema["enum"] for name, schema in definitions.items() if "enum" in schema},
        "codecs": {name: _digest_of_a_chunk(name) for name in REFERENCE},
        "problems": {slug: problem.status for slug, problem in sorted(PROBLEMS.items())},
        "requests": sorted(f"{method.upper()} {path}" for path, item in openapi()["paths"].items() for method in item),
    }


def openapi() -> Record:
    """Return the coordinator's OpenAPI document, without running a coordinator."""
    return create_app(cast(Coordinator, None)).openapi()


def _models() -> Iterator[type[BaseModel]]:
    """Yield every message, header and run spec; models that they refer to are found by pydantic."""
    for found in vars(messages).values():
        is_message = isinstance(found, type) and issubclass(found, BaseModel)
        if is_message and found is not messages.Page:
            yield found
    yield from (messages.Page[messages.Event], wire.ContributionHeader, wire.DeltaHeader, wire.StateHeader, RunSpec)


def _keys(schema: Record, model: type[BaseModel] | None) -> dict[str, str]:
    needed, fields = schema.get("required", []), {} if model is None else model.model_fields
    keys = {UNKNOWN_KEYS: "refused" if schema.get("additionalProperties") is False else "ignored"}
    for key, described in schema["properties"].items():
        unsent = key in fields and fields[key].exclude_if is not None
        words: set[str] = set()
        shape = json.dumps(_without_words(described, words), sort_keys=True)
        presence = "unsent" if unsent else "needed" if key in needed else "optional"
        keys[key] = " ".join([presence, hashlib.blake2b(shape.encode(), digest_size=4).hexdigest(), *sorted(words)])
    return keys


def _without_words(schema: Any, words: set[str]) -> Any:
    """Return a schema without titles and descriptions and without its words, which are added to `words`."""
    if isinstance(schema, list):
        return [_without_words(each, words) for each in schema]
    if not isinstance(schema, dict):
        return schema
    words.update(str(word) for word in [*schema.get("enum", []), *([schema["const"]] if "const" in schema else [])])
    kept = {key: value for key, value in schema.items() if key not in FOR_PEOPLE | {"enum", "const"}}
    return {key: _without_words(value, words) for key, value in kept.items()}


def _digest_of_a_chunk(codec: str) -> str:
    n = 5000  # more than a block of any codec
    values = ((np.arange(n) * 7919 % 2001 - 1000) / 64).astype(np.float32)
    out = np.empty(REFERENCE[codec].size(n), np.uint8)
    REFERENCE[codec].encode(values, out)
    return hashlib.blake2b(out.tobytes(), digest_size=4).hexdigest()


# --- what needs another number ----------------------------------------------------------------------------------------


def breaks(released: Record, now: Record) -> list[str]:
    """Return the changes after which two sides may misunderstand each other, as docs/releasing.md lists them."""
    found = list(_gone_or_changed("codec", released["codecs"], now["codecs"]))
    found += _gone_or_changed("problem", released["problems"], now["problems"])
    found += [f"request {each} is gone" for each in released["requests"] if each not in now["requests"]]
    for name, words in released["words"].items():
        if (said := now["words"].get(name)) is None:
            found.append(f"{name} is gone")
        elif set(words) - set(said) or (set(said) - set(words) and name not in MAY_GAIN_WORDS):
            found.append(f"{name} has other words: {', '.join(sorted(set(words) ^ set(said)))}")
    for name, keys in released["messages"].items():
        if name not in now["messages"]:
            found.append(f"{name} is gone")
        else:
            found += (f"{name}.{change}" for change in _changed_keys(keys, now["messages"][name]))
    return found


def _gone_or_changed(what: str, released: Record, now: Record) -> Iterator[str]:
    for name, before in released.items():
        if name not in now:
            yield f"{what} {name} is gone"
        elif now[name] != before:
            yield f"{what} {name} has changed"


def _changed_keys(released: dict[str, str], now: dict[str, str]) -> Iterator[str]:
    refuses = released[UNKNOWN_KEYS] == "refused"
    for key in released.keys() | now.keys():
        if key not in now:
            yield f"{key} is gone"
        elif key not in released:
            if not now[key].startswith("unsent" if refuses else "optional"):
                yield f"{key} is new"
        else:
            (*shape, words), (*shape_now, words_now) = _parts(released[key]), _parts(now[key])
            gains = (
                words_now > words and refuses
            )  # a message that is asked, or a spec: the older side refuses it by name
            if shape != shape_now or (words != words_now and not gains):
                yield f"{key} has changed"


def _parts(key: str) -> tuple[str, str, set[str]]:
    presence, _, rest = key.partition(" ")
    shape, *words = rest.split(" ")
    return presence, shape, set(words)


# --- the file ---------------------------------------------------------------------------------------------------------


def released_version() -> str | None:
    """Return the newest version that CHANGELOG.md dates; None before the first release."""
    dated = re.search(r"^## \[([0-9][^\]]*)\] – \d{4}-\d\d-\d\d$", CHANGELOG.read_text(encoding="utf-8"), re.MULTILINE)
    return dated and dated[1]


def text() -> str:
    """Return the file's text for a release of the code as it is, one key or word to a line."""
    record = {"version": __version__, "protocol": PROTOCOL_VERSION, **spoken()}
    return json.dumps(record, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    if released_version() != __version__:
        raise SystemExit(
            f"{__version__} is not released: CHANGELOG.md gives it no date, and only releases are recorded"
        )
    FILE.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
