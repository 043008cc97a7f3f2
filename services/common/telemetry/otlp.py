"""Sends spans of OpenTelemetry's SDK to a collector, in batches on a separate thread.

Only `open_tracer` imports this. The SDK reads the standard variables for the endpoint, the sampler,
the batches and the resource. If the collector is unreachable, spans are dropped beyond the SDK's
queue."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from loraplex_services.common.telemetry.tracing import WITHOUT_ERROR, Attributes, Span, Tracer

LAST_EXPORT_S = 2.0
"""Longest time in seconds that the end of a process waits for its collector; the SDK waits 10 s or
more."""
_PROPAGATOR = TraceContextTextMapPropagator()


class ExportingTracer(Tracer):
    """Begins spans that are exported if the sampler takes them."""

    def __init__(self, service: str, clock: Callable[[], float]) -> None:
        """Spans that are not exported yet are exported when the process ends."""
        resource = Resource.create({"service.name": f"loraplex-{service}"})
        resource = resource.merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        atexit.register(_export_rest, provider)
        self._tracer = provider.get_tracer("loraplex")
        self._clock = clock

    def begin(self, name: str, traceparent: str, start_s: float) -> Span:
        parent = _PROPAGATOR.extract({"traceparent": traceparent})
        to_unix_s = time.time() - self._clock()
        start_ns = _ns(start_s + to_unix_s)
        span = self._tracer.start_span(name, parent, trace.SpanKind.SERVER, start_time=start_ns)
        return ExportedSpan(self._tracer, span, to_unix_s)


class ExportedSpan(Span):
    """A span of the SDK."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span, to_unix_s: float) -> None:
        """`to_unix_s`: added to times of the tracer's clock."""
        self._tracer, self._span, self._to_unix_s = tracer, span, to_unix_s
        self._context = trace.set_span_in_context(span)
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, self._context)
        super().__init__(carrier["traceparent"])
        context = span.get_span_context()
        if context.trace_flags.sampled:
            self.exemplar = {"trace_id": trace.format_trace_id(context.trace_id)}

    def child(
        self, name: str, start_s: float, end_s: float, attributes: Attributes | None = None
    ) -> None:
        start_ns = _ns(start_s + self._to_unix_s)
        part = self._tracer.start_span(
            name, self._context, attributes=attributes, start_time=start_ns
        )
        part.end(_ns(end_s + self._to_unix_s))

    def end(self, end_s: float, outcome: str, attributes: Attributes) -> None:
        self._span.set_attributes({**attributes, "loraplex.outcome": outcome})
        if outcome not in WITHOUT_ERROR:
            self._span.set_status(trace.StatusCode.ERROR)
        self._span.end(_ns(end_s + self._to_unix_s))


def _export_rest(provider: TracerProvider) -> None:
    rest = threading.Thread(target=provider.shutdown, daemon=True)
    rest.start()
    rest.join(LAST_EXPORT_S)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
