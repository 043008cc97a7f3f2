"""The registry on an S3 store: the same life, through conditional puts and multipart uploads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from loraplex.api.registry import TagTarget
from loraplex.errors import AdapterNotFound
from loraplex.refs import parse_ref
from loraplex_services.common import documents
from loraplex_services.common.documents import decode, encode
from loraplex_services.common.objects import (
    ObjectStore,
    ObjectStoreError,
    PreconditionFailed,
    WriteUncertain,
    open_store,
)
from loraplex_services.common.objects import probe as probe_module
from loraplex_services.common.objects.probe import UnsafeStore, probe
from loraplex_services.registry import layout
from loraplex_services.registry.access.permissions import Access
from loraplex_services.registry.api import serving
from loraplex_services.registry.api.downloads import chunks_of
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.maintenance.gc import Collector
from loraplex_services.registry.publish.tags import TagAddress, moved
from loraplex_services.registry.records import PUBLIC, AdapterRecord, TagRecord
from tests.registry.house import ANY_AGE_S, house_of, orphans, publish
from tests.s3_servers import moto, new_bucket

ROOT = Access("default", "", frozenset({"root", "admin"}))


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with moto() as variables:
        yield variables


@pytest.fixture
async def store(
    server: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ObjectStore]:
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    opened = open_store(f"s3://{new_bucket()}/house")
    yield opened
    await opened.close()


@pytest.fixture
async def house(store: ObjectStore, metadata_url: str) -> AsyncIterator[Registry]:
    async with house_of(store, metadata_url) as assembled:
        yield assembled


async def test_a_bucket_that_is_missing_is_named_in_the_log_with_the_way_out(
    store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    missing = open_store("s3://no-such-bucket/house")
    with pytest.raises(ObjectStoreError, match="create it, or correct"):
        await missing.put("x", b"1")
    [record] = [each for each in caplog.records if each.msg == "object store failed"]
    assert record.store == "s3://no-such-bucket/house"  # type: ignore[attr-defined]
    await missing.close()


async def test_callers_do_not_learn_where_a_server_is_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, server: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {**server, "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1"}.items():
        monkeypatch.setenv(name, value)
    away = open_store("s3://bucket/house")
    with pytest.raises(ObjectStoreError) as refused:
        await away.head("x")
    assert "bucket" not in refused.value.message
    assert "127.0.0.1" not in refused.value.message
    assert "127.0.0.1:1" in caplog.records[-1].problem  # type: ignore[attr-defined]
    await away.close()


async def test_a_server_that_never_answers_is_named_at_start(
    monkeypatch: pytest.MonkeyPatch, server: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    held: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0)
    address = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    for name, value in {**server, "AWS_ENDPOINT_URL_S3": address}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(serving, "_LATE_S", 0.05)
    store = open_store("s3://bucket/house")
    checking = asyncio.create_task(serving._check_store(store))
    while not caplog.records:
        await asyncio.sleep(0.01)
    assert "s3://bucket/house does not answer" in caplog.records[0].problem  # type: ignore[attr-defined]
    silent.close()
    for writer in held:
        writer.close()
    with pytest.raises(ObjectStoreError):
        await checking
    await store.close()


async def test_versions_tags_deletion_and_collection(house: Registry) -> None:
    first = await publish(house, "sql", 1, "prod")
    second = await publish(house, "sql", 2)
    await house.tags.set(TagAddress("default", "sql", "prod"), [TagTarget(2, "")], None, "me")
    found = await house.lookup.resolve(parse_ref("sql:prod"), ROOT)
    assert found.version.digest == second.version.digest
    read = sum([len(chunk.data) async for chunk in chunks_of(house.store, found.version)])
    assert read == second.version.size_bytes
    await house.deletion.version("default", "sql", 1, "me", force=False, purge=True)
    await Collector(house.store, min_age_s=ANY_AGE_S, session_max_age_s=ANY_AGE_S).collect()
    assert await house.store.head(layout.blob(first.version.digest)) is None
    assert await orphans(house) == set()
    await house.indexer.rebuild()
    assert (await house.lookup.resolve(parse_ref("sql"), ROOT)).version.version == 2
    with pytest.raises(AdapterNotFound):
        await house.lookup.resolve(parse_ref("sql:v1"), ROOT)


async def test_concurrent_uploads_get_distinct_versions(house: Registry) -> None:
    done = await asyncio.gather(*(publish(house, "sql", seed) for seed in range(4)))
    assert sorted(finished.version.version for finished in done) == [1, 2, 3, 4]


async def test_a_server_that_ignores_conditions_is_refused_by_name(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As servers do that accept the header and take no notice."""
    client = store._once  # type: ignore[attr-defined]
    put = client.put_object

    def ignoring(**arguments: object) -> object:
        arguments.pop("IfNoneMatch", None)
        arguments.pop("IfMatch", None)
        return put(**arguments)

    monkeypatch.setattr(client, "put_object", ignoring)
    with pytest.raises(UnsafeStore, match="create-only"):
        await probe(store)
    assert [info async for info in store.list_objects("")] == []


async def test_a_server_that_wants_bare_etags_is_understood(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One well-known server refuses the quoted form."""
    client = store._once  # type: ignore[attr-defined]
    put = client.put_object

    def bare_only(**arguments: object) -> object:
        etag = str(arguments.get("IfMatch", ""))
        if etag:
            arguments["IfMatch"] = '"wrong"' if etag.startswith('"') else f'"{etag}"'
        return put(**arguments)

    monkeypatch.setattr(client, "put_object", bare_only)
    await probe_module.probe(store)
    etag = await store.put_if_absent("doc", b"1")
    await store.put_if_match("doc", b"2", etag)
    with pytest.raises(PreconditionFailed):
        await store.put_if_match("doc", b"3", etag)


async def test_a_write_whose_answer_was_lost_counts_as_done(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from botocore.exceptions import ReadTimeoutError

    client = store._once  # type: ignore[attr-defined]
    put = client.put_object

    def losing(**arguments: object) -> object:
        put(**arguments)
        raise ReadTimeoutError(endpoint_url="http://store")

    monkeypatch.setattr(client, "put_object", losing)
    etag = await store.put_if_absent("doc", b"mine")
    assert (await store.get("doc")).etag == etag
    with pytest.raises(PreconditionFailed):
        await store.put_if_absent("doc", b"another")


def _failing(client: object, before: int, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make conditional puts answer 500: `before` times without writing, then `after` times having
    written. So do servers whose losers of a race hear of an internal error."""
    put = client.put_object  # type: ignore[attr-defined]
    failures = [False] * before + [True] * after

    def failing(**arguments: object) -> object:
        if not failures:
            return put(**arguments)
        if failures.pop(0):
            put(**arguments)
        status = {"HTTPStatusCode": 500, "HTTPHeaders": {}, "RequestId": "", "RetryAttempts": 0}
        error = {"Error": {"Code": "UnknownError"}, "ResponseMetadata": status}
        raise ClientError(error, "PutObject")  # type: ignore[arg-type]

    monkeypatch.setattr(client, "put_object", failing)


async def test_writes_that_the_server_fails_without_a_reason_happen_exactly_once(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = TagAddress("default", "sql", "prod")

    def step(current: TagRecord | None) -> TagRecord:
        return moved(index, current, (), "me", "move")

    for before, after in ((0, 0), (2, 0), (0, 1), (2, 1)):
        with monkeypatch.context() as patch:
            _failing(store._once, before, after, patch)  # type: ignore[attr-defined]
            await documents.change(store, index.key, TagRecord, step)
    record = await documents.read(store, index.key, TagRecord)
    assert record is not None and record.generation == len(record.moves) == 4


async def test_a_failed_write_that_others_may_have_followed_is_reported_as_uncertain(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = layout.adapter("default", "sql")
    await store.put_if_absent(key, encode(AdapterRecord("default", "sql", PUBLIC, generation=2)))
    _failing(store._once, 1, 0, monkeypatch)  # type: ignore[attr-defined]
    with pytest.raises(WriteUncertain):
        await documents.create(store, key, AdapterRecord("default", "sql", PUBLIC))


async def test_a_deletion_by_age_that_is_tried_again_looks_at_the_age_again(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publisher writes a blob again while the server fails the collector's deletion of it."""
    await store.put("blob", b"data")
    info = await store.head("blob")
    assert info is not None
    delete = store._once.delete_object  # type: ignore[attr-defined]
    head = store._client.head_object  # type: ignore[attr-defined]
    is_rewritten = False

    def failing(**arguments: object) -> object:
        nonlocal is_rewritten
        is_rewritten = True
        raise EndpointConnectionError(endpoint_url="http://store")

    def younger(**arguments: object) -> dict[str, Any]:
        answer = head(**arguments)
        later = timedelta(seconds=2 * is_rewritten)
        return {**answer, "LastModified": answer["LastModified"] + later}

    monkeypatch.setattr(store._client, "head_object", younger)  # type: ignore[attr-defined]
    monkeypatch.setattr(store._once, "delete_object", failing)  # type: ignore[attr-defined]
    assert not await store.delete_if_older("blob", info.modified_s)
    monkeypatch.setattr(store._once, "delete_object", delete)  # type: ignore[attr-defined]
    assert await store.delete_if_older("blob", info.modified_s + 2)
    assert await store.head("blob") is None


@pytest.mark.parametrize("is_written", [True, False])
async def test_the_moves_of_a_tag_tell_whether_a_failed_write_was_one_of_them(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    index = TagAddress("default", "sql", "prod")
    put = store.put_if_match
    tried = 0

    async def overtaken(key: str, data: bytes, etag: str, **options: object) -> str:
        """The server fails the first write, and another's follows before it can be read back."""
        nonlocal tried
        tried += 1
        if tried > 1:
            return await put(key, data, etag)
        if is_written:
            etag = await put(key, data, etag)
        held = decode(TagRecord, (await store.get(key)).data)
        for move_id in ("theirs", "theirs too"):
            held = moved(index, held, (), "another", move_id)
        await put(key, encode(held), etag)
        raise WriteUncertain("failed")

    await documents.create(store, index.key, moved(index, None, (), "me", "first"))
    monkeypatch.setattr(store, "put_if_match", overtaken)
    mine = await documents.change(
        store, index.key, TagRecord, lambda held: moved(index, held, (), "me", "mine")
    )
    found = await documents.read(store, index.key, TagRecord)
    assert mine is not None and found is not None
    assert mine.moves[-1].move_id == "mine" and mine.moves[-1] in found.moves
    order = ["mine", "theirs", "theirs too"] if is_written else ["theirs", "theirs too", "mine"]
    assert [move.move_id for move in found.moves] == ["first", *order]


async def test_a_server_that_checks_no_upload_is_checked_by_the_md5_that_it_answers(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the one of these tests is. One that answers other etags gives no way of checking."""
    await probe(store)
    clients = (store._client, store._once)  # type: ignore[attr-defined]
    for client in clients:
        put = client.put_object

        def damaging(put: Callable[..., object] = put, **arguments: object) -> object:
            return put(**{**arguments, "Body": b"damaged", "ContentMD5": ""})

        monkeypatch.setattr(client, "put_object", damaging)
    with pytest.raises(ObjectStoreError, match="damaged"):
        await store.put("blob", b"data")
    assert await store.head("blob") is None
    with pytest.raises(ObjectStoreError, match="damaged"):
        await store.put_if_absent("doc", b"data")
    assert not await store.find_upload_check("x")  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_damaged", [1, 99])
async def test_a_document_that_was_damaged_on_its_way_is_written_again_or_does_not_exist(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, num_damaged: int
) -> None:
    await probe(store)
    client = store._once  # type: ignore[attr-defined]
    put, left = client.put_object, 0

    def damaging(**arguments: object) -> object:
        nonlocal left
        left -= 1
        if left >= 0:
            arguments |= {"Body": b"damaged", "ContentMD5": ""}
        return put(**arguments)

    monkeypatch.setattr(client, "put_object", damaging)
    left = num_damaged
    if num_damaged == 1:
        etag = await store.put_if_absent("doc", b"first")
        assert (await store.get("doc")).data == b"first"
        left = num_damaged
        await store.put_if_match("doc", b"second", etag)
        assert (await store.get("doc")).data == b"second"
        with pytest.raises(PreconditionFailed):
            await store.put_if_match("doc", b"third", etag)
        return
    with pytest.raises(ObjectStoreError, match="damaged"):
        await store.put_if_absent("doc", b"first")
    assert await store.head("doc") is None


@pytest.mark.parametrize("num_lost", [1, 99])
async def test_a_lost_connection_leaves_no_damaged_document(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, num_lost: int
) -> None:
    await probe(store)
    client = store._once  # type: ignore[attr-defined]
    put, num_sent = client.put_object, 0

    def damaging_and_losing(**arguments: object) -> object:
        nonlocal num_sent
        num_sent += 1
        if num_sent == 1:
            return put(**{**arguments, "Body": b"damaged", "ContentMD5": ""})
        if num_sent <= 1 + num_lost:
            raise EndpointConnectionError(endpoint_url="the line")
        return put(**arguments)

    monkeypatch.setattr(client, "put_object", damaging_and_losing)
    if num_lost == 1:
        await store.put_if_absent("doc", b"first")
        assert (await store.get("doc")).data == b"first"
        return
    with pytest.raises(ObjectStoreError, match="does not answer"):
        await store.put_if_absent("doc", b"first")
    assert await store.head("doc") is None
