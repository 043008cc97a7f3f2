"""Publishing: what an upload becomes, and what it never becomes."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from loraplex.adapter_format import parse_manifest
from loraplex.errors import (
    AdapterNotFound,
    AlreadyExists,
    Blocked,
    DataLoss,
    InvalidAdapter,
    ResourceExhausted,
    Unavailable,
)
from loraplex.refs import parse_ref
from loraplex_services.common.objects import open_store
from loraplex_services.common.redis_url import connect_redis
from loraplex_services.registry import layout
from loraplex_services.registry.access.permissions import Access
from loraplex_services.registry.assembly import Registry, assemble
from loraplex_services.registry.index.catalog import Catalog
from loraplex_services.registry.publish.uploads import Options, fingerprint
from loraplex_services.registry.records import SignatureRecord, TenantRecord
from tests.registry.house import (
    CONFIG,
    TENSORS,
    adapter_files,
    declared,
    one_chunk,
    opened,
    orphans,
    publish,
    tiny_base,
)
from tests.s3_servers import only_files

ROOT = Access("default", "", frozenset({"root", "admin"}))


async def _digest_of(registry: Registry, ref: str) -> str:
    return (await registry.lookup.resolve(parse_ref(ref), ROOT)).version.digest


async def test_an_upload_becomes_version_1_with_the_tag_latest(registry: Registry) -> None:
    done = await publish(registry, "sql", 1)
    assert (done.version.version, done.created) == (1, True)
    found = await registry.lookup.resolve(parse_ref("sql"), ROOT)
    assert found.version == done.version
    assert [tag.tag for tag in found.tags] == ["latest"]


async def test_a_digest_alone_leads_to_every_byte(registry: Registry) -> None:
    done = await publish(registry, "sql", 1)
    raw = (await registry.store.get(layout.blob(done.version.digest))).data
    assert "sha256:" + hashlib.sha256(raw).hexdigest() == done.version.digest
    for file in parse_manifest(raw).files:
        data = (await registry.store.get(layout.blob(file.sha256))).data
        assert hashlib.sha256(data).hexdigest() == file.sha256


@pytest.mark.parametrize("option", [field.name for field in dataclasses.fields(Options)])
def test_uploads_with_different_options_share_no_session(option: str) -> None:
    options, files = Options("default", "sql", ("latest",)), declared(adapter_files(1))
    other = {
        "tags": ("prod",), "labels": {"k": "v"}, "strict": True, "allow_missing": True,
        "visibility": 1, "when_loaded_s": 1.0, "keep_versions": 1, "ttl_s": 1.0,
        "signatures": (SignatureRecord("0" * 64, "{}", "", 0.0),),
    }.get(option, "x")  # fmt: skip
    changed = dataclasses.replace(options, **{option: other})
    assert fingerprint(changed, files, "") != fingerprint(options, files, "")
    assert fingerprint(changed, files, "") == fingerprint(changed, files[::-1], "")


async def test_other_content_becomes_the_next_version_and_takes_latest(registry: Registry) -> None:
    await publish(registry, "sql", 1)
    second = await publish(registry, "sql", 2, "prod")
    assert second.version.version == 2
    assert await _digest_of(registry, "sql") == second.version.digest
    assert await _digest_of(registry, "sql:prod") == second.version.digest


async def test_the_same_content_is_the_same_version_and_moves_the_tags(registry: Registry) -> None:
    first = await publish(registry, "sql", 1)
    await publish(registry, "sql", 2)
    again = await publish(registry, "sql", 1, "prod")
    assert (again.version.version, again.created) == (1, False)
    assert await _digest_of(registry, "sql:latest") == first.version.digest
    assert await _digest_of(registry, "sql:prod") == first.version.digest


async def test_the_same_weights_in_other_spelling_of_the_config_are_the_same_content(
    registry: Registry,
) -> None:
    first = await publish(registry, "sql", 1)
    files = adapter_files(1)
    files[CONFIG] = json.dumps(json.loads(files[CONFIG]), indent=4, sort_keys=True).encode()
    done = await registry.publisher.finish(await opened(registry, "sql", files))
    assert (done.version.version, done.version.digest) == (1, first.version.digest)


async def test_another_readme_is_another_version_with_the_same_digest(registry: Registry) -> None:
    first = await publish(registry, "sql", 1)
    files = {**adapter_files(1), "README.md": b"# What it does"}
    done = await registry.publisher.finish(await opened(registry, "sql", files))
    assert (done.version.version, done.version.digest) == (2, first.version.digest)


async def test_the_same_content_for_another_base_is_another_version(registry: Registry) -> None:
    await registry.bases.register(tiny_base("example/twin"), replace=False)
    first = await publish(registry, "sql", 1, base_id="example/tiny")
    second = await publish(registry, "sql", 1, base_id="example/twin")
    again = await publish(registry, "sql", 1, base_id="example/twin")
    assert (second.version.version, second.version.digest) == (2, first.version.digest)
    assert (again.version.version, again.created) == (2, False)
    found = await registry.lookup.resolve(parse_ref("sql"), ROOT)
    assert found.version.base_id == "example/twin"


async def test_no_latest_leaves_latest_alone(registry: Registry) -> None:
    first = await publish(registry, "sql", 1)
    await publish(registry, "sql", 2, "canary", latest=False)
    assert await _digest_of(registry, "sql") == first.version.digest


async def test_finishing_twice_gives_the_same_answer(registry: Registry) -> None:
    session = await opened(registry, "sql", adapter_files(1))
    first = await registry.publisher.finish(session)
    assert await registry.publisher.finish(session) == first


async def test_finishing_at_the_same_time_from_two_replicas_gives_one_version(
    registry: Registry,
) -> None:
    session = await opened(registry, "sql", adapter_files(1))
    done = await asyncio.gather(*(registry.publisher.finish(session) for _ in range(4)))
    assert {finished.version.version for finished in done} == {1}
    assert len(await registry.versions.of("default", "sql")) == 1


async def test_concurrent_uploads_of_one_name_get_distinct_versions(registry: Registry) -> None:
    done = await asyncio.gather(*(publish(registry, "sql", seed) for seed in range(8)))
    assert sorted(finished.version.version for finished in done) == list(range(1, 9))
    newest = max(done, key=lambda finished: finished.version.version)
    assert await _digest_of(registry, "sql") == newest.version.digest


async def test_an_incomplete_upload_cannot_be_finished(registry: Registry) -> None:
    session = await opened(registry, "sql", adapter_files(1))
    async for info in registry.store.list_objects(layout.upload_parts(session.upload_id)):
        await registry.store.delete(info.key)
    with pytest.raises(Blocked, match=r"adapter_model.safetensors \(0/"):
        await registry.publisher.finish(session)


async def test_a_file_with_other_bytes_than_declared_must_be_sent_again(
    registry: Registry,
) -> None:
    files = adapter_files(1)
    session = await opened(registry, "sql", files)
    await registry.uploads.reopen(session.upload_id, TENSORS)
    await registry.uploads.receive(session, TENSORS, 0, one_chunk(files[TENSORS][::-1]))
    with pytest.raises(DataLoss, match="declared sha256"):
        await registry.publisher.finish(session)
    await registry.uploads.receive(session, TENSORS, 0, one_chunk(files[TENSORS]))
    assert (await registry.publisher.finish(session)).version.version == 1


@pytest.mark.parametrize(
    ("config", "field"),
    [({"use_qalora": True}, f"{CONFIG}:use_qalora"), ({"r": 8}, TENSORS)],
)
async def test_a_refused_adapter_leaves_nothing_visible(
    registry: Registry, config: dict[str, object], field: str
) -> None:
    session = await opened(registry, "sql", adapter_files(1, **config))
    with pytest.raises(InvalidAdapter) as refused:
        await registry.publisher.finish(session)
    assert refused.value.violations[0].field.startswith(field)
    with pytest.raises(AdapterNotFound):
        await _digest_of(registry, "sql")
    assert await orphans(registry) == set()


async def test_a_nan_is_refused_with_the_name_of_its_tensor(registry: Registry) -> None:
    files = adapter_files(1)
    files[TENSORS] = files[TENSORS][:-4] + b"\x00\x00\xc0\x7f"
    session = await opened(registry, "sql", files)
    with pytest.raises(InvalidAdapter, match="NaN") as refused:
        await registry.publisher.finish(session)
    assert "lora_B" in refused.value.violations[0].field
    assert [info.key async for info in registry.store.list_objects(layout.BLOBS)] == []
    left = [info.key async for info in registry.store.list_objects(layout.UPLOADS)]
    names_left = {key.rpartition("/")[2] for key in left}
    assert names_left == {"session.json", "refused.json"}, "its bytes went with the refusal"
    with pytest.raises(InvalidAdapter) as again:
        await registry.publisher.finish(session)
    assert again.value.violations == refused.value.violations, "asked again, it says the same"
    with pytest.raises(InvalidAdapter, match="NaN"):
        await registry.publisher.finish(await opened(registry, "sql", files))


async def test_what_was_refused_is_looked_at_again_once_its_bytes_are_sent_again(
    registry: Registry,
) -> None:
    session = await opened(registry, "sql", adapter_files(1), base_id="another")
    with pytest.raises(InvalidAdapter, match="registered bases"):
        await registry.publisher.finish(session)
    await registry.bases.register(tiny_base("another"), replace=False)
    again = await opened(registry, "sql", adapter_files(1), base_id="another")
    assert again.upload_id == session.upload_id
    assert (await registry.publisher.finish(again)).version.base_id == "another"


async def test_an_adapter_may_not_take_the_id_of_a_base(registry: Registry) -> None:
    await registry.bases.register(tiny_base("tiny"), replace=False)
    with pytest.raises(AlreadyExists, match="base"):
        await registry.bases.check_upload("default", "tiny", "")


async def test_a_base_may_not_take_the_name_of_an_adapter(registry: Registry) -> None:
    await publish(registry, "sql", 1)
    with pytest.raises(AlreadyExists, match="adapter"):
        await registry.bases.register(tiny_base("sql"), replace=False)


async def test_a_base_keeps_its_largest_rank_when_it_is_registered_without_one(
    registry: Registry,
) -> None:
    by_gateway = dataclasses.replace(tiny_base("ranked"), max_lora_rank=16)
    await registry.bases.register(by_gateway, replace=False)
    by_hand = await registry.bases.register(tiny_base("ranked"), replace=False)
    assert by_hand.max_lora_rank == 16


async def test_without_any_base_an_upload_waits_for_one(tmp_path: Path, metadata_url: str) -> None:
    catalog = Catalog(connect_redis(metadata_url))
    empty = assemble(open_store(f"file://{tmp_path}/empty"), catalog)
    await empty.indexer.start()
    with pytest.raises(Unavailable, match="no base is registered"):
        await empty.bases.check_upload("default", "sql", "")
    await catalog.close()


async def test_of_several_bases_the_one_named_in_the_config_is_taken(registry: Registry) -> None:
    await registry.bases.register(tiny_base("other"), replace=False)
    assert (await publish(registry, "sql", 1)).version.base_id == "example/tiny"


@pytest.mark.parametrize("folder", ["/data/models/other", "./other/", "runs/1/other"])
async def test_a_folder_in_the_config_means_the_base_that_has_its_last_name(
    registry: Registry, folder: str
) -> None:
    await registry.bases.register(tiny_base("other"), replace=False)
    files = adapter_files(1, base_model_name_or_path=folder)
    done = await registry.publisher.finish(await opened(registry, "sql", files, strict=True))
    assert done.version.base_id == "other"


async def test_a_folder_in_the_config_means_the_base_that_has_its_last_name_as_an_alias(
    registry: Registry,
) -> None:
    renamed = dataclasses.replace(tiny_base("ours"), aliases=("other",))
    await registry.bases.register(renamed, replace=False)
    files = adapter_files(1, base_model_name_or_path="/data/models/other")
    done = await registry.publisher.finish(await opened(registry, "sql", files, strict=True))
    assert done.version.base_id == "ours"


async def test_an_ambiguous_base_is_refused_listing_the_known_ones(registry: Registry) -> None:
    await registry.bases.register(tiny_base("other"), replace=False)
    files = adapter_files(1, base_model_name_or_path="./somewhere")
    with pytest.raises(InvalidAdapter, match="'example/tiny', 'other'"):
        await registry.publisher.finish(await opened(registry, "sql", files))


async def test_the_only_base_is_taken_with_a_warning_where_the_config_names_another(
    registry: Registry,
) -> None:
    files = adapter_files(1, base_model_name_or_path="./somewhere")
    done = await registry.publisher.finish(await opened(registry, "sql", files))
    assert [w.field for w in done.version.warnings] == [f"{CONFIG}:base_model_name_or_path"]
    with pytest.raises(InvalidAdapter, match="names another model"):
        await registry.publisher.finish(await opened(registry, "sql", files, strict=True))


async def test_a_quantised_copy_of_a_base_leads_to_the_base_with_a_warning_naming_both(
    registry: Registry,
) -> None:
    await registry.bases.register(tiny_base("other"), replace=False)
    named = "unsloth/tiny-unsloth-bnb-4bit"
    files = adapter_files(1, base_model_name_or_path=named)
    done = await registry.publisher.finish(await opened(registry, "sql", files))
    assert done.version.base_id == "example/tiny"
    (warning,) = done.version.warnings
    assert warning.value == named
    assert "copy of base 'example/tiny'" in warning.description
    with pytest.raises(InvalidAdapter, match="copy of base"):
        await registry.publisher.finish(await opened(registry, "sql", files, strict=True))


async def test_quotas_count_versions_and_bytes(registry: Registry) -> None:
    await registry.tenants.set(TenantRecord("default", max_versions=1))
    await publish(registry, "sql", 1)
    with pytest.raises(ResourceExhausted, match="1 of 1 versions"):
        await publish(registry, "sql", 2)
    assert not (await publish(registry, "sql", 1)).created
    used_bytes, _ = await registry.catalog.usage("default")
    await registry.tenants.set(TenantRecord("default", max_bytes=used_bytes + 1))
    with pytest.raises(ResourceExhausted, match="bytes"):
        await publish(registry, "sql", 2)


async def test_a_known_file_need_not_be_sent_again_by_its_tenant_alone(registry: Registry) -> None:
    files = adapter_files(1)
    await publish(registry, "sql", 1)
    session = await opened(registry, "other", files)
    await registry.uploads.reopen(session.upload_id, TENSORS)
    assert (await registry.publisher.finish(session)).version.version == 1
    foreign = await opened(registry, "acme/sql", files)
    await registry.uploads.reopen(foreign.upload_id, TENSORS)
    with pytest.raises(Blocked):
        await registry.publisher.finish(foreign)


@only_files
async def test_old_blobs_are_written_again_before_they_are_referred_to(
    registry: Registry, objects_folder: Path
) -> None:
    done = await publish(registry, "sql", 1)
    key = layout.blob(done.version.digest)
    long_ago = time.time() - 13 * 3600
    os.utime(objects_folder / key, (long_ago, long_ago))
    await publish(registry, "other", 1)
    info = await registry.store.head(key)
    assert info is not None and info.modified_s > long_ago + 3600


async def test_opening_the_same_upload_again_finds_the_open_session(registry: Registry) -> None:
    files = adapter_files(1)
    session = await opened(registry, "sql", files)
    assert (await opened(registry, "sql", files)).upload_id == session.upload_id
    await registry.publisher.finish(session)
    assert (await opened(registry, "sql", files)).upload_id != session.upload_id


async def test_finished_uploads_keep_no_parts(registry: Registry) -> None:
    await publish(registry, "sql", 1)
    keys = [info.key async for info in registry.store.list_objects(layout.UPLOADS)]
    assert not any("/parts/" in key for key in keys)


async def test_every_publication_is_in_the_audit_log(registry: Registry) -> None:
    done = await publish(registry, "sql", 1, "prod")
    entries, more = await registry.audit.page("default", 10)
    assert [(e.actor, e.action, e.subject, e.digest) for e in entries] == [
        ("tester", "version.publish", "default/sql:v1", done.version.digest)
    ]
    assert more == ""


async def test_a_name_stays_as_it_was_first_spelled_and_is_found_in_any_case(
    registry: Registry,
) -> None:
    first = await publish(registry, "policy", 1, spelling="Policy-Step")
    assert (first.version.name, first.version.shown_name) == ("policy", "Policy-Step")
    second = await publish(registry, "policy", 2, spelling="POLICY-step")
    assert (second.version.version, second.version.shown_name) == (2, "Policy-Step")
    for spelled in ("policy", "Policy", "POLICY:latest"):
        found = await registry.lookup.resolve(parse_ref(spelled), ROOT)
        assert found.version.version == 2


async def test_a_base_s_id_is_taken_in_any_case(registry: Registry) -> None:
    [base] = await registry.bases.summaries()
    with pytest.raises(AlreadyExists, match="id of a base"):
        await registry.bases.check_upload("default", base.base_id.lower(), "")
