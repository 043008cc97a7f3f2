"""What the watchers of a worker receive."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest

from loraplex.api.residency import AdapterResidency, Tier, WorkerLoad
from loraplex.errors import Conflict, DataLoss, Unavailable
from loraplex_services.worker.adapters.fetch.disk_cache import DiskAdapter
from loraplex_services.worker.server.status import StatusBoard
from loraplex_services.worker.types.messages import ResidencyChange, WireError

LOAD = WorkerLoad(running_requests=1)


def at(digest: str, tier: Tier, error: WireError | None = None) -> ResidencyChange:
    return ResidencyChange(AdapterResidency(digest, tier), error)


def on_disk(digest: str) -> DiskAdapter:
    return DiskAdapter(digest, Path("/cache"), 8, "0" * 64, 100)


async def test_a_watch_is_a_snapshot_then_what_changed() -> None:
    board = StatusBoard()
    board.new_epoch(5, [on_disk("a"), on_disk("b")])
    watch = board.watch()
    first = await anext(watch)
    assert first.is_full and {a.digest for a in first.adapters} == {"a", "b"}
    board.update([at("a", Tier.DEVICE), at("b", Tier.NONE)], LOAD)
    second = await anext(watch)
    assert not second.is_full and (second.sequence, second.epoch) == (2, 5)
    assert {(a.digest, a.tier) for a in second.adapters} == {("a", Tier.DEVICE), ("b", Tier.NONE)}
    assert second.load == LOAD


async def test_a_new_epoch_begins_with_everything_again() -> None:
    board = StatusBoard()
    board.new_epoch(5, [])
    watch = board.watch()
    await anext(watch)
    board.update([at("a", Tier.DEVICE)], LOAD)
    board.new_epoch(6, [on_disk("a")])
    news = await anext(watch)
    assert news.is_full and news.epoch == 6
    assert [(a.digest, a.tier) for a in news.adapters] == [("a", Tier.DISK)]


async def test_whoever_no_longer_waits_for_an_adapter_takes_no_memory() -> None:
    board = StatusBoard()
    left = board.arrival("never")
    left.cancel()
    kept = weakref.ref(left)
    del left
    waiting = board.arrival("never")
    assert kept() is None
    board.will_not_arrive("never")
    with pytest.raises(Conflict):
        await waiting


async def test_waiting_for_an_adapter_ends_when_it_arrives_or_fails() -> None:
    board = StatusBoard()
    good, bad, lost = board.arrival("good"), board.arrival("bad"), board.arrival("lost")
    board.update([at("good", Tier.LOADING)], LOAD)
    assert not good.done()
    error = WireError.of(DataLoss("damaged"))
    board.update(
        [at("good", Tier.DEVICE), at("bad", Tier.NONE, error)],
        LOAD,
    )
    assert (await good).tier == Tier.DEVICE
    with pytest.raises(DataLoss):
        await bad
    board.fail_waiters(Unavailable("the engine was lost"))
    with pytest.raises(Unavailable):
        await lost


async def test_waiting_for_an_adapter_may_end_before_the_step_that_runs() -> None:
    board = StatusBoard()
    waiting = board.arrival("a")
    board.update([at("a", Tier.LOADING)], LOAD)
    board.arrived("a", 4096)
    entry = await waiting
    assert (entry.tier, entry.device_bytes) == (Tier.DEVICE, 4096)
    assert board.adapter("a").tier == Tier.LOADING, "watchers hear of it after the step"


async def test_adapters_gone_from_disk_are_forgotten_unless_they_are_on_the_device() -> None:
    board = StatusBoard()
    board.new_epoch(1, [on_disk("a"), on_disk("b")])
    board.update([at("b", Tier.DEVICE)], LOAD)
    board.off_disk("a")
    board.off_disk("b")
    assert {a.digest for a in board.adapters()} == {"b"}


async def test_closing_ends_every_watch() -> None:
    board = StatusBoard()
    watch = board.watch()
    await anext(watch)
    board.close()
    assert [news.sequence async for news in watch] == []
