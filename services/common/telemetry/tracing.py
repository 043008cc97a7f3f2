"""Spans of requests, exported by OTLP if the standard OTEL_EXPORTER_OTLP_ENDPOINT is set.

Without it, OpenTelemetry is not imported, and a traceparent is passed on unchanged. No span
contains text or token ids.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
WITHOUT_ERROR = ("ok", "cancelled")
"""Outcomes that do not mark a span as an error."""

Attributes = Mapping[str, Any]


class Span:
    """A span that is not exported: it only passes on the traceparent that it came with."""

    def __init__(self, traceparent: str = "") -> None:
        self.traceparent = traceparent
        """W3C traceparent for what this span causes; may be empty."""
        self.exemplar: dict[str, str] | None = None
        """The `trace_id` for histograms, if the span is exported."""

    def child(
        self, name: str, start_s: float, end_s: float, attributes: Attributes | None = None
    ) -> None:
        """Record a part of this span that has ended. Times are by the tracer's clock."""

    def end(self, end_s: float, outcome: str, attributes: Attributes) -> None:
        """End the span. `outcome`: "ok", "cancelled" or why it failed."""


class Tracer:
    """Begins spans that are not exported."""

    def begin(self, name: str, traceparent: str, start_s: float) -> Span:
        """Begin a span for a request. A malformed `traceparent` begins a new trace."""
        return Span(traceparent)


def open_tracer(
    service: str, environ: Mapping[str, str], clock: Callable[[], float] = time.monotonic
) -> Tracer:
    """The tracer of this process.

    Args:
        service: "gateway" or "worker", for the resource attribute `service.name`.
        environ: decides whether spans are exported. OpenTelemetry's SDK reads its other variables
            from the process's own environment.
        clock: of all times that spans are given, in seconds.
    """
    is_disabled = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if is_disabled or not _first(ENDPOINTS, environ):
        return Tracer()
    if _first(PROTOCOLS, environ) not in ("", "grpc"):
        logger.warning("no traces are exported: only the protocol grpc of OTLP is served")
        return Tracer()
    if importlib.util.find_spec("opentelemetry.exporter.otlp") is None:
        logger.warning("no traces are exported: run pip install 'loraplex[tracing]'")
        return Tracer()
    from loraplex_services.common.telemetry.otlp import ExportingTracer

    return ExportingTracer(service, clock)


def _first(names: tuple[str, ...], environ: Mapping[str, str]) -> str:
    """The first of these variables that has a value; "" if none has."""
    return next((environ[name] for name in names if environ.get(name)), "")
