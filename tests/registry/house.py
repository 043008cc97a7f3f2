"""A registry around a real store and a real metadata server, and adapters to publish in it."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from loraplex.adapter_format import File
from loraplex.api.format_wire import geometry_to_proto
from loraplex.api.registry import Published
from loraplex.client.publishing import Publication
from loraplex.client.registry_client import RegistryClient
from loraplex.refs import LATEST, parse_name
from loraplex.v1 import registry_pb2 as pb
from loraplex_services.common.objects import ObjectStore
from loraplex_services.common.redis_url import connect_redis
from loraplex_services.registry import layout
from loraplex_services.registry.assembly import Registry, assemble
from loraplex_services.registry.index.catalog import Catalog
from loraplex_services.registry.publish.uploads import Finished, Options, UploadSession
from loraplex_services.registry.records import BaseRecord
from tests.adapter_format.builders import (
    Adapter,
    Tensor,
    good_config,
    good_tensors,
    tensor_file,
    tiny_geometry,
)

BASE_ID = "example/tiny"
CONFIG = "adapter_config.json"
ANY_AGE_S = -2.0
"""Older than this is everything: stores may tell their clock in whole seconds."""
TENSORS = "adapter_model.safetensors"


@asynccontextmanager
async def house_of(store: ObjectStore, metadata_url: str) -> AsyncIterator[Registry]:
    """A registry that knows one base, over a store that somebody else closes."""
    catalog = Catalog(connect_redis(metadata_url))
    assembled = assemble(store, catalog)
    await assembled.indexer.start()
    await assembled.bases.register(tiny_base(), replace=False)
    yield assembled
    await assembled.inspector.validations.close()
    await catalog.close()


def adapter_files(seed: int, **config: object) -> dict[str, bytes]:
    """The files of a valid adapter whose content depends on `seed`."""
    fill = struct.pack("<f", 1.0 + seed / 64)
    tensors = {
        name: Tensor(tensor.dtype, tensor.shape, fill) for name, tensor in good_tensors().items()
    }
    adapter = Adapter(json.dumps(good_config()).encode(), tensor_file(tensors, {"format": "pt"}))
    adapter = adapter.with_config(**config) if config else adapter
    return {CONFIG: adapter.config, TENSORS: adapter.tensors}


def write_folder(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Put files on the disk, for clients."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def tiny_base(base_id: str = BASE_ID) -> BaseRecord:
    """The base that the adapters are for."""
    return BaseRecord(base_id, tiny_geometry())


async def register_base(client: RegistryClient) -> None:
    """Tell a registry of that base, as a gateway does."""
    base = pb.Base(base_id=BASE_ID, geometry=geometry_to_proto(tiny_geometry()))
    request = pb.RegisterBaseRequest(base=base)
    await client._channel.call(client._stub.RegisterBase, request)


def declared(files: Mapping[str, bytes]) -> list[File]:
    """What an upload of these files says about them."""
    return [File(path, len(data), hashlib.sha256(data).hexdigest()) for path, data in files.items()]


async def one_chunk(data: bytes) -> AsyncIterator[tuple[bytes, int]]:
    """A stream of a single chunk."""
    yield data, zlib.crc32(data)


async def opened(
    registry: Registry,
    name: str,
    files: Mapping[str, bytes],
    *tags: str,
    latest: bool = True,
    **options: object,
) -> UploadSession:
    """A session with all bytes sent, ready to be finished."""
    tenant, bare = parse_name(name)
    wanted = Options(tenant, bare, (*tags, LATEST) if latest else tags, **options)  # type: ignore[arg-type]
    sent = declared(files)
    known = await registry.catalog.known_blobs(tenant, [file.sha256 for file in sent])
    session = await registry.uploads.open(wanted, sent, "tester", known)
    for path, data in files.items():
        await registry.uploads.receive(session, path, 0, one_chunk(data))
    return session


async def publish(
    registry: Registry,
    name: str,
    seed: int,
    *tags: str,
    latest: bool = True,
    **options: object,
) -> Finished:
    """Publish the adapter of a seed."""
    files = adapter_files(seed)
    session = await opened(registry, name, files, *tags, latest=latest, **options)
    return await registry.publisher.finish(session)


async def upload(
    client: RegistryClient, tmp_path: Path, name: str, seed: int, **options: object
) -> Published:
    """Send the adapter of a seed to the server."""
    folder = write_folder(tmp_path / f"adapter-{seed}", adapter_files(seed))
    return await client.upload(folder, Publication(name, **options))  # type: ignore[arg-type]


async def orphans(registry: Registry) -> set[str]:
    """Blobs that no version record refers to."""
    return await orphans_of(registry.store)


async def orphans_of(store: ObjectStore) -> set[str]:
    """Blobs of a store that no version record refers to."""
    blobs = {info.key.rpartition("/")[2] async for info in store.list_objects(layout.BLOBS)}
    keys = [
        info.key async for info in store.list_objects(layout.ADAPTERS) if "/versions/" in info.key
    ]
    for data in await store.get_many(keys):
        assert data is not None
        record = json.loads(data)
        blobs -= {record["digest"].removeprefix("sha256:")}
        blobs -= {file["sha256"] for file in record["files"]}
    return blobs
