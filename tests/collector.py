"""A collector of traces: the OTLP service over gRPC, from OpenTelemetry's own definition.

with running_collector() as (endpoint, collector):
    ...  # run something with EXPORTING and OTEL_EXPORTER_OTLP_ENDPOINT=endpoint
    service, span = collector.wait_for("prefill")["prefill"]
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

EXPORTING = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
"""Milliseconds until spans are exported."""


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans that it is sent, with the service that each comes from."""

    def __init__(self) -> None:
        self.exports: list[bytes] = []
        """Each message as it came."""
        self._spans: list[tuple[str, Any]] = []
        self._changed = threading.Condition()

    def Export(self, request: Any, context: Any) -> Any:
        """Called by exporters."""
        with self._changed:
            self.exports.append(request.SerializeToString())
            for of_resource in request.resource_spans:
                service = values(of_resource.resource.attributes)["service.name"]
                for scope in of_resource.scope_spans:
                    self._spans += [(service, span) for span in scope.spans]
            self._changed.notify_all()
        return trace_service.ExportTraceServiceResponse()

    def wait_for(self, *names: str, timeout_s: float = 20.0) -> dict[str, tuple[str, Any]]:
        """Service and span by name, once all of these have come; later ones replace earlier."""
        with self._changed:
            self._changed.wait_for(lambda: set(names) <= set(self._named()), timeout_s)
            found = self._named()
        assert set(names) <= set(found), f"only {sorted(found)} came"
        return found

    def _named(self) -> dict[str, tuple[str, Any]]:
        return {span.name: (service, span) for service, span in self._spans}


def values(attributes: Any) -> dict[str, Any]:
    """Attributes as plain values."""
    return {each.key: _plain(each.value) for each in attributes}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(each) for each in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def running_collector() -> Iterator[tuple[str, Collector]]:
    """The endpoint, as OTEL_EXPORTER_OTLP_ENDPOINT has it, and the collector."""
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", collector
    finally:
        server.stop(None).wait()
