"""Every metric that the services export, for tests of what asks for them and what explains them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics import MetricWrapperBase

from loraplex_services.gateway import metrics as gateway_metrics
from loraplex_services.gateway.admission.controller import AdmissionController
from loraplex_services.gateway.admission.queue import AdmissionLimits
from loraplex_services.gateway.admission.scaling import ScalingSignals
from loraplex_services.gateway.text.template_pool import TemplatePool
from loraplex_services.gateway.workers.fleet import Fleet
from loraplex_services.registry.publish import metrics as registry_metrics
from loraplex_services.worker.server import metrics as worker_metrics
from loraplex_services.worker.server.status import StatusBoard


@dataclass(frozen=True, slots=True)
class Exported:
    """One metric."""

    name: str
    """Without the suffixes of its series."""
    kind: str
    """counter, gauge or histogram."""
    labels: frozenset[str]


def exported() -> list[Exported]:
    """All of gateway, registry and worker."""
    return [*_declared(), *(_of(family) for family in _collected())]


def _declared() -> Iterator[Exported]:
    modules = (gateway_metrics, registry_metrics, worker_metrics)
    for metric in chain(*(vars(module).values() for module in modules)):
        if isinstance(metric, MetricWrapperBase):
            family = next(iter(metric.describe()))
            yield Exported(family.name, family.type, frozenset(metric._labelnames))


def _collected() -> Iterator[GaugeMetricFamily]:
    fleet = Fleet((), "gateway", TemplatePool(), base_seen=lambda base: None)
    yield from ScalingSignals(fleet, AdmissionController(AdmissionLimits())).collect()
    yield from worker_metrics.AdapterCollector(StatusBoard(), 1).collect()


def _of(family: GaugeMetricFamily) -> Exported:
    return Exported(family.name, family.type, frozenset(family._labelnames))
