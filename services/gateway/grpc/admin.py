"""AdminService: reports what this gateway knows about workers and adapters to operators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from loraplex.api.request_wire import generate_request_to_proto
from loraplex.api.residency import Tier, WorkerLoad
from loraplex.api.wire import load_to_proto, recent_load_to_proto, residency_to_proto
from loraplex.errors import InvalidRequest, Unavailable
from loraplex.refs import parse_ref
from loraplex.v1 import admin_pb2, admin_pb2_grpc
from loraplex_services.common.callers import current_caller
from loraplex_services.common.grpc import server as grpc_server
from loraplex_services.gateway.admission.controller import AdmissionController
from loraplex_services.gateway.clock import now_s
from loraplex_services.gateway.pipeline.history import LoadHistory
from loraplex_services.gateway.pipeline.mirror import Mirrors
from loraplex_services.gateway.registry.keyring import runs_all_adapters, sees_all_adapters
from loraplex_services.gateway.registry.link import RegistryLink
from loraplex_services.gateway.registry.resolve import Resolver
from loraplex_services.gateway.request import ServedModel
from loraplex_services.gateway.routing.router import rendezvous_order
from loraplex_services.gateway.workers.fleet import Fleet
from loraplex_services.gateway.workers.view import WorkerView, no_worker_reason

Context = grpc.aio.ServicerContext[Any, Any]
NAME = "loraplex.v1.AdminService"
Labels = Mapping[str, Sequence[str]]
"""tenant/name:vN by digest, newest first."""
_FETCH_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, eq=False)
class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """AdminService of one gateway."""

    fleet: Fleet
    registry: RegistryLink
    resolver: Resolver
    controller: AdmissionController
    not_ready_reason: Callable[[], str]
    loads: LoadHistory
    mirrors: Mirrors

    async def GetStatus(
        self, request: admin_pb2.GetStatusRequest, context: Context
    ) -> admin_pb2.GetStatusResponse:
        """Bases, workers, and the adapters that they hold."""
        views = sorted(self.fleet.views(), key=lambda view: (view.worker_id, view.address))
        sees_all = sees_all_adapters(current_caller.get())
        labels = self._labels(sees_all) if request.include_adapters else None
        reason = self.not_ready_reason() or no_worker_reason(views)
        return admin_pb2.GetStatusResponse(
            ready=not reason,
            not_ready_reason=reason,
            base_ids=sorted({view.base_id for view in views if view.takes_requests}),
            workers=[worker_state(view, labels, sees_all) for view in views],
            registry_connected=self.registry.is_watching,
            num_adapters=self.resolver.snapshot.num_adapters,
            running_requests=self.controller.queue.num_running,
            queued_requests=self.controller.queue.num_waiting,
            recent=recent_load_to_proto(self.loads.last_minute()) if sees_all else None,
        )

    def _labels(self, sees_all: bool) -> Labels:
        return self.resolver.snapshot.labels(None if sees_all else current_caller.get().tenant)

    async def FetchAdapter(
        self, request: admin_pb2.FetchAdapterRequest, context: Context
    ) -> admin_pb2.FetchAdapterResponse:
        """Load an adapter on the first workers of its rendezvous order; on one by default."""
        caller = current_caller.get()
        found = await self.resolver.model(
            request.ref, caller.tenant, "ref", runs_all=runs_all_adapters(caller)
        )
        if isinstance(found, ServedModel):
            raise InvalidRequest.field(
                "ref", request.ref, "this is a base, which its workers always hold; name an adapter"
            )
        able = {v.worker_id: v for v in self.fleet.views(found.base_id) if v.takes_requests}
        if not able:
            why = f"no worker of {found.base_id!r} is ready; start one, or wait"
            raise Unavailable(why, reason="NO_READY_WORKER")
        chosen = rendezvous_order(found.digest, able)[: request.num_workers or 1]
        timeout_s = min(context.time_remaining() or _FETCH_TIMEOUT_S, _FETCH_TIMEOUT_S)
        begin_s = now_s()
        await asyncio.gather(
            *(self.fleet.load(able[worker].address, found.digest, timeout_s) for worker in chosen)
        )
        return admin_pb2.FetchAdapterResponse(
            ref=found.label, digest=found.digest, worker_ids=chosen, took_s=now_s() - begin_s
        )

    async def MirrorRequests(
        self, request: admin_pb2.MirrorRequestsRequest, context: Context
    ) -> AsyncGenerator[admin_pb2.MirrorRequestsResponse]:
        """Requests of the caller's tenant for a tag, until the caller has enough."""
        tenant = current_caller.get().tenant
        ref = parse_ref(request.ref, tenant)
        if ref.tag is None:
            raise InvalidRequest.field("ref", request.ref, "name a tag, as in NAME:TAG")
        if not 0 < request.share <= 1:
            raise InvalidRequest.field("share", request.share, "must be above 0 and at most 1")
        await self.resolver.model(request.ref, tenant)
        with self.mirrors.opened(tenant, ref, request.share) as mirror:
            # The caller knows from the metadata that requests are mirrored from now on.
            await context.send_initial_metadata(())
            while True:
                mirrored = await mirror.next()
                yield admin_pb2.MirrorRequestsResponse(
                    request=generate_request_to_proto(mirrored.request),
                    prompt_text=mirrored.prompt_text,
                    token_ids=mirrored.token_ids,
                    text=mirrored.text,
                    digest=mirrored.digest,
                )


def worker_state(view: WorkerView, labels: Labels | None, sees_all: bool) -> admin_pb2.WorkerState:
    """State of one worker; with `labels` also the adapters that it holds.

    Unless the caller `sees_all`, only adapters with a label are shown. What a worker did and held
    before it was lost is not shown.
    """
    adapters = view.adapters.values() if view.connected else ()
    state = admin_pb2.WorkerState(
        worker_id=view.worker_id if view.base_id else "",
        address=view.address,
        base_id=view.base_id,
        connected=view.connected,
        ready=view.ready,
        draining=view.draining,
        load=load_to_proto(view.load if view.connected else WorkerLoad()),
        num_adapters_on_device=sum(r.tier is Tier.DEVICE for r in adapters),
        dtype=view.dtype,
        kernels=view.kernels,
        quantization=view.quantization,
    )
    if labels is not None:
        for residency in adapters:
            names = labels.get(residency.digest, ())
            if not (names or sees_all):
                continue
            state.adapters.add(
                ref=names[0] if names else "",
                num_other_refs=max(len(names) - 1, 0),
                residency=residency_to_proto(residency),
            )
    return state


def service(servicer: AdminServicer) -> grpc_server.Service:
    """The service for `grpc_server.start`."""
    return admin_pb2_grpc.add_AdminServiceServicer_to_server, servicer, NAME
