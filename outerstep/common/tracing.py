"""OpenTelemetry traces, if its environment variables ask for them. Exporting needs the extra `otel`.

Everything that coordinator and workers do in one round of a run is one trace. Its id is derived from the run and the
round, so each process creates its own spans, and requests carry the context (W3C) of the span they belong to.

Without a call of `start` that returned True, spans are no-ops: the SDK is imported only there.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from blake3 import blake3
from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer, Span, Tracer

from protocol import __version__

Result = TypeVar("Result")
Attributes = Mapping[str, str | int]

_REQUESTED_BY = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_TIMEOUT = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
_PROTOCOL = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

_tracer: Tracer = NoOpTracer()  # until `start`
_trace_id: ContextVar[int | None] = ContextVar("trace_id", default=None)  # of the root span that is being started

log = logging.getLogger(__name__)


def is_requested(environment: Mapping[str, str]) -> bool:
    """True if these variables ask for traces."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    return environment.get(_REQUESTED_BY[0]) != "none" and any(environment.get(name) for name in _REQUESTED_BY)


def is_on() -> bool:
    """True between `start` and `stop`, if `start` returned True."""
    return not isinstance(_tracer, NoOpTracer)


def start(service: str) -> bool:
    """Start tracing if the environment asks for it, under the name `service` unless the environment gives another.
    Return whether tracing is on. If it cannot be started, the log says why, and training continues without traces."""
    global _tracer
    if not is_on() and is_requested(os.environ):
        try:
            _tracer = _sdk_tracer(service)
        except ModuleNotFoundError:
            log.warning(
                "OpenTelemetry's variables ask for traces, but its SDK is not installed: nothing is traced; run: "
                "pip install 'outerstep[otel]'"
            )
        except ValueError as error:
            log.warning("nothing is traced: %s", error)
    return is_on()


def _sdk_tracer(service: str) -> Tracer:
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        def generate_trace_id(self) -> int:
            return _trace_id.get() or super().generate_trace_id()

    if isinstance(trace.get_tracer_provider(), TracerProvider):  # set up by the user's script
        return trace.get_tracer("outerstep", __version__)
    resource = Resource.create({SERVICE_VERSION: __version__})
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: service}))
    provider = TracerProvider(resource=resource, id_generator=Ids())
    provider.add_span_processor(BatchSpanProcessor(_exporter()))
    trace.set_tracer_provider(provider)
    return trace.get_tracer("outerstep", __version__)


def _exporter() -> Any:
    """Return the exporter that the environment names; it reads its settings from there. Raises ValueError."""
    kind = os.environ.get(_REQUESTED_BY[0]) or "otlp"
    if kind == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    protocol = next((os.environ[name] for name in _PROTOCOL if os.environ.get(name)), "http/protobuf")
    if kind != "otlp":
        raise ValueError(f"{_REQUESTED_BY[0]} is {kind!r}, but must be otlp, console or none")
    if protocol != "http/protobuf":
        raise ValueError(
            f"{' or '.join(_PROTOCOL)} is {protocol!r}, but only http/protobuf is supported: set it, and the "
            "collector's endpoint for it, usually port 4318"
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    # The rest is sent when the process ends, which must not wait long for a collector that does not answer.
    return OTLPSpanExporter(timeout=None if any(os.environ.get(name) for name in _TIMEOUT) else 3)


def stop() -> None:
    """Export the remaining spans and stop tracing."""
    global _tracer
    if is_on():
        _tracer = NoOpTracer()
        getattr(trace.get_tracer_provider(), "shutdown", lambda: None)()


def round_trace_id(run: str, created_at: float, number: int) -> int:
    """Return the trace id of this round, the same on all machines."""
    return int.from_bytes(blake3(f"{run}\n{created_at!r}\n{number}".encode()).digest(16)) or 1


def start_span(
    name: str, attributes: Attributes, *, trace_id: int | None = None, parent: Context | None = None
) -> Span:
    """Start a span, which the caller must end. Without `parent` it is a root span of the trace `trace_id`."""
    token = _trace_id.set(trace_id)
    try:
        return _tracer.start_span(name, Context() if parent is None else parent, attributes=dict(attributes))
    finally:
        _trace_id.reset(token)


@contextmanager
def round_span(name: str, run: str, created_at: float, number: int, **more: int) -> Iterator[None]:
    """Trace the block as a span of this round, within this thread's current span if there is one."""
    attributes: dict[str, str | int] = {"outerstep.run": run, "outerstep.round": number}
    attributes |= {f"outerstep.{key}": value for key, value in more.items()}
    trace_id = round_trace_id(run, created_at, number)
    with trace.use_span(start_span(name, attributes, trace_id=trace_id, parent=current_context()), end_on_exit=True):
        yield


def current_context() -> Context | None:
    """Return the context of this thread's current span; None if there is none."""
    here = context.get_current()
    return here if trace.get_current_span(here).get_span_context().is_valid else None


def in_current_context(call: Callable[[], Result]) -> Callable[[], Result]:
    """Return a function that calls `call` within this thread's current span, on whichever thread it runs."""
    here = context.get_current()

    def within() -> Result:
        token = context.attach(here)
        try:
            return call()
        finally:
            context.detach(token)

    return within
