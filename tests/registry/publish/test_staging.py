"""Staged moves: pending alongside the old targets, then moved once, or dropped with a reason."""

from __future__ import annotations

import asyncio

import pytest

from loraplex.api.registry import TagTarget
from loraplex.errors import AdapterNotFound, Conflict
from loraplex.refs import parse_ref
from loraplex_services.registry.access.permissions import Access
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.index.watch import watch
from loraplex_services.registry.publish import staging
from loraplex_services.registry.publish.tags import TagAddress
from loraplex_services.registry.records import TagRecord
from tests.registry.house import publish

ROOT = Access("default", "", frozenset({"root", "admin"}))
PROD = TagAddress("default", "sql", "prod")


async def _served(registry: Registry) -> int:
    return (await registry.lookup.resolve(parse_ref("sql:prod"), ROOT, "")).version.version


async def _shown(registry: Registry) -> TagRecord:
    found = await registry.catalog.find("default/sql", "all")
    return next(tag for tag in found.tags if tag.tag == "prod")


@pytest.fixture
async def staged(registry: Registry) -> TagRecord:
    """`prod` at v1, v2 pending."""
    for seed in range(2):
        await publish(registry, "sql", seed)
    await registry.tags.set(PROD, [TagTarget(1, "")], None, "me")
    return await registry.staging.begin(PROD, [TagTarget(2, "")], None, "me", 60.0)


async def test_old_target_serves_until_the_move_is_finished(
    registry: Registry, staged: TagRecord
) -> None:
    assert await _served(registry) == 1
    assert [target.version for target in (await _shown(registry)).pending] == [2]
    done = await registry.staging.finish(PROD, staged.generation, "", "gateway")
    assert await _served(registry) == 2
    assert (done.pending, done.pending_reason) == ((), "")
    assert done.moves[-1].mover == "me"


async def test_of_many_gateways_exactly_one_finishes(registry: Registry, staged: TagRecord) -> None:
    async def finish() -> bool:
        try:
            await registry.staging.finish(PROD, staged.generation, "", "gateway")
            return True
        except Conflict:
            return False

    assert sum(await asyncio.gather(*(finish() for _ in range(4)))) == 1
    assert len((await registry.tags.read(PROD) or staged).moves) == 2


async def test_failure_leaves_the_tag_where_it_was_with_the_reason(
    registry: Registry, staged: TagRecord
) -> None:
    await registry.staging.finish(PROD, staged.generation, "damaged bytes", "gateway")
    assert await _served(registry) == 1
    shown = await _shown(registry)
    assert shown.pending == ()
    assert "v2" in shown.pending_reason and "damaged bytes" in shown.pending_reason
    await registry.tags.set(PROD, [TagTarget(2, "")], None, "me")
    assert (await _shown(registry)).pending_reason == ""


async def test_move_by_hand_cancels_what_is_pending(registry: Registry, staged: TagRecord) -> None:
    await publish(registry, "sql", 7)
    await registry.tags.set(PROD, [TagTarget(3, "")], None, "me")
    with pytest.raises(Conflict):
        await registry.staging.finish(PROD, staged.generation, "", "gateway")
    assert await _served(registry) == 3


async def test_staging_again_counts_with_its_time_and_the_present_target_cancels(
    registry: Registry, staged: TagRecord
) -> None:
    again = await registry.staging.begin(PROD, [TagTarget(2, "")], None, "me", 5.0)
    assert again.generation > staged.generation
    assert again.pending_until_s < staged.pending_until_s
    kept = await registry.staging.begin(PROD, [TagTarget(1, "")], None, "me", 60.0)
    assert (kept.pending, kept.targets) == ((), staged.targets)
    assert (await _shown(registry)).pending_reason == ""


async def test_version_deleted_meanwhile_is_never_moved_to(
    registry: Registry, staged: TagRecord
) -> None:
    await registry.deletion.version("default", "sql", 2, "me", force=True, purge=False)
    done = await registry.staging.finish(PROD, staged.generation, "", "gateway")
    assert await _served(registry) == 1
    assert "was not taken" in done.pending_reason
    [entry, *_], _ = await registry.audit.page("default", 1)
    assert entry.action == "tag.drop"


async def test_too_late_is_too_late(
    registry: Registry, staged: TagRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_s = staged.pending_until_s + 1
    monkeypatch.setattr(staging, "now_s", lambda: late_s)
    done = await registry.staging.finish(PROD, staged.generation, "", "gateway")
    assert await _served(registry) == 1
    assert "in time" in done.pending_reason


async def test_what_no_gateway_takes_up_is_given_up_with_the_reason(
    registry: Registry, staged: TagRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await registry.staging.expire() == 0
    monkeypatch.setattr(staging, "now_s", lambda: staged.pending_until_s + 1)
    assert await registry.staging.expire() == 0, "gateways may still say why"
    monkeypatch.setattr(staging, "now_s", lambda: staged.pending_until_s + staging.GATEWAYS_S)
    gave_up = await asyncio.gather(*(registry.staging.expire() for _ in range(3)))
    assert sum(gave_up) == 1
    assert await _served(registry) == 1
    shown = await _shown(registry)
    assert shown.pending == () and staging.NOBODY in shown.pending_reason
    assert await registry.staging.expire() == 0


async def test_late_moves_are_known_after_the_index_was_lost_too(
    registry: Registry, staged: TagRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    await registry.indexer.rebuild()
    late_s = staged.pending_until_s + staging.GATEWAYS_S
    assert await registry.catalog.staged_until(late_s) == [("default/sql", "prod")]
    await registry.tags.set(PROD, [TagTarget(2, "")], None, "me")
    assert await registry.catalog.staged_until(late_s) == []


async def test_new_tag_can_be_staged_and_answers_nothing_meanwhile(registry: Registry) -> None:
    await publish(registry, "sql", 0)
    staged = await registry.staging.begin(PROD, [TagTarget(1, "")], "none", "me", 60.0)
    with pytest.raises(AdapterNotFound):
        await _served(registry)
    assert [target.version for target in (await _shown(registry)).pending] == [1]
    await publish(registry, "sql", 1, "other")
    await registry.staging.finish(PROD, staged.generation, "", "gateway")
    assert await _served(registry) == 1


async def test_watchers_see_pending_targets_in_events_and_snapshots(
    registry: Registry, staged: TagRecord
) -> None:
    async def pending_in_snapshot() -> list[list[int]]:
        seen = []
        async for batch in watch(registry.catalog, ""):
            for event in batch.events:
                if event["kind"] == "tag" and event["doc"]["tag"] == "prod":
                    seen.append([target["version"] for target in event["doc"]["pending"]])
            if batch.ends_snapshot:
                break
        return seen

    assert (await pending_in_snapshot())[-1] == [2]
    token = ""
    async for batch in watch(registry.catalog, ""):
        if batch.ends_snapshot:
            token = batch.token
            break
    again = await registry.staging.begin(
        PROD, [TagTarget(1, ""), TagTarget(2, "")], None, "me", 60.0
    )
    async for batch in watch(registry.catalog, token):
        if batch.events:
            assert [e["doc"]["generation"] for e in batch.events] == [again.generation]
            assert len(batch.events[0]["doc"]["pending"]) == 2
            break
