"""Rebuilding the registry's index, and resolving names in a small and in a large one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import secrets
import statistics
import time
from pathlib import Path
from typing import Any

import boto3

from benchmarks.measuring import median_ratio, timed
from benchmarks.registry import load
from benchmarks.registry.process import RegistryProcess
from loraplex.v1 import registry_pb2 as pb
from loraplex_services.common.objects import ObjectStore, open_store
from loraplex_services.common.objects.probe import probe
from loraplex_services.common.redis_url import connect_redis
from loraplex_services.registry import layout
from loraplex_services.registry.assembly import Registry, assemble
from loraplex_services.registry.index.catalog import Catalog
from loraplex_services.registry.index.metadata_server import MetadataServer

_RESOLVES = 3000
_IN_FLIGHT = 32
_BUCKET_ADAPTERS = 2000
_SMALL = 1000


async def reindexing(work: Path, rounds: int, many: int) -> dict[str, Any]:
    """Adapters a second that a rebuild reads from the file store into the metadata server, and
    the memory that both processes need for them."""
    root, state = work / "reindex", work / "metadata"
    load.fill_store(root, 0, many)
    state.mkdir()
    server = MetadataServer(state)
    await server.start()
    store, catalog = open_store(root.as_uri()), Catalog(connect_redis(server.url))
    registry = assemble(store, catalog)
    wall, cpu, before_kib = [], [], _peak_kib()
    for _ in range(rounds):
        before_s = time.process_time()
        with timed() as elapsed:
            _, versions, _, _ = await registry.indexer.rebuild()
        assert versions == many
        wall.append(versions / elapsed[0])
        cpu.append(versions / (time.process_time() - before_s))
    await catalog.close()
    redis = connect_redis(server.url)
    index_bytes = (await redis.info("memory"))["used_memory"]
    await redis.aclose()
    await server.stop()
    return {
        "adapters": many,
        "registry_growth_mib": round((_peak_kib() - before_kib) / 1024),
        "index_mib": round(index_bytes / 2**20),
        "adapters_per_s": round(statistics.median(wall)),
        "adapters_per_registry_cpu_s": round(statistics.median(cpu)),
        "rounds": [round(rate) for rate in wall],
    }


def _peak_kib() -> int:
    """The largest resident size that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


async def reindexing_bucket(work: Path, rounds: int) -> dict[str, Any]:
    """Adapters a second that a rebuild reads from an S3 server: each document singly, and from a
    snapshot that has all but one in a hundred. The server of the environment, alternately."""
    state = work / "bucket-metadata"
    state.mkdir()
    server = MetadataServer(state)
    await server.start()
    bucket = f"bench-{secrets.token_hex(6)}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    store, catalog = open_store(f"s3://{bucket}"), Catalog(connect_redis(server.url))
    await probe(store)
    await load.fill_bucket(store, _BUCKET_ADAPTERS)
    registry = assemble(store, catalog)
    await registry.indexer.start()
    plain, copied, plain_cpu, copied_cpu = [], [], [], []
    for _ in range(rounds):
        await _empty_snapshots(store)
        plain.append(await _rebuilt_per_s(registry, plain_cpu))
        await registry.snapshots.write()
        await load.fill_bucket(store, _BUCKET_ADAPTERS // 100)
        copied.append(await _rebuilt_per_s(registry, copied_cpu))
    await catalog.close()
    await server.stop()
    return {
        "adapters": _BUCKET_ADAPTERS,
        "singly_per_s": round(statistics.median(plain)),
        "singly_per_registry_cpu_s": round(statistics.median(plain_cpu)),
        "by_snapshot_per_s": round(statistics.median(copied)),
        "by_snapshot_per_registry_cpu_s": round(statistics.median(copied_cpu)),
        "snapshot_to_singly_ratio": median_ratio(copied, plain),
        "rounds": {"singly": [round(r) for r in plain], "by_snapshot": [round(r) for r in copied]},
    }


async def _rebuilt_per_s(registry: Registry, per_cpu_s: list[float]) -> float:
    before_s = time.process_time()
    with timed() as elapsed:
        _, versions, _, _ = await registry.indexer.rebuild()
    assert versions == _BUCKET_ADAPTERS
    per_cpu_s.append(versions / (time.process_time() - before_s))
    return versions / elapsed[0]


async def _empty_snapshots(store: ObjectStore) -> None:
    async for info in store.list_objects(layout.SNAPSHOTS):
        await store.delete(info.key)


async def resolving(work: Path, rounds: int, many: int) -> dict[str, Any]:
    """GetAdapter by name over gRPC, of registries with 1,000 and with many adapters.

    Each is pinned to one core with its metadata server, and asked alternately from the other cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[1:] or cores)
    wall: dict[int, list[float]] = {_SMALL: [], many: []}
    cpu: dict[int, list[float]] = {_SMALL: [], many: []}
    async with contextlib.AsyncExitStack() as stack:
        registries = {}
        for count in wall:
            load.fill_store(work / f"index-{count}" / "objects", 0, count)
            registry = RegistryProcess(work / f"index-{count}", cores[:1])
            registries[count] = await stack.enter_async_context(registry)
        for number in range(rounds + 1):
            for count, registry in registries.items():
                before_s = registry.cpu_s()
                with timed() as elapsed:
                    await _resolve(registry, count)
                if number:  # The first round warms both up.
                    wall[count].append(_RESOLVES / elapsed[0])
                    cpu[count].append(_RESOLVES / (registry.cpu_s() - before_s))
    os.sched_setaffinity(0, cores)
    return {
        f"per_s_of_{_SMALL}": round(statistics.median(wall[_SMALL])),
        f"per_s_of_{many}": round(statistics.median(wall[many])),
        f"per_registry_cpu_s_of_{_SMALL}": round(statistics.median(cpu[_SMALL])),
        f"per_registry_cpu_s_of_{many}": round(statistics.median(cpu[many])),
        "large_to_small_ratio": median_ratio(wall[many], wall[_SMALL]),
        "rounds": {str(count): [round(rate) for rate in found] for count, found in wall.items()},
    }


async def _resolve(registry: RegistryProcess, count: int) -> None:
    """Resolve names spread over all, `_IN_FLIGHT` at a time."""
    stub = registry.client._stub
    names = iter([load.name_of(number * 7919 % count) for number in range(_RESOLVES)])

    async def ask() -> None:
        for name in names:
            found = await stub.GetAdapter(pb.GetAdapterRequest(ref=name))
            assert found.version.name == name

    await asyncio.gather(*(ask() for _ in range(_IN_FLIGHT)))
