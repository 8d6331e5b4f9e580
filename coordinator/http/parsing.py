"""JSON as strangers send it: what is too long, too deep or too wide is refused at the first thing that is too much.

pydantic tells everything that is wrong, which of a million small objects takes gigabytes. So there is a bound on values
before the JSON is parsed, a bound on members while it is, and lists end at their first fault (`fail_fast`).
"""

import json
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError

from protocol.errors import Problem

MAX_MEMBERS = 64  # of one object: twice as many as any message has


def parse(body: bytes, message: TypeAdapter[Any], max_values: int) -> Any:
    """Return the body as a message. Raises Problem payload-too-large (too many values) and invalid-message, and
    RequestValidationError, which is answered as the latter."""
    if body.count(b",") >= max_values:
        raise Problem("payload-too-large", f"a message has at most {max_values} values here")
    try:
        found = json.loads(body, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        detail = f"the body is not JSON: {error.msg} (at character {error.pos})"
        raise Problem("invalid-message", detail) from error
    except RecursionError as error:
        raise Problem("invalid-message", "the body is not JSON of a message: it is nested too deeply") from error
    except ValueError as error:  # no UTF-8, or a number of thousands of digits
        raise Problem("invalid-message", f"the body is not JSON: {error}") from error
    try:
        return message.validate_python(found)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        raise RequestValidationError([{**fault, "loc": ("body", *fault["loc"])} for fault in faults]) from error


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(members) > MAX_MEMBERS:
        raise Problem("invalid-message", f"an object with {len(members)} members; {MAX_MEMBERS} are the most")
    return dict(members)
