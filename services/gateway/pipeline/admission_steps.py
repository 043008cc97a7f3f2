"""Charges tenants for their requests, and lets prepared requests wait until they are admitted."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from loraplex.api.tenants import TenantLimits
from loraplex.errors import LoraplexError
from loraplex_services.gateway.admission.concurrency import TenantConcurrency
from loraplex_services.gateway.admission.controller import AdmissionController, Permit
from loraplex_services.gateway.admission.rates import TenantRates
from loraplex_services.gateway.clock import now_s
from loraplex_services.gateway.metrics import REJECTIONS
from loraplex_services.gateway.pipeline.prepared import PreparedRequest
from loraplex_services.gateway.registry.tenants import TenantDirectory
from loraplex_services.gateway.routing.router import are_fetched
from loraplex_services.gateway.workers.fleet import Fleet


class AdmissionSteps:
    """Rates, concurrency and the queue, in the order in which a request meets them."""

    def __init__(
        self,
        tenants: TenantDirectory,
        rates: TenantRates,
        concurrency: TenantConcurrency,
        controller: AdmissionController,
        fleet: Fleet,
    ) -> None:
        self._tenants = tenants
        self._rates = rates
        self._concurrency = concurrency
        self._controller = controller
        self._fleet = fleet

    async def charge_request(self, tenant: str) -> TenantLimits:
        """Charge a tenant for a request before any work is done for it; returns its limits.

        Raises: ResourceExhausted.
        """
        limits = await self._tenants.limits(tenant)
        try:
            await self._rates.charge_request(limits)
        except LoraplexError as error:
            REJECTIONS.labels(error.reason).inc()
            raise
        return limits

    @asynccontextmanager
    async def admitted(self, prepared: PreparedRequest) -> AsyncGenerator[Permit]:
        """Charge the tenant, count its sequences and wait for admission; undo all at the end.

        Sets the prompt tokens of the request's usage, so that a refused request uses none.

        Raises: ResourceExhausted, DeadlineExceeded.
        """
        limits, usage = prepared.limits, prepared.usage
        views = self._fleet.views(prepared.base.base_id)
        digests = [adapter.digest for adapter in prepared.target.adapters]
        run_s = self._controller.run_s(prepared.min_output, prepared.max_output)
        request = prepared.admission_request(run_s, awaits_fetch=not are_fetched(views, digests))
        offered_s, is_admitted = now_s(), False
        try:
            async with (
                self._rates.charged(limits, prepared.max_tokens, lambda: usage.total_tokens),
                self._concurrency.held(limits, request.cost),
                self._controller.admit(request) as permit,
            ):
                is_admitted = True
                usage.prompt_tokens = len(prepared.prompt_ids)
                prepared.span.child("queue", offered_s, now_s())
                yield permit
        except LoraplexError as error:
            if not is_admitted:
                REJECTIONS.labels(error.reason).inc()
            raise
