"""Bytes through the gRPC API: whole, resumed, damaged on the way or in the store."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import random
import zlib
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from loraplex.client import uploading
from loraplex.client.channel import CHUNK_BYTES
from loraplex.client.progress import ignore_progress
from loraplex.client.publishing import Publication
from loraplex.client.sent_files import LocalFile, hash_files
from loraplex.errors import (
    DataLoss,
    InvalidAdapter,
    InvalidRequest,
    ResourceExhausted,
    Unavailable,
)
from loraplex.v1 import registry_pb2 as pb
from loraplex_services.common.grpc import call_rates
from loraplex_services.common.limits import (
    MAX_STREAMS_PER_CONNECTION,
    MAX_UPLOAD_STREAMS_PER_TENANT,
)
from loraplex_services.registry import layout
from loraplex_services.registry.api import publishing
from tests.registry.conftest import ServedRegistry
from tests.registry.house import CONFIG, TENSORS, adapter_files, upload, write_folder
from tests.s3_servers import only_files


async def test_what_is_pulled_is_what_was_uploaded(served: ServedRegistry, tmp_path: Path) -> None:
    published = await upload(served.client, tmp_path, "sql", 1, labels={"team": "data"})
    pulled = await served.client.pull("sql", tmp_path / "pulled")
    assert pulled.digest == published.version.digest
    for path, data in adapter_files(1).items():
        assert (tmp_path / "pulled" / path).read_bytes() == data


async def test_an_interrupted_upload_continues_where_it_stopped(
    served: ServedRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploading, "MAX_ONE_CALL_BYTES", -1)
    files = adapter_files(1)
    folder = write_folder(tmp_path / "adapter", files)
    stub = served.client._stub
    request = pb.CreateUploadRequest(options=pb.PublishOptions(name="sql"))
    for path in sorted(files):
        size, sha256 = len(files[path]), _sha256(files[path])
        request.files.add(path=path, size=size, sha256=sha256)
    session = await stub.CreateUpload(request)
    part = _part(session.upload_id, TENSORS, 0, files[TENSORS][:1000])
    answer = await stub.UploadPart(iter([part]))
    assert answer.progress.committed_bytes == 1000
    again = await stub.CreateUpload(request)
    assert again.upload_id == session.upload_id
    state = await stub.GetUpload(pb.GetUploadRequest(upload_id=session.upload_id))
    assert {p.path: p.committed_bytes for p in state.progress} == {CONFIG: 0, TENSORS: 1000}
    assert (await served.client.upload(folder, Publication("sql"))).version.version == 1
    state = await stub.GetUpload(pb.GetUploadRequest(upload_id=session.upload_id))
    assert state.finished.version == 1


async def test_an_upload_ends_though_the_index_is_lost_between_its_first_and_last_call(
    served: ServedRegistry, tmp_path: Path, metadata_url: str
) -> None:
    await upload(served.client, tmp_path, "sql", 1)
    files = adapter_files(2)
    assert files[CONFIG] == adapter_files(1)[CONFIG]
    stub = served.client._stub
    request = pb.CreateUploadRequest(options=pb.PublishOptions(name="sql"))
    for path, data in files.items():
        request.files.add(path=path, size=len(data), sha256=_sha256(data))
    session = await stub.CreateUpload(request)
    assert {p.path for p in session.progress if p.complete} == {CONFIG}
    await stub.UploadPart(iter([_part(session.upload_id, TENSORS, 0, files[TENSORS])]))
    raw = redis.asyncio.Redis.from_url(metadata_url)
    await raw.flushall()
    await raw.aclose()
    # The index is back, but empty: it cannot say any more what the tenant had.
    epoch = await served.registry.catalog.begin_rebuild()
    assert epoch is not None
    assert await served.registry.catalog.switch(epoch) is True
    done = await stub.FinishUpload(pb.FinishUploadRequest(upload_id=session.upload_id))
    assert done.version.version == 2


async def _damaged_part(served: ServedRegistry) -> pb.UploadPartRequest:
    """A chunk of a new upload whose bytes do not match its checksum."""
    files = adapter_files(1)
    request = pb.CreateUploadRequest(options=pb.PublishOptions(name="sql"))
    for path, data in files.items():
        request.files.add(path=path, size=len(data), sha256=_sha256(data))
    session = await served.client._stub.CreateUpload(request)
    part = _part(session.upload_id, CONFIG, 0, files[CONFIG])
    part.crc32 ^= 1
    return part


async def test_a_chunk_that_was_damaged_on_the_way_is_not_stored(served: ServedRegistry) -> None:
    part = await _damaged_part(served)
    with pytest.raises(DataLoss, match="crc32"):
        await served.client._channel.call(served.client._stub.UploadPart, iter([part]))
    state = await served.client._stub.GetUpload(pb.GetUploadRequest(upload_id=part.upload_id))
    assert {p.path: p.committed_bytes for p in state.progress}[CONFIG] == 0


async def test_calls_with_damaged_chunks_do_not_count_as_open(served: ServedRegistry) -> None:
    """Also before Python looks for cycles of garbage."""
    part = await _damaged_part(served)
    gc.disable()
    try:
        for _ in range(MAX_STREAMS_PER_CONNECTION + 10):
            with pytest.raises(DataLoss, match="crc32"):
                await served.client._channel.call(served.client._stub.UploadPart, iter([part]))
    finally:
        gc.enable()


@pytest.mark.parametrize("chunk_bytes", [1 << 19, 1 << 20])
async def test_chunks_before_a_damaged_one_are_kept(
    served: ServedRegistry, chunk_bytes: int
) -> None:
    data = random.Random(1).randbytes(5 * chunk_bytes)
    request = pb.CreateUploadRequest(options=pb.PublishOptions(name="sql"))
    request.files.add(path=CONFIG, size=2, sha256=_sha256(b"{}"))
    request.files.add(path=TENSORS, size=len(data), sha256=_sha256(data))
    stub = served.client._stub
    session = await stub.CreateUpload(request)
    parts = [
        _part(session.upload_id, TENSORS, begin, data[begin : begin + chunk_bytes])
        for begin in range(0, len(data), chunk_bytes)
    ]
    parts[3].crc32 ^= 1
    with pytest.raises(DataLoss, match="crc32"):
        await served.client._channel.call(stub.UploadPart, iter(parts))
    state = await stub.GetUpload(pb.GetUploadRequest(upload_id=session.upload_id))
    assert {p.path: p.committed_bytes for p in state.progress}[TENSORS] == 3 * chunk_bytes
    parts[3].crc32 ^= 1
    answer = await stub.UploadPart(iter(parts[3:]))
    assert answer.progress.complete


async def test_several_streams_send_one_file_also_after_one_of_them_broke(
    served: ServedRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploading, "RANGE_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(uploading, "WANTED_BYTES_PER_S", 1 << 50)
    uploads = served.registry.uploads
    receive, begun, begun_again = uploads.receive, list[int](), list[int]()
    all_have_begun, two_have_begun_again = asyncio.Event(), asyncio.Event()

    async def breaking(session: Any, path: str, offset: int, chunks: Any) -> Any:
        if all_have_begun.is_set():
            begun_again.append(offset)
            if len(begun_again) == 2:
                two_have_begun_again.set()
            await two_have_begun_again.wait()
            return await receive(session, path, offset, chunks)
        begun.append(offset)
        if len(begun) == uploading.MAX_STREAMS:
            all_have_begun.set()
        await all_have_begun.wait()
        if offset == 2 * CHUNK_BYTES:
            raise Unavailable("the line is cut", retry_after_s=0.01)
        return await receive(session, path, offset, chunks)

    monkeypatch.setattr(uploads, "receive", breaking)
    files = _large_adapter(tmp_path / "adapter")
    summed = await hash_files(files, ignore_progress)
    with pytest.raises(InvalidAdapter, match="safetensors"):
        await uploading.upload(served.client._channel, pb.PublishOptions(name="sql"), files, summed)
    assert {*begun} == {number * CHUNK_BYTES for number in range(5)}


async def test_bytes_are_sent_in_order_where_another_registry_takes_them_only_so(
    served: ServedRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As registries of two builds behind one address, while they are updated."""
    monkeypatch.setattr(uploading, "RANGE_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(uploading, "WANTED_BYTES_PER_S", 1 << 50)
    uploads = served.registry.uploads
    receive, num_begun, three_have_begun, refused = uploads.receive, 0, asyncio.Event(), list[int]()

    async def in_order(session: Any, path: str, offset: int, chunks: Any) -> Any:
        nonlocal num_begun
        num_begun += 1
        if num_begun == 3:  # one of them does not begin a file
            three_have_begun.set()
        await three_have_begun.wait()
        [state] = [each for each in await uploads.state(session) if each.file.path == path]
        if offset > state.committed_bytes:
            refused.append(offset)
            raise InvalidRequest.field("offset", offset, "leaves a gap")
        return await receive(session, path, offset, chunks)

    monkeypatch.setattr(uploads, "receive", in_order)
    files = _large_adapter(tmp_path / "adapter")
    summed = await hash_files(files, ignore_progress)
    with pytest.raises(InvalidAdapter, match="safetensors"):
        await uploading.upload(served.client._channel, pb.PublishOptions(name="sql"), files, summed)
    assert refused


async def test_one_stream_is_sent_again_while_its_tenant_has_too_many(
    served: ServedRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploading, "MAX_ONE_CALL_BYTES", -1)
    monkeypatch.setattr(call_rates, "REFUSAL_DELAY_S", 0.01)
    uploads = served.registry.uploads
    receive, num_calls = uploads.receive, 0

    async def refusing(*arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls <= 2:
            raise ResourceExhausted("32 are open", reason="TOO_MANY_CALLS", retry_after_s=0.01)
        return await receive(*arguments)

    monkeypatch.setattr(uploads, "receive", refusing)
    assert (await upload(served.client, tmp_path, "sql", 1)).version.version == 1
    assert num_calls == 4


async def test_an_upload_in_one_stream_fills_the_gap_before_bytes_that_are_stored(
    served: ServedRegistry, tmp_path: Path
) -> None:
    """The registry ends the first stream at its end, without an error."""
    files = _large_adapter(tmp_path / "adapter")
    summed = await hash_files(files, ignore_progress)
    options, stub = pb.PublishOptions(name="sql"), served.client._stub
    request = pb.CreateUploadRequest(options=options, files=[each.spec for each in summed])
    session = await stub.CreateUpload(request)
    data = (tmp_path / "adapter" / TENSORS).read_bytes()[CHUNK_BYTES : 2 * CHUNK_BYTES]
    answer = await stub.UploadPart(iter([_part(session.upload_id, TENSORS, CHUNK_BYTES, data)]))
    assert answer.progress.committed_bytes == 0
    with pytest.raises(InvalidAdapter, match="safetensors"):
        await uploading.upload(served.client._channel, options, files, summed)


async def test_an_upload_fills_all_gaps_that_ended_streams_left(
    served: ServedRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the end of one of several registries. There are more gaps than attempts."""
    monkeypatch.setattr(uploading, "MAX_ONE_CALL_BYTES", -1)
    monkeypatch.setattr(uploading, "PAUSES_S", ())
    files = adapter_files(1)
    folder = write_folder(tmp_path / "adapter", files)
    request = pb.CreateUploadRequest(options=pb.PublishOptions(name="sql"))
    for path in sorted(files):
        size, sha256 = len(files[path]), _sha256(files[path])
        request.files.add(path=path, size=size, sha256=sha256)
    stub = served.client._stub
    session = await stub.CreateUpload(request)
    for begin in range(100, 1600, 200):
        part = _part(session.upload_id, TENSORS, begin, files[TENSORS][begin : begin + 100])
        await stub.UploadPart(iter([part]))
    assert (await served.client.upload(folder, Publication("sql"))).version.version == 1


async def test_a_file_that_cannot_be_read_holds_no_stream_of_its_tenant(
    served: ServedRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploading, "MAX_ONE_CALL_BYTES", -1)
    monkeypatch.setattr(publishing, "MAX_UPLOAD_IDLE_S", 3600)
    folder = write_folder(tmp_path / "adapter", adapter_files(1))
    files = _files_of(folder)
    summed = await hash_files(files, ignore_progress)
    options, failures = pb.PublishOptions(name="sql"), list[object]()
    (folder / TENSORS).unlink()
    for _ in range(MAX_UPLOAD_STREAMS_PER_TENANT):
        with pytest.raises(DataLoss) as failure:
            await uploading.upload(served.client._channel, options, files, summed)
        failures.append(failure)  # whose traceback would keep the call
    (folder / TENSORS).write_bytes(adapter_files(1)[TENSORS])
    done = await uploading.upload(served.client._channel, options, files, summed)
    assert done.version.version == 1


@pytest.mark.parametrize(
    ("files", "field"),
    [
        ({"adapter_model.bin": b"x"}, "adapter_model.bin"),
        ({"../escape": b"x"}, "../escape"),
        ({"checkpoint.zip": b"x"}, "checkpoint.zip"),
        ({}, TENSORS),
    ],
)
async def test_odd_files_are_refused_before_a_byte_is_sent(
    served: ServedRegistry, files: dict[str, bytes], field: str
) -> None:
    request = pb.CreateUploadRequest(options=pb.PublishOptions(name="sql"))
    for path, data in {CONFIG: b"{}", **files}.items():
        request.files.add(path=path, size=len(data), sha256=_sha256(data))
    with pytest.raises(InvalidAdapter) as refused:
        await served.client._channel.call(served.client._stub.CreateUpload, request)
    assert field in {violation.field for violation in refused.value.violations}
    assert [i async for i in served.registry.store.list_objects(layout.UPLOADS)] == []


@only_files
async def test_damaged_bytes_in_the_store_are_data_loss_not_data(
    served: ServedRegistry, objects_folder: Path, tmp_path: Path
) -> None:
    published = await upload(served.client, tmp_path, "sql", 1)
    tensors = next(file for file in published.version.files if file.path == TENSORS)
    path = objects_folder / layout.blob(tensors.sha256)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataLoss, match="with sha256"):
        await served.client.pull("sql", tmp_path / "pulled")
    with pytest.raises(DataLoss, match="damaged in the store"):
        request = pb.DownloadAdapterRequest(ref="sql")  # by somebody who checks nothing
        async for _ in served.client._channel.stream(served.client._stub.DownloadAdapter, request):
            pass
    assert not (tmp_path / "pulled").exists()
    path.write_bytes(data[:-1])
    with pytest.raises(DataLoss, match="damaged in the store"):
        await served.client.pull("sql", tmp_path / "pulled")
    path.unlink()
    with pytest.raises(DataLoss, match="missing from the store"):
        await served.client.pull("sql", tmp_path / "pulled")
    config = next(file for file in published.version.files if file.path == CONFIG)
    (objects_folder / layout.blob(config.sha256)).write_bytes(b" " * config.size_bytes)
    with pytest.raises(DataLoss, match="not what was published"):
        await served.client.read_file("sql", CONFIG)


def _large_adapter(folder: Path) -> list[LocalFile]:
    """More than one call takes. Its tensors are refused once all bytes are there."""
    tensors = random.Random(1).randbytes(4 * CHUNK_BYTES + 9)
    return _files_of(write_folder(folder, {CONFIG: b"{}", TENSORS: tensors}))


def _files_of(folder: Path) -> list[LocalFile]:
    return [LocalFile(path.name, path, path.stat().st_size) for path in folder.iterdir()]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _part(upload_id: str, path: str, offset: int, data: bytes) -> pb.UploadPartRequest:
    return pb.UploadPartRequest(
        upload_id=upload_id, path=path, offset=offset, data=data, crc32=zlib.crc32(data)
    )


@only_files
@pytest.mark.parametrize("in_one_call", [True, False])
@pytest.mark.parametrize("name", [TENSORS, CONFIG])
async def test_the_same_upload_again_mends_what_was_damaged_in_the_store(
    served: ServedRegistry,
    objects_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    in_one_call: bool,
) -> None:
    if not in_one_call:
        monkeypatch.setattr(uploading, "MAX_ONE_CALL_BYTES", -1)
    published = await upload(served.client, tmp_path, "sql", 1)
    file = next(file for file in published.version.files if file.path == name)
    path = objects_folder / layout.blob(file.sha256)
    intact = path.read_bytes()
    path.write_bytes(b"x" * len(intact))
    again = await upload(served.client, tmp_path, "sql", 1)
    assert (again.created, again.version.digest) == (False, published.version.digest)
    assert path.read_bytes() == intact
    await served.client.pull("sql", tmp_path / "pulled")
