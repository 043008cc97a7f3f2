"""Composition of one gateway: its parts, its servers and its background tasks."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from typing import Any

from starlette.types import ASGIApp

from loraplex.client.registry_client import RegistryClient
from loraplex.client.settings import Credentials
from loraplex.errors import LoraplexError
from loraplex_services.common.grpc import server as grpc_server
from loraplex_services.common.grpc.channels import Channels
from loraplex_services.common.limits import LIST_CALLS, USAGE_CALLS
from loraplex_services.common.processes.process import freeze_heap
from loraplex_services.common.processes.signals import stop_event
from loraplex_services.common.settings.env import GATEWAY_LISTEN, HTTP_LISTEN
from loraplex_services.common.telemetry.metrics import MetricsServer
from loraplex_services.common.telemetry.tracing import Tracer, open_tracer
from loraplex_services.gateway.admission.concurrency import TenantConcurrency
from loraplex_services.gateway.admission.controller import AdmissionController
from loraplex_services.gateway.admission.dispatch_window import ready_workers
from loraplex_services.gateway.admission.rate_limit_store import open_rate_limit_store
from loraplex_services.gateway.admission.rates import TenantRates
from loraplex_services.gateway.admission.scaling import ScalingSignals
from loraplex_services.gateway.clock import now_s
from loraplex_services.gateway.config import GatewayConfig, from_env
from loraplex_services.gateway.console.adapters import AdapterEndpoints
from loraplex_services.gateway.console.app import ConsoleEndpoints
from loraplex_services.gateway.console.debug_state import GatewayState
from loraplex_services.gateway.grpc import admin, server
from loraplex_services.gateway.http.aborts import AbortEndpoint
from loraplex_services.gateway.http.aliases import AliasEndpoints
from loraplex_services.gateway.http.answering import Responder
from loraplex_services.gateway.http.app import AppContext, OpenAIEndpoints
from loraplex_services.gateway.http.collected import LargeAnswers
from loraplex_services.gateway.http.guard import HostRule
from loraplex_services.gateway.http.lora_folders import LoraFolders
from loraplex_services.gateway.http.messages.endpoints import MessagesEndpoints
from loraplex_services.gateway.http.pauses import PauseEndpoints
from loraplex_services.gateway.http.responses.endpoints import ResponsesEndpoints
from loraplex_services.gateway.http.server import HttpServer
from loraplex_services.gateway.http.stored import StoredWork
from loraplex_services.gateway.http.tokenize import PromptEncoder, TokenizeEndpoints
from loraplex_services.gateway.http.usage import UsageEndpoint
from loraplex_services.gateway.http.vectors import VectorEndpoints
from loraplex_services.gateway.pipeline.admission_steps import AdmissionSteps
from loraplex_services.gateway.pipeline.generation import Generation
from loraplex_services.gateway.pipeline.live import LiveRequests
from loraplex_services.gateway.registry.keyring import KeyRing
from loraplex_services.gateway.registry.link import RegistryLink
from loraplex_services.gateway.registry.registrar import BaseRegistrar
from loraplex_services.gateway.registry.resolve import Resolver
from loraplex_services.gateway.registry.staging import Stager
from loraplex_services.gateway.registry.tenants import TenantDirectory
from loraplex_services.gateway.registry.usage_reports import UsageReports
from loraplex_services.gateway.routing.relay import Relay
from loraplex_services.gateway.text.adapter_text import AdapterText
from loraplex_services.gateway.text.template_pool import TemplatePool
from loraplex_services.gateway.workers.fleet import Fleet
from loraplex_services.gateway.workers.readiness import Readiness

logger = logging.getLogger(__name__)


class Gateway:
    """One gateway process: starts, becomes ready, drains."""

    def __init__(
        self,
        config: GatewayConfig,
        give_up: asyncio.Event | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """Sets `give_up` if it cannot continue. Raises: InvalidRequest if its address is in use."""
        self._config = config
        self._give_up = give_up or asyncio.Event()
        self.error: BaseException | None = None
        metadata = _service_metadata(config.service_token)
        self._pool = TemplatePool()
        self._registry = RegistryLink(config.registry_address, metadata, Channels(config.tls))
        self._registrar = BaseRegistrar(
            self._registry, self._base_refused, replaces=config.replaces_bases
        )
        self._keys = KeyRing(self._registry.check_key) if config.wants_keys else None
        self._fleet = Fleet(
            config.workers,
            config.gateway_id,
            self._pool,
            base_seen=self._registrar.seen,
            metadata=metadata,
            channels=Channels(config.tls),
        )
        self._resolver = Resolver(self._registry, self._fleet.bases)
        self._controller = AdmissionController(
            config.admission,
            lambda: ready_workers(self._fleet.views()),
            shares_batch=config.wants_keys,
        )
        self._rate_limit_store = open_rate_limit_store(config.metadata_url, config.gateway_id)
        self._scaling = ScalingSignals(self._fleet, self._controller)
        self._concurrency = TenantConcurrency(self._rate_limit_store, self._controller)
        self._tenants = TenantDirectory(self._registry.tenant)
        self._adapter_text = AdapterText(self._registry.read_files)
        self._live = LiveRequests(self._resolver, self._fleet, limits_prompts=config.wants_keys)
        rates = TenantRates(self._rate_limit_store)
        limits = self._tenants, rates, self._concurrency
        self._admission = AdmissionSteps(*limits, self._controller, self._fleet)
        self._generation = Generation(
            self._resolver,
            self._fleet,
            self._adapter_text,
            Relay(self._fleet),
            self._live,
            self._admission,
            max_request_s=config.max_request_s,
            chat_style=config.chat_style,
            tracer=tracer,
        )
        self._usage_reports = UsageReports(self._registry, self._generation.usage)
        self.readiness = Readiness(self._first_missing)
        self._tasks: list[asyncio.Task[None]] = []
        self._grpc: grpc_server.RunningServer | None = None
        self._metrics: MetricsServer | None = None
        self._app = self._http_app()
        self._http = HttpServer(
            self._app, config.http_listen, setting=HTTP_LISTEN.name, tls=config.http_tls
        )

    @property
    def http_port(self) -> int:
        """Port of the HTTP server."""
        return self._http.port

    @property
    def grpc(self) -> grpc_server.RunningServer:
        """The gRPC server; only after `start`."""
        assert self._grpc is not None, "start first"
        return self._grpc

    def debug_state(self) -> dict[str, Any]:
        """The state of the gateway, for /debug/state."""
        return GatewayState(
            self.readiness.missing,
            self._fleet,
            self._registry,
            self._resolver,
            self._controller,
            self._live,
            self._rate_limit_store,
        ).read()

    async def start(self) -> None:
        """Start all servers. Raises: InvalidRequest naming the setting of an address in use."""
        self._grpc = await self._started_grpc()
        await self._http.start()
        if self._config.metrics_listen:
            self._metrics = MetricsServer(
                ready=lambda: not self.readiness.missing(),
                service_token=self._config.service_token,
                state=self.debug_state,
            )
            await self._metrics.start(self._config.metrics_listen)
        runs = (
            self._fleet.run(),
            self._registry.follow(self._resolver),
            self._registrar.run(),
            self._become_ready(),
            self._controller.follow(self._fleet.next_change),
            self._concurrency.run(),
            self._usage_reports.run(),
            self._generation.usage.history.run(
                lambda: (self._controller.queue.num_running, self._controller.queue.num_waiting)
            ),
            Stager(self._resolver, self._fleet, self._registry).run(),
            self._rate_limit_store.run(),
            *([self._stored.run()] if self._stored is not None else []),
        )
        self._tasks = [asyncio.create_task(run) for run in runs]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)
        self._scaling.register()

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests and wait for running HTTP requests.

        The gRPC server waits for its own calls.
        """
        self.readiness.end()
        if self._stored is not None:
            await self._stored.drain()
        self._generation.refuse_new()
        await self._http.stop(grace_s)

    async def close(self) -> None:
        """End all tasks and connections."""
        self._scaling.unregister()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._usage_reports.send()
        await self._tenants.close()
        await self._registry.close()
        await self._rate_limit_store.close()
        if self._stored is not None:
            await self._stored.close()
        await self._pool.close()
        await self._adapter_text.close()
        if self._metrics is not None:
            await self._metrics.stop()

    async def _started_grpc(self) -> grpc_server.RunningServer:
        operators = admin.AdminServicer(
            self._fleet,
            self._registry,
            self._resolver,
            self._controller,
            self.readiness.missing,
            self._generation.usage.history,
            self._generation.mirrors,
        )
        return await grpc_server.start(
            [server.service(self._generation, self._resolver), admin.service(operators)],
            [self._config.grpc_listen],
            auth=self._keys,
            tls=self._config.tls.server(),
            setting=GATEWAY_LISTEN.name,
        )

    def _http_app(self) -> ASGIApp:
        context = AppContext(
            not_ready_reason=self.readiness.missing,
            shows_metrics=self._config.is_local or self._keys is not None,
            keys=self._keys,
        )
        lister = functools.partial(context.reader, num_calls=LIST_CALLS)
        console = ConsoleEndpoints(
            lister,
            self._resolver,
            self._fleet,
            self._controller,
            self.readiness.missing,
            self._generation.usage.history,
        )
        adapters = AdapterEndpoints(
            lister,
            self._resolver,
            self._fleet,
            self._registry_of,
            self._generation.usage.history,
        )
        root = self._config.lora_root
        folders = None if root is None else LoraFolders(self._registry_of, root, self._resolver)
        large = LargeAnswers()
        responder = Responder(self._generation, large, folders)
        encoder = PromptEncoder(
            self._resolver, self._fleet, self._adapter_text, self._admission.charge_request
        )
        endpoints = OpenAIEndpoints(responder, self._resolver, context)
        one_call = functools.partial(context.reader, num_calls=1)
        tokenize = TokenizeEndpoints(context.text_reader, one_call, encoder, large)
        responses = ResponsesEndpoints(context, responder, encoder)
        vectors = VectorEndpoints(context.caller, self._generation, large, self._resolver)
        messages = MessagesEndpoints(context, responder, encoder)
        usage = UsageEndpoint(
            functools.partial(context.reader, num_calls=USAGE_CALLS), self._registry.usage
        )
        pauses = PauseEndpoints(lister, self._live, self._fleet.bases)
        others = [
            *tokenize.routes(),
            *responses.routes(),
            *messages.routes(),
            *vectors.routes(),
            *pauses.routes(),
            *AbortEndpoint(lister, self._live).routes(),
            *usage.routes(),
            *console.routes(),
            *adapters.routes(),
        ]
        self._stored = self._stored_work(context)
        if self._stored is not None:
            others += self._stored.routes()
        if folders is not None:
            bases = self._fleet.bases
            others += AliasEndpoints(context.caller, self._registry_of, folders, bases).routes()
        return endpoints.app(self._host_rule(), others)

    def _stored_work(self, context: AppContext) -> StoredWork | None:
        """None without an object store."""
        if not self._config.objects_url:
            return None
        return StoredWork(
            self._config.objects_url,
            self._config.gateway_id,
            context,
            lambda: self._app,
            lambda: self._controller.background_limit,
            self._generation.collected,
            None if self._keys is None else self._registry.check_key_id,
        )

    def _registry_of(self, api_key: str) -> RegistryClient:
        """A client of the registry with a caller's key, without the gateway's own identity."""
        credentials = Credentials(api_key=api_key, ca=self._config.tls.ca)
        return RegistryClient(self._config.registry_address, credentials)

    def _host_rule(self) -> HostRule | None:
        """The hosts that requests may name. With keys, any is accepted, because pages of other
        sites cannot know a key."""
        if self._keys is not None:
            return None
        host = self._config.http_listen.rpartition(":")[0].strip("[]")
        return HostRule(frozenset({*self._config.allowed_hosts, host}))

    async def _become_ready(self) -> None:
        await self.readiness.wait()
        await self.grpc.set_ready(True)

    def _base_refused(self, error: LoraplexError) -> None:
        """Stop a gateway that was never ready; one that has been ready keeps serving."""
        if self.readiness.missing():
            self._end_with(error)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Stop a gateway when a part of it has failed: a restart repairs it, and continuing would
        hide it."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end_with(error)

    def _end_with(self, error: BaseException) -> None:
        self.error = self.error or error
        self._give_up.set()

    def _first_missing(self) -> str:
        if not self._registry.has_snapshot.is_set():
            return "waiting for the first snapshot of the registry"
        if not any(view.takes_requests for view in self._fleet.views()):
            return "waiting for the first ready worker"
        return self._registrar.missing


def _service_metadata(token: str) -> tuple[tuple[str, str], ...]:
    return tuple(("authorization", f"Bearer {first}") for first in token.split()[:1])


async def serve() -> None:
    """Run until SIGTERM, then let running requests end.

    Raises: InvalidRequest, AlreadyExists: it cannot be started, or its base cannot be registered.
    """
    config = from_env(os.environ)
    stopping = stop_event()
    gateway = Gateway(config, stopping, open_tracer("gateway", os.environ, now_s))
    await gateway.start()
    freeze_heap()
    try:
        await grpc_server.serve(
            gateway.grpc,
            drain=lambda: gateway.drain(config.drain_s),
            drain_s=config.drain_s,
            stopping=stopping,
        )
    finally:
        await gateway.close()
    if gateway.error is not None:
        raise gateway.error
