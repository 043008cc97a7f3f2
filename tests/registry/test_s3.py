"""The registry on an S3 store: the same life, through conditional puts and multipart uploads."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator

import boto3
import pytest
from moto.server import ThreadedMotoServer

from loraplex.errors import AdapterNotFound
from loraplex.refs import parse_ref
from services.common.objects import ObjectStore, PreconditionFailed, open_store
from services.common.objects import probe as probe_module
from services.common.objects.probe import UnsafeStore, probe
from services.common.redis_url import connect_redis
from services.registry import layout
from services.registry.access import Access
from services.registry.assembly import Registry, assemble
from services.registry.catalog import Catalog
from services.registry.downloads import chunks_of
from services.registry.gc import Collector
from services.registry.records import Target
from services.registry.tags import Place
from tests.registry.house import orphans, publish, tiny_base

ROOT = Access("default", "", frozenset({"root", "admin"}))


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
async def store(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ObjectStore]:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    bucket = f"b-{secrets.token_hex(6)}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    opened = open_store(f"s3://{bucket}/house")
    yield opened
    await opened.close()


@pytest.fixture
async def house(store: ObjectStore, metadata_url: str) -> AsyncIterator[Registry]:
    catalog = Catalog(connect_redis(metadata_url))
    assembled = assemble(store, catalog)
    await assembled.indexer.start()
    await assembled.bases.register(tiny_base(), replace=False)
    yield assembled
    await catalog.close()


async def test_versions_tags_deletion_and_collection(house: Registry) -> None:
    first = await publish(house, "sql", 1, "prod")
    second = await publish(house, "sql", 2)
    await house.tags.set(Place("default", "sql", "prod"), [Target(2, "")], None, "me")
    found = await house.lookup.resolve(parse_ref("sql:prod"), ROOT)
    assert found.version.digest == second.version.digest
    read = sum([len(chunk.data) async for chunk in chunks_of(house.store, found.version)])
    assert read == second.version.size_bytes
    await house.deletion.version("default", "sql", 1, "me", force=False, purge=True)
    await Collector(house.store, min_age_s=0.0, session_max_age_s=0.0).collect()
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
