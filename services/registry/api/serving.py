"""Runs one registry process, from the first check of the store to the drain."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os

from loraplex.errors import Unavailable
from loraplex_services.common.grpc import server as grpc_server
from loraplex_services.common.objects import ObjectStore, open_store
from loraplex_services.common.objects.probe import probe
from loraplex_services.common.processes.process import freeze_heap
from loraplex_services.common.processes.signals import stop_event
from loraplex_services.common.redis_url import connect_redis
from loraplex_services.common.security.service_token import read_service_token
from loraplex_services.common.settings import env
from loraplex_services.common.telemetry.metrics import MetricsServer
from loraplex_services.registry import layout
from loraplex_services.registry.access.auth import caller_auth
from loraplex_services.registry.api.debug_state import RegistryState
from loraplex_services.registry.api.server import service
from loraplex_services.registry.assembly import assemble
from loraplex_services.registry.config import RegistryConfig, from_env
from loraplex_services.registry.index.catalog import Catalog
from loraplex_services.registry.index.metadata_server import MetadataServer
from loraplex_services.registry.index.redis_calls import CatalogDown
from loraplex_services.registry.layout import check_layout_number
from loraplex_services.registry.maintenance.housekeeping import (
    collect_regularly,
    copy_regularly,
    copy_usage,
    copy_usage_regularly,
    expire_regularly,
)
from loraplex_services.registry.publish import failpoint

logger = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 1.0
_START_RETRY_S = 1.0
_LOG_EVERY = 15
"""Attempts to start after which the same problem is logged again."""
_LATE_S = 5.0
"""Seconds after which a store that has not answered yet is named in the log."""


async def serve() -> None:
    """Serve until a signal. Not ready before the store is proved safe and the index is there.

    Raises:
        LoraplexError: it cannot be served like this.
    """
    config = from_env(os.environ)
    stopping = stop_event()
    failpoint.arm(config.failpoint)
    store = open_store(config.objects_url)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        metadata_url = await _metadata_url(config, stack)
        catalog = Catalog(connect_redis(metadata_url))
        stack.push_async_callback(catalog.close)
        registry = assemble(store, catalog, config.max_ephemeral_bytes)
        stack.push_async_callback(registry.inspector.validations.close)
        running = await grpc_server.start(
            [service(registry)],
            [config.listen],
            auth=caller_auth(config, registry.keys),
            tls=config.tls.server(),
            service_listener=_service_listener(config),
            setting=env.REGISTRY_LISTEN.name,
        )
        stack.push_async_callback(running.stop, 0.0)  # it has stopped already, unless a start fails
        state = RegistryState(registry, running)
        if config.metrics_listen:
            metrics = MetricsServer(
                lambda: running.ready,
                service_token=read_service_token(config.service_token_file),
                state=state.read,
            )
            await metrics.start(config.metrics_listen)
            stack.push_async_callback(metrics.stop)
        keeper = asyncio.create_task(_become_ready(config, state))
        keeper.add_done_callback(lambda _: stopping.set())
        stack.callback(keeper.cancel)

        async def end_watches() -> None:
            catalog.feed.close()

        await grpc_server.serve(
            running, drain=end_watches, drain_s=config.drain_s, stopping=stopping
        )
        await copy_usage(registry.usage)
        if keeper.done():
            keeper.result()


def _service_listener(config: RegistryConfig) -> tuple[str, grpc_server.ServerTls] | None:
    tls = config.tls.server(for_services=True)
    return (config.service_listen, tls) if config.service_listen and tls else None


async def _metadata_url(config: RegistryConfig, stack: contextlib.AsyncExitStack) -> str:
    if config.metadata_url != "embedded":
        return config.metadata_url
    config.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    server = MetadataServer(config.state_dir)
    await server.start()
    stack.push_async_callback(server.stop)
    return server.url


async def _become_ready(config: RegistryConfig, state: RegistryState) -> None:
    """Check the store, update the index, become ready; then run the periodic tasks."""
    registry = state.registry
    for attempt in itertools.count():
        try:
            await _check_store(registry.store)
            await registry.indexer.start()
            if config.admin_key_file is not None:
                await registry.keys.admit_first_admin(config.admin_key_file)
            break
        except Unavailable as error:
            if error.message != state.not_ready_reason or attempt % _LOG_EVERY == 0:
                problem = error.for_log if isinstance(error, CatalogDown) else error.message
                logger.warning("not ready yet", extra={"problem": problem})
            state.not_ready_reason = error.message
            await asyncio.sleep(_START_RETRY_S)
    state.not_ready_reason = ""
    freeze_heap()
    await state.running.set_ready(True)
    logger.info("ready", extra={"objects": registry.store.url})
    await asyncio.gather(
        registry.indexer.keep(_CHECK_INTERVAL_S),
        collect_regularly(
            registry.catalog,
            registry.collector,
            registry.audit,
            registry.retention,
            config.gc_interval_s,
        ),
        copy_regularly(registry.catalog, registry.snapshots),
        copy_usage_regularly(registry.catalog, registry.usage),
        expire_regularly(registry.staging, registry.retention),
        registry.retention.run(),
    )


async def _check_store(store: ObjectStore) -> None:
    """Raises Unavailable, after minutes if it is connected to something that never answers."""
    fields = {"problem": f"{store.url} does not answer; check the address, or wait"}
    loop = asyncio.get_running_loop()
    late = loop.call_later(_LATE_S, lambda: logger.warning("not ready yet", extra=fields))
    try:
        await probe(store)
        await check_layout_number(store, layout.LAYOUT_KEY, layout.LAYOUT_NUMBER)
    finally:
        late.cancel()
