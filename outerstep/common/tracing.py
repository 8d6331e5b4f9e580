"""Traces by OpenTelemetry, where its environment variables ask for them; the extra `otel` brings what that needs.

What both sides do in one round of a run is one trace, whose id follows from run and round: each makes its own spans,
and requests carry the context (W3C) of what they are a part of. Nothing of OpenTelemetry is imported, and nothing is
done, unless `start` was called and has returned True.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from blake3 import blake3

from protocol import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

Result = TypeVar("Result")
Attributes = Mapping[str, str | int]

_ASKING = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_TIMEOUT = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
_PROTOCOL = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

_tracer: "Tracer | None" = None
_trace_id: ContextVar[int | None] = ContextVar("trace_id", default=None)  # of the root span that is being begun

log = logging.getLogger(__name__)


def asked_for(environment: Mapping[str, str]) -> bool:
    """Return True if these variables ask for traces."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    return environment.get(_ASKING[0]) != "none" and any(environment.get(name) for name in _ASKING)


def start(service: str) -> bool:
    """Trace from now on, as this service unless the environment names another, if that asks for it; return whether.
    Where it cannot be done the log says why, once: training goes on without."""
    global _tracer
    if _tracer is None and asked_for(os.environ):
        try:
            _tracer = _started(service)
        except ModuleNotFoundError:
            log.warning(
                "OpenTelemetry's variables ask for traces, and its SDK is not installed: nothing is traced; run: "
                "pip install 'outerstep[otel]'"
            )
        except ValueError as error:
            log.warning("nothing is traced: %s", error)
    return _tracer is not None


def _started(service: str) -> "Tracer":
    from opentelemetry import trace
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        def generate_trace_id(self) -> int:
            return _trace_id.get() or super().generate_trace_id()

    if isinstance(trace.get_tracer_provider(), TracerProvider):  # of the script whose loop this is
        return trace.get_tracer("outerstep", __version__)
    resource = Resource.create({SERVICE_VERSION: __version__})
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: service}))
    provider = TracerProvider(resource=resource, id_generator=Ids())
    provider.add_span_processor(BatchSpanProcessor(_exporter()))
    trace.set_tracer_provider(provider)
    return trace.get_tracer("outerstep", __version__)


def _exporter() -> Any:
    """Return the exporter that the environment names, which reads its own settings there. Raises ValueError."""
    kind = os.environ.get(_ASKING[0]) or "otlp"
    if kind == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    protocol = next((os.environ[name] for name in _PROTOCOL if os.environ.get(name)), "http/protobuf")
    if kind != "otlp":
        raise ValueError(f"{_ASKING[0]} is {kind!r}, and may be otlp, console or none")
    if protocol != "http/protobuf":
        raise ValueError(
            f"{' or '.join(_PROTOCOL)} is {protocol!r}, and traces are sent by http/protobuf alone: give that, and the "
            "collector's endpoint for it, mostly that of port 4318"
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    # What is left is sent as a process ends, which is not to wait for long for a collector that is not there.
    return OTLPSpanExporter(timeout=None if any(os.environ.get(name) for name in _TIMEOUT) else 3)


def stop() -> None:
    """Send what is not sent yet, and trace no more."""
    global _tracer
    if _tracer is not None:
        from opentelemetry import trace

        _tracer = None
        getattr(trace.get_tracer_provider(), "shutdown", lambda: None)()


def round_trace(run: str, created_at: float, number: int) -> int:
    """Return the id of the trace of this round, the same on all machines."""
    return int.from_bytes(blake3(f"{run}\n{created_at!r}\n{number}".encode()).digest(16)) or 1


def begin(
    name: str,
    attributes: Attributes,
    *,
    trace_id: int | None = None,
    within: "Context | None" = None,
) -> "Span":
    """Return a new span, which has to be ended: within that context; None: the first of its trace, which is `trace_id`.
    Tracing is on."""
    from opentelemetry.context import Context

    assert _tracer is not None
    token = _trace_id.set(trace_id)
    try:
        return _tracer.start_span(name, Context() if within is None else within, attributes=dict(attributes))
    finally:
        _trace_id.reset(token)


@contextmanager
def current(span: "Span") -> Iterator["Span"]:
    """Let the span be what this thread is at, and end it with the block; an exception is noted in it."""
    from opentelemetry.trace import use_span

    with use_span(span, end_on_exit=True):
        yield span


@contextmanager
def in_round(name: str, run: str, created_at: float, number: int, **more: int) -> Iterator[None]:
    """Trace the block as a span of this round: within that which this thread is at already, if there is one."""
    if _tracer is None:
        yield
        return
    attributes: dict[str, str | int] = {"outerstep.run": run, "outerstep.round": number}
    attributes |= {f"outerstep.{key}": value for key, value in more.items()}
    within = at()
    with current(begin(name, attributes, trace_id=round_trace(run, created_at, number), within=within)):
        yield


def at() -> "Context | None":
    """Return the context of the span that this thread is at; None if it is at none. Tracing is on."""
    from opentelemetry import context, trace

    here = context.get_current()
    return here if trace.get_current_span(here).get_span_context().is_valid else None


def elsewhere(call: Callable[[], Result]) -> Callable[[], Result]:
    """Return `call`, which is a part of the span that this thread is at, on whatever thread it is called."""
    if _tracer is None:
        return call
    from opentelemetry import context

    here = context.get_current()

    def there() -> Result:
        token = context.attach(here)
        try:
            return call()
        finally:
            context.detach(token)

    return there


def of(span: "Span") -> "Context":
    """Return the context of this span."""
    from opentelemetry import trace
    from opentelemetry.context import Context

    return trace.set_span_in_context(span, Context())


def carry(headers: MutableMapping[str, str], within: "Context") -> None:
    """Let a request's headers carry the context."""
    from opentelemetry import propagate

    propagate.inject(headers, within)


def tell(attributes: Attributes) -> None:
    """Say something of the span that this thread is at. Tracing is on."""
    from opentelemetry import trace

    trace.get_current_span().set_attributes(dict(attributes))


def is_on() -> bool:
    """Return True while it is traced."""
    return _tracer is not None
