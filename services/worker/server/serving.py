"""Runs the API server process, which answers while the model still loads in the engine process."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from prometheus_client import REGISTRY

from loraplex_services.common.grpc import server as grpc_server
from loraplex_services.common.objects.opening import open_store
from loraplex_services.common.processes.process import freeze_heap
from loraplex_services.common.security.service_token import ServiceAuth
from loraplex_services.common.settings import env
from loraplex_services.common.telemetry.metrics import MetricsServer
from loraplex_services.common.telemetry.tracing import open_tracer
from loraplex_services.worker.adapters.fetch.disk_cache import DiskCache
from loraplex_services.worker.adapters.fetch.source import AdapterSource
from loraplex_services.worker.config import MAX_RESIDENT, WorkerConfig
from loraplex_services.worker.grammars.checker import GrammarChecker
from loraplex_services.worker.server.api_server import ApiServer
from loraplex_services.worker.server.base_files import fetch_model, find_model, read_tokenizer
from loraplex_services.worker.server.engine_client import EngineClient
from loraplex_services.worker.server.metrics import AdapterCollector, OfModel
from loraplex_services.worker.server.node import follow
from loraplex_services.worker.server.servicer import worker_service
from loraplex_services.worker.server.status import StatusBoard

logger = logging.getLogger(__name__)


async def serve(config: WorkerConfig, client: EngineClient) -> None:
    """Run until SIGTERM, then let running requests end. A machine that is not the worker's first
    only runs its ranks and leaves `client` alone.

    Raises:
        LoraplexError: the worker cannot serve as it is configured.
    """
    with _cache_folder(config) as folder:
        if config.node_rank:
            await follow(config, await _model_dir(config, folder))
        else:
            await _serve(config, client, folder)


async def _serve(config: WorkerConfig, client: EngineClient, folder: Path) -> None:
    """Serve, with the disk cache in `folder`."""
    status = StatusBoard()
    ready_changed = asyncio.Event()
    api_server = ApiServer(
        status,
        config.max_request_adapters,
        ready_changed.set,
        open_tracer("worker", os.environ),
    )
    server = await grpc_server.start(
        [worker_service(config, api_server)],
        [config.listen],
        auth=_auth(config),
        tls=config.tls.server(for_services=True),
        setting=env.WORKER_LISTEN.name,
    )
    metrics = MetricsServer(
        lambda: status.is_ready,
        OfModel(config.base_id),
        config.service_token,
        api_server.debug_state,
    )
    REGISTRY.register(AdapterCollector(status, MAX_RESIDENT))
    if config.metrics_listen:
        await metrics.start(config.metrics_listen)
    tasks = [
        asyncio.create_task(
            grpc_server.serve(server, drain=api_server.finish, drain_s=config.drain_s)
        ),
        asyncio.create_task(_run_engine(config, client, folder, api_server)),
        asyncio.create_task(_report_ready(server, status, ready_changed)),
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        api_server.close()
        await metrics.stop()
        await server.stop(0)


def _auth(config: WorkerConfig) -> ServiceAuth | None:
    """Unix sockets carry no certificates: whoever may open one counts as a service."""
    by_certificate = config.tls.proves_services and not config.listen.startswith("unix:")
    if not (config.service_token or by_certificate):
        return None
    return ServiceAuth(config.service_token, config.service_names)


@contextmanager
def _cache_folder(config: WorkerConfig) -> Iterator[Path]:
    if config.cache_dir is not None:
        yield config.cache_dir
        return
    with tempfile.TemporaryDirectory(prefix="loraplex-cache-") as folder:
        yield Path(folder)


async def _run_engine(
    config: WorkerConfig, client: EngineClient, folder: Path, api_server: ApiServer
) -> None:
    """Find the model, open the caches in `folder`, keep an engine running. Ends only with an
    error."""
    model_dir = await _model_dir(config, folder)
    bundle = await asyncio.to_thread(read_tokenizer, model_dir)
    disk = await asyncio.to_thread(DiskCache, folder, config.cache_bytes, api_server.adapter_gone)
    api_server.status.disk_bytes = lambda: disk.num_bytes
    source = AdapterSource(open_store(config.objects_url), disk)
    grammars = GrammarChecker(model_dir / "tokenizer.json")
    api_server.connect(client, source, disk, bundle, grammars)
    try:
        engine = msgspec.structs.replace(config.engine, model_dir=str(model_dir))
        await client.run(engine, api_server)
    finally:
        await source.close()
        await grammars.close()
        disk.close()


async def _model_dir(config: WorkerConfig, cache_folder: Path) -> Path:
    if not config.model.startswith("s3://"):
        return await asyncio.to_thread(find_model, config.model, cache_folder)
    store = open_store(config.model)
    try:
        name = hashlib.sha256(config.model.encode()).hexdigest()[:16]
        return await fetch_model(store, cache_folder / "models" / name)
    finally:
        await store.close()


async def _report_ready(
    server: grpc_server.RunningServer, status: StatusBoard, changed: asyncio.Event
) -> None:
    while True:
        await changed.wait()
        changed.clear()
        if status.is_ready:
            freeze_heap()
        await server.set_ready(status.is_ready)
        logger.info("ready" if status.is_ready else "not ready", extra={"epoch": status.epoch})
