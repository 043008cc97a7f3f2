"""Seeded concurrent histories over three replicas, checked against what a single one would do."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import pytest

from loraplex.api.registry import TagTarget
from loraplex.errors import AdapterNotFound, Conflict
from loraplex.refs import parse_ref
from loraplex_services.common.redis_url import connect_redis
from loraplex_services.registry.access.permissions import Access
from loraplex_services.registry.assembly import Registry, assemble
from loraplex_services.registry.index import feed as feed_module
from loraplex_services.registry.index.catalog import Catalog
from loraplex_services.registry.index.watch import watch
from loraplex_services.registry.publish.tags import TagAddress
from tests.registry.house import publish
from tests.registry.linearizability import Operation, is_linearizable
from tests.s3_servers import proven_store

ROOT = Access("default", "", frozenset({"root", "admin"}))
TAGS = ("latest", "prod")
CLIENTS = 5
TURNS = 30


@pytest.fixture
async def replicas(
    registry: Registry, objects_url: str, metadata_url: str
) -> AsyncIterator[list[Registry]]:
    """Three registries on one store and one Redis."""
    houses = [registry]
    for _ in range(2):
        catalog = Catalog(connect_redis(metadata_url))
        houses.append(assemble(await proven_store(objects_url), catalog))
    yield houses
    for house in houses[1:]:
        await house.catalog.close()


def test_the_checker_accepts_overlapping_orders_and_refuses_time_travel() -> None:
    write = Operation("write", 0, 10, value=1)
    assert is_linearizable([write, Operation("read", 1, 2), Operation("read", 3, 4, value=1)])
    assert not is_linearizable([write, Operation("read", 1, 2, value=1), Operation("read", 3, 4)])
    assert not is_linearizable([Operation("write", 0, 1, value=1), Operation("read", 2, 3)])
    lost = Operation("write", 0, math.inf, value=1)
    assert is_linearizable([lost, Operation("read", 5, 6, value=1)])
    assert is_linearizable([lost, Operation("read", 5, 6)])
    swaps = [
        Operation("swap", 0, 9, value=number, expected=None, succeeded=True) for number in (1, 2)
    ]
    assert not is_linearizable(swaps)


class History:
    """What clients did and saw, per tag."""

    def __init__(self) -> None:
        self.operations: dict[str, list[Operation]] = defaultdict(list)
        self.digests: dict[int, str] = {}
        self.published = 0

    async def client(self, house: Registry, rng: random.Random) -> None:
        """One client at one replica."""
        for _ in range(TURNS):
            tag = rng.choice(TAGS)
            kind = rng.choice(("read",) * 6 + ("swap", "swap", "write", "write", "upload"))
            await getattr(self, f"_{kind}")(house, rng, tag)
            await asyncio.sleep(rng.random() * 0.003)

    async def _read(self, house: Registry, rng: random.Random, tag: str) -> None:
        called = time.monotonic()
        value = await version_of(house, tag)
        self._note(tag, Operation("read", called, time.monotonic(), value))

    async def _write(self, house: Registry, rng: random.Random, tag: str) -> None:
        if not self.digests:
            return
        version = rng.choice(list(self.digests))
        called = time.monotonic()
        await house.tags.set(TagAddress("default", "sql", tag), [TagTarget(version, "")], None, "")
        self._note(tag, Operation("write", called, time.monotonic(), version))

    async def _swap(self, house: Registry, rng: random.Random, tag: str) -> None:
        if not self.digests:
            return
        version, expected = rng.choice(list(self.digests)), rng.choice([*self.digests, None])
        expect = self.digests[expected] if expected is not None else "none"
        called = time.monotonic()
        try:
            place = TagAddress("default", "sql", tag)
            await house.tags.set(place, [TagTarget(version, "")], expect, "")
            succeeded = True
        except Conflict:
            succeeded = False
        operation = Operation("swap", called, time.monotonic(), version, expected, succeeded)
        self._note(tag, operation)

    async def _upload(self, house: Registry, rng: random.Random, tag: str) -> None:
        """Moves latest. A newer upload at the same time may have taken it first: then it is as if
        this one had moved it just before."""
        self.published += 1
        called = time.monotonic()
        done = await publish(house, "sql", self.published)
        self.digests[done.version.version] = done.version.digest
        value = done.version.version
        self._note("latest", Operation("write", called, time.monotonic(), value))

    def _note(self, tag: str, operation: Operation) -> None:
        self.operations[tag].append(operation)


async def version_of(house: Registry, tag: str) -> int | None:
    """The version behind a tag of `sql`."""
    try:
        return (await house.lookup.resolve(parse_ref(f"sql:{tag}"), ROOT)).version.version
    except AdapterNotFound:
        return None


async def _watch(house: Registry, events: list[dict[str, Any]]) -> None:
    async for batch in watch(house.catalog, ""):
        events += batch.events


SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 104))]


@pytest.mark.parametrize("seed", SEEDS)
async def test_tags_are_linearizable_and_watches_tell_every_move_in_order(
    replicas: list[Registry], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(feed_module, "BLOCK_MS", 50)
    rng = random.Random(seed)
    history = History()
    watched: list[list[dict[str, Any]]] = [[] for _ in replicas]
    watchers = [asyncio.create_task(_watch(h, w)) for h, w in zip(replicas, watched, strict=True)]
    clients = [
        history.client(replicas[number % len(replicas)], random.Random(rng.random()))
        for number in range(CLIENTS)
    ]
    await asyncio.gather(*clients)
    for tag in TAGS:
        assert is_linearizable(history.operations[tag]), f"{tag}: {history.operations[tag]}"
    final = {tag: await replicas[0].tags.read(TagAddress("default", "sql", tag)) for tag in TAGS}
    await _until_told(watched, {tag: r.generation if r else 0 for tag, r in final.items()})
    for watcher in watchers:
        watcher.cancel()
    for events in watched:
        _check_told(events, final, history.published)


async def _until_told(watched: list[list[dict[str, Any]]], wanted: dict[str, int]) -> None:
    def told(events: list[dict[str, Any]], tag: str) -> int:
        return max(_generations(events, tag), default=0)

    async with asyncio.timeout(20):
        while any(told(events, tag) < wanted[tag] for events in watched for tag in TAGS):
            await asyncio.sleep(0.05)


def _generations(events: list[dict[str, Any]], tag: str) -> list[int]:
    return [e["doc"]["generation"] for e in events if e["kind"] == "tag" and e["doc"]["tag"] == tag]


def _check_told(events: list[dict[str, Any]], final: dict[str, Any], published: int) -> None:
    """Every move once and in order from the first one seen on, with the targets it really had."""
    for tag, record in final.items():
        generations = _generations(events, tag)
        if record is None:
            assert generations == []
            continue
        assert generations == list(range(generations[0], record.generation + 1))
        moves = {move.generation: [t.version for t in move.targets] for move in record.moves}
        for event in events:
            doc = event["doc"]
            if event["kind"] == "tag" and doc["tag"] == tag and doc["generation"] in moves:
                assert [t["version"] for t in doc["targets"]] == moves[doc["generation"]]
    versions = [e["doc"]["version"] for e in events if e["kind"] == "version"]
    assert sorted(versions) == list(range(1, published + 1))
