"""How requests are traced, where the coordinator is (`tracing.py`): by FastAPI's own spans, within what a
request says that it is a part of; and which run, worker, round and fragment it is about.
"""

from typing import Any

from opentelemetry import trace
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.http.authentication import needs_a_token

# FastAPI's settings. Metrics and the log are ours; what happens within a request is too much of it.
TELEMETRY: Any = {
    "metrics": False,
    "logs": False,
    "operation_spans": False,
    "exclude": lambda scope: not needs_a_token(scope["path"]),
}

_IN_ADDRESS = {"run": "run", "worker": "worker", "number": "round", "fragment": "fragment"}


class TellTrace:
    """Middleware that says in a request's span what is in its address."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                trace.get_current_span().set_attributes(_about(scope.get("path_params", {})))
            await send(message)

        await self._app(scope, receive, send_and_tell)


def _about(values: dict[str, Any]) -> dict[str, str | int]:
    """Return the attributes; the number of a round may be a word for one."""
    told = {name: str(values[key]) for key, name in _IN_ADDRESS.items() if key in values}
    return {
        f"outerstep.{name}": int(value) if name in ("round", "fragment") and value.isdecimal() else value
        for name, value in told.items()
    }
