"""Writes docs/rest-reference.md from the OpenAPI document of the coordinator: `python -m docs.write_rest`, in the
repository. A test fails while the page is not what this writes.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from coordinator.app import create_app
from coordinator.service import Coordinator
from protocol.spec.run import RunSpec

PAGE = Path(__file__).parent / "rest-reference.md"
REFERENCE = "#/components/schemas/"
EVERY_HEADER = "X-Request-Id"
IN_WORDS = {"path": "in the path", "query": "in the query", "header": "header"}
NAMES = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text", "null": "null"}

HEAD = """\
# REST, route by route

Every request that the coordinator answers, with what it takes and what comes back. Made by `docs/write_rest.py` from
the OpenAPI document that a running coordinator shows at `/docs` and serves as `/openapi.json`; [rest.md](rest.md) is
what it means: how requests follow each other, what a client does with a refusal, an example of all of it.

**Token** says which kind is needed ([what each allows](rest.md#tokens)): an admin's is also good where an operator's or
a worker's is needed, and *any* is a member's too. Every request may have `X-Request-Id`, which its answer has. `HEAD`
is answered wherever `GET` is.

[Problems](rest.md#problems) say what was wrong. Any request can be answered by
{everywhere};
any that needs a token also by {with_token}.
"""

MESSAGES = """\
## Messages

JSON objects. Requests refuse keys that are not here, but for those of [Metrics](#metrics); answers may gain some. What
a run's spec has, and is shown of it, is in [settings.md](settings.md#the-run-spec).
"""

Document = dict[str, Any]


def document() -> Document:
    """The OpenAPI document, which no coordinator need run for."""
    return create_app(cast(Coordinator, None)).openapi()


def page(openapi: Document) -> str:
    """The page, Markdown."""
    operations = [
        (method.upper(), path, operation)
        for path, methods in openapi["paths"].items()
        for method, operation in methods.items()
    ]
    everywhere = set.intersection(*(_problems(each) for _, _, each in operations))
    with_token = set.intersection(*(_problems(each) for _, _, each in operations if "security" in each)) - everywhere
    parts = [HEAD.format(everywhere=_listed(everywhere), with_token=_listed(with_token))]
    for group in dict.fromkeys(operation["tags"][0] for _, _, operation in operations):
        parts.append(f"## Requests: {group}\n")  # a message may have the group's name
        for method, path, operation in operations:
            if operation["tags"][0] == group:
                parts.append("\n".join(_operation(method, path, operation, everywhere | with_token)))
    parts.append(MESSAGES)
    schemas = openapi["components"]["schemas"]
    specs = {*RunSpec.model_json_schema()["$defs"], "RunSpec"}
    parts += ["\n".join(_message(name, schemas[name])) for name in sorted(set(schemas) - specs)]
    return "\n".join(parts)


def _operation(method: str, path: str, operation: Document, usual: set[str]) -> Iterator[str]:
    yield f"### {method} {path}\n"
    yield f"{operation['description']}\n"
    yield f"**Token**: {_token(operation)}\n"
    asked = [each for each in operation["parameters"] if each["name"] != EVERY_HEADER]
    if asked:
        yield "| parameter | | is | |\n| --- | --- | --- | --- |"
        for each in asked:
            where = IN_WORDS[each["in"]] + (", required" if each["required"] and each["in"] != "path" else "")
            yield f"| `{each['name']}` | {where} | {_type(each['schema'])} | {_told(each)} |"
        yield ""
    if "requestBody" in operation:
        optional = "" if operation["requestBody"].get("required") else ", optional"
        yield f"**Body**{optional}: {_content(operation['requestBody'])}\n"
    yield "| answer | | headers |\n| --- | --- | --- |"
    for status, answer in operation["responses"].items():
        if int(status) < 400:
            headers = _listed(set(answer["headers"]) - {EVERY_HEADER})
            yield f"| {status} | {_answer(answer)} | {headers} |"
    yield ""
    if problems := _problems(operation) - usual:
        yield f"**Problems**: {_listed(problems)}\n"


def _token(operation: Document) -> str:
    if "security" not in operation:
        return "none"
    (needed,) = (scopes for each in operation["security"] for scopes in each.values())
    return " or ".join(needed) or "any"


def _answer(answer: Document) -> str:
    told = answer.get("description", "").rstrip(".")
    plain = "" if told == "Successful Response" else told  # FastAPI's own words, where a route has none
    return ": ".join(part for part in (plain, _content(answer)) if part) or "no body"


def _content(holder: Document) -> str:
    """What a body is: by its message, or by its media type where it is not JSON."""
    found = []
    for media, content in holder.get("content", {}).items():
        schema = content.get("schema", {})
        is_json = media == "application/json" and schema
        found.append(_type(schema) if is_json else f"`{media}`")
    return " or ".join(found)


def _problems(operation: Document) -> set[str]:
    return {
        slug
        for status, answer in operation["responses"].items()
        if int(status) >= 400
        for slug in re.findall(r"`([a-z-]+)`:", answer["description"])
    }


def _listed(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _message(name: str, schema: Document) -> Iterator[str]:
    prose, meanings = _described(schema)
    yield f"### {_plain(name)}\n"
    if prose:
        yield f"{prose}\n"
    if "enum" in schema:
        yield f"One of {', '.join(f'`{each}`' for each in schema['enum'])}.\n"
        return
    if not schema.get("properties"):
        yield f"{_type(schema).capitalize()}.\n"
        return
    yield "| key | is | default | |\n| --- | --- | --- | --- |"
    for key, field in schema["properties"].items():
        meaning = meanings.get(key) or _told(field)
        yield f"| `{key}` | {_type(field)} | {_default(field, key in schema.get('required', []))} | {meaning} |"
    yield ""


def _described(schema: Document) -> tuple[str, dict[str, str]]:
    """The prose of a description, and what it says of keys, each on a line of its own that begins with them."""
    prose: list[str] = []
    meanings: dict[str, str] = {}
    current: list[str] = []
    for line in schema.get("description", "").splitlines():
        named = re.fullmatch(r"(\w+(?:, \w+)*) {2,}(\S.*)", line)
        if named and set(named[1].split(", ")) <= set(schema.get("properties", {})):
            current = named[1].split(", ")
            meanings |= dict.fromkeys(current, _escaped(named[2]))
        elif current and line.startswith("  "):
            meanings |= {key: f"{meanings[key]} {_escaped(line.strip())}" for key in current}
        else:
            current = []
            prose.append(line)
    return "\n".join(prose).strip(), meanings


def _default(field: Document, required: bool) -> str:
    if required:
        return "required"
    value = field.get("default")
    if value is None or value == "":
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _told(holder: Document) -> str:
    return _escaped(holder.get("description", ""))


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _plain(name: str) -> str:
    """FastAPI's names of messages that are generic, or differ as requests and as answers, in words."""
    of_a_page = re.fullmatch(r"Page_(\w+)_", name)
    return f"Page of {of_a_page[1]}" if of_a_page else name.replace("-Input", ", sent").replace("-Output", ", shown")


def _anchor(name: str) -> str:
    return re.sub(r"[^\w -]", "", _plain(name).lower()).replace(" ", "-")


def _type(schema: Document) -> str:
    """What is allowed, in words; messages as links to them."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(REFERENCE)
        page = "settings.md#the-run-spec" if name.endswith("Spec") and name != "TensorSpec" else f"#{_anchor(name)}"
        return f"[{_plain(name)}]({page})"
    if "anyOf" in schema:
        return " or ".join(_type(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "prefixItems" in schema:
        return "[" + ", ".join(_type(each) for each in schema["prefixItems"]) + "]"
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}{_size(schema, 'Items')}"
    if schema.get("type") == "object":
        values = schema.get("additionalProperties")
        return f"object of {_type(values)}" if isinstance(values, dict) else "object"
    name = NAMES.get(schema.get("type", ""), "anything")
    pattern = f" like `{_escaped(schema['pattern'])}`" if "pattern" in schema else ""
    return f"{name}{pattern}{_size(schema, 'Length')}{_bounds(schema)}"


def _size(schema: Document, of: str) -> str:
    low, high = schema.get(f"min{of}"), schema.get(f"max{of}")
    if low == high:
        return "" if low is None else f", {low:,} of them"
    bounds = (f"{low:,} or more" if low else "", f"{high:,} at most" if high is not None else "")
    return "".join(f", {bound}" for bound in bounds if bound)


def _bounds(schema: Document) -> str:
    words = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
    return "".join(f", {word} {_number(schema[key])}" for key, word in words.items() if key in schema)


def _number(value: float) -> str:
    power = int(value).bit_length() - 1
    return f"2^{power}" if value >= 1 << 20 and value == 1 << power else f"{value:,g}"


if __name__ == "__main__":
    PAGE.write_text(page(document()), encoding="utf-8")
