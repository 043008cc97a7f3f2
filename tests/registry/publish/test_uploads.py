"""The bytes of an upload, in whatever pieces and order they come."""

from __future__ import annotations

import pytest

from loraplex.errors import InvalidRequest, NotFound
from loraplex_services.common.callers import note_read
from loraplex_services.registry import layout
from loraplex_services.registry.assembly import Registry
from tests.registry.house import CONFIG, TENSORS, adapter_files, one_chunk, opened


async def test_parts_resume_where_a_broken_stream_stopped(registry: Registry) -> None:
    files = adapter_files(1)
    session = await opened(registry, "sql", files)
    await registry.uploads.reopen(session.upload_id, TENSORS)
    data = files[TENSORS]
    state = await registry.uploads.receive(session, TENSORS, 0, one_chunk(data[:100]))
    assert (state.committed_bytes, state.complete) == (100, False)
    state = await registry.uploads.receive(session, TENSORS, 60, one_chunk(data[60:]))
    assert state.complete
    assert (await registry.publisher.finish(session)).version.version == 1


async def test_parts_come_in_any_order_and_no_byte_is_stored_twice(registry: Registry) -> None:
    files = adapter_files(1)
    session = await opened(registry, "sql", files)
    await registry.uploads.reopen(session.upload_id, TENSORS)
    data, receive = files[TENSORS], registry.uploads.receive
    committed = []
    for begin, end in ((200, 260), (100, 120), (190, 270), (0, len(data)), (50, len(data))):
        state = await receive(session, TENSORS, begin, one_chunk(data[begin:end]))
        committed.append(state.committed_bytes)
    assert committed == [0, 0, 0, 120, 260]
    assert not state.complete, "a stream ends where stored bytes follow"
    with pytest.raises(InvalidRequest, match="more than was declared"):
        await receive(session, TENSORS, 260, one_chunk(data[260:] + b" "))
    state = await receive(session, TENSORS, 0, one_chunk(data))
    assert state.complete
    prefix = layout.upload_parts(session.upload_id)
    names = [info.key.rpartition("/")[2] async for info in registry.store.list_objects(prefix)]
    sizes = [int(name.split("-")[1]) for name in names]
    assert sum(sizes) == sum(map(len, files.values()))
    assert (await registry.publisher.finish(session)).version.version == 1


@pytest.mark.parametrize("upload_id", ["", "..", "-" + "0" * 48, "0" * 48 + "-", "0" * 49])
async def test_an_upload_of_another_form_of_id_is_not_found(
    registry: Registry, upload_id: str
) -> None:
    with pytest.raises(NotFound):
        await registry.uploads.get(upload_id)


async def test_more_bytes_than_declared_are_refused(registry: Registry) -> None:
    files = adapter_files(1)
    session = await opened(registry, "sql", files)
    with pytest.raises(InvalidRequest, match="more than was declared"):
        await registry.uploads.receive(session, CONFIG, 0, one_chunk(files[CONFIG] + b" "))


@pytest.mark.hostile
async def test_a_call_for_an_upload_in_many_parts_counts_as_more_calls(registry: Registry) -> None:
    """Each call lists all of them, and parts of one byte are cheap to send."""
    files = adapter_files(1)
    session = await opened(registry, "sql", files)
    await registry.uploads.reopen(session.upload_id, TENSORS)
    for begin in range(0, 58, 2):
        part = files[TENSORS][begin : begin + 1]
        await registry.uploads.receive(session, TENSORS, begin, one_chunk(part))
    num_read: list[int] = []
    token = note_read.set(num_read.append)
    await registry.uploads.state(session)
    note_read.reset(token)
    assert num_read == [3]  # of 29 parts and the config
