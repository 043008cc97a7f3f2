"""Tags: compare-and-set, splits, rollback, history; and what deleting does to them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loraplex.api.registry import TagTarget
from loraplex.errors import AdapterNotFound, Blocked, Conflict, InvalidRequest, NotFound
from loraplex.refs import parse_ref
from loraplex_services.registry.access.permissions import Access
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.publish.tags import TagAddress, Tags
from loraplex_services.registry.records import MAX_TAG_MOVES, TagRecord
from tests.registry.house import publish

ROOT = Access("default", "", frozenset({"root", "admin"}))
PROD = TagAddress("default", "sql", "prod")


async def _versions(registry: Registry, count: int) -> list[str]:
    """Publish versions 1 to `count`; returns their digests."""
    return [(await publish(registry, "sql", seed)).version.digest for seed in range(count)]


async def _version_of(registry: Registry, ref: str, key: str = "") -> int:
    return (await registry.lookup.resolve(parse_ref(ref), ROOT, key)).version.version


async def test_a_tag_moves_only_from_what_was_expected(registry: Registry) -> None:
    first, second = await _versions(registry, 2)
    await registry.tags.set(PROD, [TagTarget(1, "")], "none", "me")
    with pytest.raises(Conflict, match="expected none"):
        await registry.tags.set(PROD, [TagTarget(2, "")], "none", "me")
    with pytest.raises(Conflict):
        await registry.tags.set(PROD, [TagTarget(2, "")], second, "me")
    record = await registry.tags.set(PROD, [TagTarget(2, "")], first, "me")
    assert (record.generation, record.targets[0].digest) == (2, second)
    assert await _version_of(registry, "sql:prod") == 2


async def test_of_racing_moves_with_one_expectation_exactly_one_wins(registry: Registry) -> None:
    first, *_ = await _versions(registry, 4)
    await registry.tags.set(PROD, [TagTarget(1, "")], None, "me")

    async def move(version: int) -> bool:
        try:
            await registry.tags.set(PROD, [TagTarget(version, "")], first, "me")
            return True
        except Conflict:
            return False

    assert sum(await asyncio.gather(*(move(version) for version in (2, 3, 4)))) == 1


async def test_whoever_lost_a_race_reads_what_beat_him(registry: Registry) -> None:
    """The winner changed the object and has not informed the index yet."""
    await _versions(registry, 2)
    await registry.tags.set(PROD, [TagTarget(1, "")], None, "me")
    await registry.tags.move(PROD, lambda _: [TagTarget(2, "sha256:x")], "winner", "move-1")
    with pytest.raises(Conflict):
        await registry.tags.set(PROD, [TagTarget(1, "")], "none", "me")
    assert await _version_of(registry, "sql:prod") == 2


async def test_a_split_shares_keys_by_weight_and_keeps_each_key(registry: Registry) -> None:
    await _versions(registry, 2)
    await registry.tags.set(PROD, [TagTarget(1, "", 90), TagTarget(2, "", 10)], None, "me")
    drawn = [await _version_of(registry, "sql:prod", f"user-{n}") for n in range(300)]
    assert 10 <= drawn.count(2) <= 60
    again = [await _version_of(registry, "sql:prod", f"user-{n}") for n in range(300)]
    assert drawn == again


async def test_rollback_returns_to_the_target_before(registry: Registry) -> None:
    await _versions(registry, 3)
    for version in (1, 3):
        await registry.tags.set(PROD, [TagTarget(version, "")], None, "me")
    record = await registry.tags.rollback(PROD, 0, None, "me")
    assert [target.version for target in record.targets] == [1]
    record = await registry.tags.rollback(PROD, 2, None, "me")
    assert [target.version for target in record.targets] == [2]


async def test_rollback_passes_over_versions_that_were_deleted(registry: Registry) -> None:
    await _versions(registry, 3)
    for version in (1, 2, 3):
        await registry.tags.set(PROD, [TagTarget(version, "")], None, "me")
    await registry.deletion.version("default", "sql", 2, "me", force=False, purge=False)
    record = await registry.tags.rollback(PROD, 0, None, "me")
    assert [target.version for target in record.targets] == [1]
    assert await _version_of(registry, "sql:prod") == 1
    with pytest.raises(AdapterNotFound):
        await registry.tags.rollback(PROD, 2, None, "me")
    assert await _version_of(registry, "sql:prod") == 1


async def test_a_tag_that_moved_while_its_target_was_deleted_points_nowhere(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version dies after the mover looked at it and before the tag is written."""
    await _versions(registry, 2)
    await registry.tags.set(PROD, [TagTarget(1, "")], None, "me")
    write = registry.tags.move

    async def late(*args: Any) -> TagRecord | None:
        monkeypatch.setattr(Tags, "move", staticmethod(write))
        await registry.deletion.version("default", "sql", 2, "you", force=False, purge=False)
        return await write(*args)

    monkeypatch.setattr(Tags, "move", staticmethod(late))
    record = await registry.tags.set(PROD, [TagTarget(2, "")], None, "me")
    assert record.targets == ()
    with pytest.raises(AdapterNotFound):
        await _version_of(registry, "sql:prod")


async def test_a_second_rollback_goes_further_back_and_a_move_begins_anew(
    registry: Registry,
) -> None:
    await _versions(registry, 3)
    split = [TagTarget(1, ""), TagTarget(2, "")]
    for targets in ([TagTarget(1, "")], [TagTarget(2, "")], split):
        await registry.tags.set(PROD, targets, None, "me")

    async def back() -> list[int]:
        record = await registry.tags.rollback(PROD, 0, None, "me")
        return [target.version for target in record.targets]

    assert await back() == [2]
    assert await back() == [1]
    with pytest.raises(NotFound, match=r"no earlier target to go back to; .*--to vN"):
        await back()
    await registry.tags.set(PROD, [TagTarget(3, "")], None, "me")
    await registry.tags.set(PROD, [TagTarget(1, "")], None, "me")
    assert await back() == [3]
    assert await back() == [1]


async def test_rollback_without_a_past_is_refused(registry: Registry) -> None:
    await _versions(registry, 1)
    await registry.tags.set(PROD, [TagTarget(1, "")], None, "me")
    with pytest.raises(NotFound, match=r"no earlier target to go back to; .*--to vN"):
        await registry.tags.rollback(PROD, 0, None, "me")


async def test_rollback_of_a_tag_that_never_was_is_refused(registry: Registry) -> None:
    await _versions(registry, 1)
    with pytest.raises(NotFound, match=r"no adapter .default/sql:prod"):
        await registry.tags.rollback(PROD, 0, None, "me")


async def test_a_tag_keeps_the_name_of_its_adapter_though_a_move_does_not_spell_it(
    registry: Registry,
) -> None:
    await publish(registry, "sql", 1, "prod", spelling="SQL")
    await publish(registry, "sql", 2, spelling="SQL")
    unspelled = TagAddress("default", "sql", "prod", "sql")
    assert (await registry.tags.set(unspelled, [TagTarget(2, "")], None, "me")).shown_name == "SQL"


async def test_history_keeps_the_last_moves_oldest_first(registry: Registry) -> None:
    await _versions(registry, 2)
    for turn in range(MAX_TAG_MOVES + 4):
        await registry.tags.set(PROD, [TagTarget(1 + turn % 2, "")], None, f"mover-{turn}")
    record = await registry.tags.read(PROD)
    assert record is not None
    assert [move.generation for move in record.moves] == list(range(5, MAX_TAG_MOVES + 5))
    assert record.moves[-1].mover == f"mover-{MAX_TAG_MOVES + 3}"


async def test_a_deleted_tag_is_gone_and_goes_on_counting(registry: Registry) -> None:
    await _versions(registry, 1)
    await registry.tags.set(PROD, [TagTarget(1, "")], None, "me")
    await registry.tags.set(PROD, [], None, "me")
    with pytest.raises(AdapterNotFound):
        await _version_of(registry, "sql:prod")
    with pytest.raises(AdapterNotFound, match="sql:prod"):
        await registry.tags.set(PROD, [], None, "me")
    assert (await registry.tags.set(PROD, [TagTarget(1, "")], "none", "me")).generation == 3


@pytest.mark.parametrize("target", [TagTarget(7, ""), TagTarget(2, "")])
async def test_a_tag_cannot_point_at_what_is_not_there(
    registry: Registry, target: TagTarget
) -> None:
    await _versions(registry, 2)
    await registry.deletion.version("default", "sql", 2, "me", force=False, purge=False)
    with pytest.raises(AdapterNotFound):
        await registry.tags.set(PROD, [target], None, "me")


async def test_weights_are_positive(registry: Registry) -> None:
    await _versions(registry, 1)
    with pytest.raises(InvalidRequest, match="at least 1"):
        await registry.tags.set(PROD, [TagTarget(1, "", 0)], None, "me")


async def test_a_tagged_version_is_deleted_only_by_force_and_takes_its_tags(
    registry: Registry,
) -> None:
    await _versions(registry, 2)
    await registry.tags.set(PROD, [TagTarget(1, "", 1), TagTarget(2, "", 1)], None, "me")
    with pytest.raises(Blocked, match="prod"):
        await registry.deletion.version("default", "sql", 1, "me", force=False, purge=False)
    assert await _version_of(registry, "sql:v1") == 1
    await registry.deletion.version("default", "sql", 1, "me", force=True, purge=False)
    for ref in ("sql:v1", "sql:prod"):
        with pytest.raises(AdapterNotFound):
            await _version_of(registry, ref)
    assert await _version_of(registry, "sql:v2") == 2


async def test_latest_falls_back_to_the_newest_version_left(registry: Registry) -> None:
    await _versions(registry, 3)
    await registry.deletion.version("default", "sql", 3, "me", force=False, purge=False)
    assert await _version_of(registry, "sql") == 2
    await registry.deletion.version("default", "sql", 1, "me", force=False, purge=False)
    assert await _version_of(registry, "sql") == 2
    await registry.deletion.version("default", "sql", 2, "me", force=False, purge=False)
    with pytest.raises(AdapterNotFound):
        await _version_of(registry, "sql")


async def test_a_version_number_is_never_used_again(registry: Registry) -> None:
    await _versions(registry, 2)
    await registry.deletion.version("default", "sql", 2, "me", force=False, purge=True)
    with pytest.raises(AdapterNotFound):
        await registry.deletion.version("default", "sql", 2, "me", force=False, purge=False)
    again = await publish(registry, "sql", 1)
    assert (again.version.version, again.created) == (3, True)


async def test_a_digest_means_an_older_version_once_the_newer_is_deleted(
    registry: Registry,
) -> None:
    (digest,) = await _versions(registry, 1)
    await registry.deletion.version("default", "sql", 1, "me", force=False, purge=False)
    await publish(registry, "sql", 0)
    assert await _version_of(registry, f"sql@{digest}") == 2
    await registry.deletion.version("default", "sql", 2, "me", force=False, purge=False)
    with pytest.raises(AdapterNotFound):
        await _version_of(registry, f"sql@{digest}")


async def test_deleting_all_takes_every_version_and_tag(registry: Registry) -> None:
    await _versions(registry, 2)
    await registry.tags.set(PROD, [TagTarget(1, "")], None, "me")
    deleted = await registry.deletion.adapter("default", "sql", "me", purge=False)
    assert [record.version for record in deleted] == [1, 2]
    assert (await registry.catalog.find("default/sql", "all")).tags == ()
    assert await registry.catalog.usage("default") == (0, 0)
