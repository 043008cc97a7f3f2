"""Small adapters are published in one call."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from loraplex.api.registry import MAX_ONE_CALL_BYTES
from loraplex.errors import DataLoss, InvalidAdapter, InvalidRequest, ResourceExhausted
from loraplex.refs import parse_ref
from loraplex.v1 import registry_pb2 as pb
from loraplex_services.registry import layout
from loraplex_services.registry.access.permissions import Access
from loraplex_services.registry.records import TenantRecord
from tests.registry.conftest import ServedRegistry
from tests.registry.house import CONFIG, TENSORS, adapter_files, publish
from tests.s3_servers import only_files

ROOT = Access("default", "", frozenset({"root", "admin"}))


def _first(files: Mapping[str, bytes], name: str = "sql") -> pb.PublishAdapterRequest:
    """The first message of a publication, with all bytes."""
    request = pb.PublishAdapterRequest(
        options=pb.PublishOptions(name=name),
        request_id=secrets.token_hex(8),
        data=b"".join(files.values()),
    )
    for path, data in files.items():
        request.files.add(path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest())
    return request


async def _send(served: ServedRegistry, *parts: pb.PublishAdapterRequest) -> pb.AdapterVersion:
    method = served.client._stub.PublishAdapter
    answer: pb.PublishAdapterResponse = await served.client._channel.call(method, iter(parts))
    return answer.version


async def _keys(served: ServedRegistry, prefix: str) -> list[str]:
    return [info.key async for info in served.registry.store.list_objects(prefix)]


async def test_it_becomes_the_same_version_as_in_parts_and_leaves_no_upload(
    served: ServedRegistry,
) -> None:
    in_parts = await publish(served.registry, "in-parts", 1)
    uploads = await _keys(served, layout.UPLOADS)
    version = await _send(served, _first(adapter_files(1)))
    assert version.digest == in_parts.version.digest
    assert list(version.tags) == ["latest"]
    assert await _keys(served, layout.UPLOADS) == uploads
    found = await served.registry.lookup.resolve(parse_ref("sql"), ROOT)
    assert found.version.digest == version.digest
    assert {file.path for file in found.version.files} == {CONFIG, TENSORS}


@only_files
async def test_blobs_wait_for_the_disk_only_for_versions_that_are_not_ephemeral(
    served: ServedRegistry, objects_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blobs are those of the ephemeral version, so the other one has nothing to write."""
    fsync, synced = os.fsync, Counter[int]()

    def counting(descriptor: int) -> None:
        synced[os.fstat(descriptor).st_ino] += 1
        fsync(descriptor)

    request = _first(adapter_files(1))
    request.options.ttl_s = 60.0
    monkeypatch.setattr(os, "fsync", counting)
    ephemeral = await _send(served, request)
    assert await _keys(served, layout.UPLOADS) == []
    hashes = [file.sha256 for file in ephemeral.files]
    keys = [layout.blob(sha256) for sha256 in (*hashes, ephemeral.digest)]
    inodes = [(objects_folder / key).stat().st_ino for key in keys]
    assert [synced[inode] for inode in inodes] == [0, 0, 0]
    lasting = await _send(served, _first(adapter_files(1)))
    assert (lasting.version, lasting.digest) == (2, ephemeral.digest)
    assert [(objects_folder / key).stat().st_ino for key in keys] == inodes
    assert all(synced[inode] for inode in inodes)


async def test_a_config_that_many_versions_share_is_read_and_synced_once(
    served: ServedRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, wanted = served.registry.store, Counter[str]()
    for operation in ("get_range", "make_durable"):
        whole = getattr(store, operation)

        async def counted(
            key: str, *args: int, whole: Any = whole, operation: str = operation
        ) -> Any:
            wanted[operation] += 1
            return await whole(key, *args)

        monkeypatch.setattr(store, operation, counted)
    versions = [await _send(served, _first(adapter_files(seed))) for seed in range(1, 5)]
    assert [version.version for version in versions] == [1, 2, 3, 4]
    assert wanted == {"get_range": 1, "make_durable": 1}


async def test_a_config_whose_blob_is_gone_is_stored_again(served: ServedRegistry) -> None:
    versions = [await _send(served, _first(adapter_files(seed))) for seed in (1, 2)]
    [key] = {layout.blob(f.sha256) for v in versions for f in v.files if f.path == CONFIG}
    await served.registry.store.delete(key)
    await _send(served, _first(adapter_files(3)))
    found = await served.registry.store.get_range(key, 0, 1 << 20)
    assert found == adapter_files(3)[CONFIG]


async def test_the_bytes_may_come_in_any_number_of_messages(served: ServedRegistry) -> None:
    first = _first(adapter_files(1))
    data = first.data
    first.data = data[:10]
    rest = [pb.PublishAdapterRequest(data=data[i : i + 999]) for i in range(10, len(data), 999)]
    assert (await _send(served, first, *rest)).version == 1


async def test_a_repeated_call_gets_its_own_version(served: ServedRegistry) -> None:
    first = _first(adapter_files(1))
    method = served.client._stub.PublishAdapter
    for _ in range(2):
        answer = await served.client._channel.call(method, iter([first]))
        assert (answer.version.version, answer.created) == (1, True)
    first.request_id = secrets.token_hex(8)
    answer = await served.client._channel.call(method, iter([first]))
    assert (answer.version.version, answer.created) == (1, False)


async def test_what_is_not_as_declared_is_refused_and_stored_nowhere(
    served: ServedRegistry,
) -> None:
    files = adapter_files(1)
    good = _first(files)
    wrong_id, short, long, other, large = (_first(files) for _ in range(5))
    wrong_id.request_id = "../../keys"
    short.data = good.data[:-1]
    long.data = good.data + b"x"
    other.data = good.data[:-1] + bytes([good.data[-1] ^ 1])
    large.files[1].size = MAX_ONE_CALL_BYTES
    unfit = _first({**files, CONFIG: b"{}"})
    for request, error, field in (
        (wrong_id, InvalidRequest, "request_id"),
        (short, InvalidRequest, "data"),
        (long, InvalidRequest, "data"),
        (other, DataLoss, TENSORS),
        (large, InvalidRequest, "files"),
        (unfit, InvalidAdapter, CONFIG),
    ):
        with pytest.raises(error, match=field):
            await _send(served, request)
    with pytest.raises(InvalidRequest, match="options"):
        await _send(served)
    for prefix in (layout.BLOBS, layout.UPLOADS, layout.ADAPTERS):
        assert await _keys(served, prefix) == []


async def test_a_full_quota_refuses_it_before_anything_is_stored(served: ServedRegistry) -> None:
    await served.registry.tenants.set(TenantRecord("default", max_bytes=100))
    with pytest.raises(ResourceExhausted):
        await _send(served, _first(adapter_files(1)))
    assert await _keys(served, layout.BLOBS) == []


@pytest.mark.parametrize("way", ["in one call", "in parts"])
async def test_content_that_is_published_already_needs_no_room_in_the_quota(
    served: ServedRegistry, way: str
) -> None:
    async def begin(files: Mapping[str, bytes], name: str = "sql") -> pb.PublishAdapterRequest:
        first = _first(files, name)
        if way == "in parts":
            request = pb.CreateUploadRequest(options=first.options, files=first.files)
            await served.client._channel.call(served.client._stub.CreateUpload, request)
        return first

    one = await publish(served.registry, "sql", 1)
    await publish(served.registry, "other", 2, latest=False)
    limits = TenantRecord("default", max_bytes=2 * one.version.size_bytes, max_versions=2)
    await served.registry.tenants.set(limits)
    again = await _send(served, await begin(adapter_files(1)))
    assert (again.version, again.digest) == (1, one.version.digest)
    for seed, name in ((3, "sql"), (2, "sql")):  # a new one; and one that another adapter has
        with pytest.raises(ResourceExhausted):
            await _send(served, await begin(adapter_files(seed), name))
    assert len(await served.registry.versions.of("default", "sql")) == 1
