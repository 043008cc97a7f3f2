"""Decides which adapters are on the device. No bytes, no tensors, no I/O.

An adapter known to this worker is on disk (verified), loading, or on the device. Only running
requests and pins hold an adapter. Any other resident adapter is idle: its blocks count as free, and
it is evicted when a running request needs them. Decisions are collected as `Load` and `Evict`
actions, which the engine carries out in that order before the next step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from loraplex.api.residency import Tier
from loraplex.errors import LoraplexError, ResourceExhausted
from loraplex_services.worker.cache.adapter_limits import AdapterLimits
from loraplex_services.worker.cache.arena import Arena
from loraplex_services.worker.cache.backoff import Backoff
from loraplex_services.worker.cache.block_use import BlockUse
from loraplex_services.worker.cache.eviction import CopyTimes, LeastExpectedLoss
from loraplex_services.worker.cache.reclaimer import Offer, Reclaimer, reuse_probability
from loraplex_services.worker.types.adapter_facts import AdapterFacts
from loraplex_services.worker.types.extents import Extents
from loraplex_services.worker.types.residency import CachedAdapter, Evict, Load, adapter_owner


class AdapterCache:
    """Decides residency, within the limits that `AdapterLimits` explains."""

    def __init__(
        self,
        arena: Arena,
        reclaimer: Reclaimer,
        limits: AdapterLimits,
        order: LeastExpectedLoss | None = None,
    ) -> None:
        self._arena = arena
        self._reclaimer = reclaimer
        reclaimer.add(self)
        self._limits = limits
        self._order = order or LeastExpectedLoss()
        self._adapters: dict[str, CachedAdapter] = {}
        self._idle: dict[str, CachedAdapter] = {}
        self.in_use: set[str] = set()
        """Digests that running requests use. Not to be mutated by others."""
        self._prefetches: dict[str, None] = {}
        self._free_slots = list(range(limits.max_resident - 1, -1, -1))
        self._use = BlockUse(arena)
        self.pinned_blocks = 0
        """Upper bound on the blocks of pinned adapters, resident or not."""
        self._copies = CopyTimes()
        self._actions: list[Load | Evict] = []
        self._changed: dict[str, None] = {}
        self.num_changes = 0
        """Increases with every change that may let a waiting request start."""
        self.failures = Backoff()

    @property
    def held_blocks(self) -> int:
        """Blocks with adapters that are in use, pinned or loading: not to be reclaimed."""
        return self._use.held

    def get(self, digest: str) -> CachedAdapter | None:
        """The record of one adapter; None if it is not known."""
        return self._adapters.get(digest)

    def tier(self, digest: str) -> Tier:
        """The tier of an adapter; NONE = it is not on disk either."""
        adapter = self._adapters.get(digest)
        return Tier.NONE if adapter is None else adapter.tier

    def adapters(self) -> Collection[CachedAdapter]:
        """All known adapters."""
        return self._adapters.values()

    def fetched(self, digest: str, path: Path, num_pages: int, max_rank: int) -> None:
        """Note that an adapter is verified on disk. Raises ResourceExhausted if it is too large."""
        self._limits.check_size(digest, num_pages / self._arena.pages_per_block)
        adapter = self._adapters.get(digest)
        if adapter is None:
            self._adapters[digest] = CachedAdapter(digest, path, num_pages, max_rank)
            self._note(digest)
        else:
            adapter.path, adapter.on_disk = path, True

    def gone(self, digest: str) -> None:
        """Note that the files have left the disk cache. A resident copy keeps serving."""
        adapter = self._adapters.get(digest)
        if adapter is None:
            return
        adapter.on_disk = False
        if adapter.tier == Tier.DISK:
            self._forget(adapter)

    def ready(self, digests: Iterable[str]) -> bool:
        """True when all of `digests` are usable in the next step."""
        return all(
            (adapter := self._adapters.get(digest)) is not None and adapter.tier == Tier.DEVICE
            for digest in digests
        )

    def known(self, digests: Iterable[str]) -> bool:
        """True when all of `digests` are on disk, loading or on the device."""
        return all(digest in self._adapters for digest in digests)

    def new_blocks(self, digests: Iterable[str]) -> int:
        """Upper bound on the blocks that `held_blocks` would gain if all of `digests` were held."""
        adapters = [self._adapters[digest] for digest in digests]
        absent = (self._use.most_of(a) for a in adapters if a.tier == Tier.DISK)
        return sum(absent) + self._use.idle_of(a for a in adapters if a.is_idle)

    def unpinned_blocks(self, digests: Iterable[str]) -> int:
        """Upper bound on the blocks of those of `digests` that are not pinned."""
        adapters = (self._adapters[digest] for digest in digests)
        return sum(self._use.most_of(a) for a in adapters if not a.pinned)

    def beyond_share(self, digests: Iterable[str]) -> ResourceExhausted | None:
        """Why `digests` could never be resident together; None if they could."""
        adapters = (self._adapters[digest] for digest in digests)
        num_blocks = sum(self._num_blocks(a) for a in adapters if not a.pinned)
        return self._limits.beyond_share(num_blocks, self.pinned_blocks)

    def acquire(self, digests: Iterable[str], now: float) -> tuple[int, ...]:
        """Let a running request use `digests`, all of which are ready. Returns their slots."""
        return tuple(self._acquire(self._adapters[digest], now) for digest in digests)

    def _acquire(self, adapter: CachedAdapter, now: float) -> int:
        assert adapter.tier == Tier.DEVICE, f"{adapter.digest} is {adapter.tier.name}"
        self._leave_idle(adapter)
        self._order.used(adapter, now)
        adapter.num_running += 1
        adapter.unload = False
        adapter.last_used_s = now
        self.in_use.add(adapter.digest)
        self._note(adapter.digest)
        return adapter.slot

    def release(self, digests: Iterable[str], now: float) -> None:
        """Note that a request that used `digests` no longer runs."""
        for digest in digests:
            adapter = self._adapters[digest]
            assert adapter.num_running > 0, f"{digest} released more often than acquired"
            adapter.num_running -= 1
            adapter.last_used_s, adapter.last_step = now, self._arena.last_planned
            if not adapter.num_running:
                self.in_use.discard(digest)
            self._enter_idle(adapter)
            self._note(digest)

    def load(self, digests: Iterable[str], protected: Collection[str], now: float) -> bool:
        """Start to load those of `digests` that are only on disk, reclaiming idle blocks, but none
        of `protected` adapters. Returns False if blocks or slots are missing for some of them."""
        return all([self._load(digest, protected, now) for digest in digests])

    def _load(self, digest: str, protected: Collection[str], now: float) -> bool:
        adapter = self._adapters[digest]
        if adapter.tier != Tier.DISK:
            return True
        kept = ({*protected, *self._reclaimer.spared}, protected)
        if not self._has_share(adapter, kept):
            return False
        if not self._reclaimer.reclaim_pages(adapter.num_pages, now, protected):
            return False
        if not self._free_slots and not any(map(self._evict_one, kept)):
            return False
        adapter.tier = Tier.LOADING
        adapter.slot = self._free_slots.pop()
        adapter.first_pages = self._arena.allocate_pages(adapter_owner(digest), adapter.num_pages)
        adapter.last_used_s = now
        self._use.add(adapter)
        extents = Extents(adapter.num_pages, tuple(adapter.first_pages))
        self._actions.append(Load(adapter.slot, digest, adapter.path, extents))
        self._note(digest)
        return True

    def _has_share(self, adapter: CachedAdapter, kept: Iterable[Collection[str]]) -> bool:
        """True once all adapters and this one are within their share of the arena. Evicts idle ones
        for it, if those that may be evicted are enough."""
        most = self._limits.max_blocks * self._arena.pages_per_block - adapter.num_pages
        for protected in kept:
            spared = (self._idle[d].num_pages for d in protected if d in self._idle)
            if self._use.held_pages + sum(spared) <= most:
                while self._use.num_pages > most:
                    self._evict_one(protected)
        return self._use.num_pages <= most

    def load_prefetches(self, protected: Collection[str], now: float) -> None:
        """Load prefetches as far as memory and slots allow."""
        for digest in list(self._prefetches):
            if digest in self._adapters and self._load(digest, {*protected, digest}, now):
                del self._prefetches[digest]

    @property
    def has_prefetches(self) -> bool:
        """True while a prefetch is not loaded."""
        return bool(self._prefetches)

    def prefetch(self, digest: str) -> None:
        """Load this adapter as soon as it is on disk and memory is free. Undoes `unload` where that
        waits for a copy or for requests."""
        self._prefetches[digest] = None
        if (adapter := self._adapters.get(digest)) is not None:
            adapter.unload = False
        self._note(digest)

    def cancel_prefetch(self, digest: str) -> None:
        """Undo `prefetch`."""
        self._prefetches.pop(digest, None)

    def facts(self, digests: Iterable[str]) -> list[AdapterFacts]:
        """Facts about ready adapters, in the order of `digests`."""
        return [self._adapters[digest].facts for digest in digests]

    def loaded(
        self, digest: str, copy_s: float | None = None, facts: AdapterFacts | None = None
    ) -> None:
        """Note that the copy of a `Load` is complete. It took `copy_s` seconds, if that was
        measured."""
        adapter = self._adapters[digest]
        adapter.facts = facts or adapter.facts
        if copy_s is not None:
            self._copies.add(self._num_blocks(adapter), copy_s)
        assert adapter.tier == Tier.LOADING, f"{digest} is {adapter.tier.name}"
        self.failures.clear(digest)
        adapter.tier = Tier.DEVICE
        self._enter_idle(adapter)
        self._note(digest)

    def failed(self, digest: str, error: LoraplexError, now: float) -> None:
        """Note that the copy of a `Load` failed, which ends its pin. `failures` holds `error` until
        its pause is over."""
        self.failures.record(digest, error, now)
        self.cancel_prefetch(digest)
        self.unpin(digest)
        adapter = self._adapters[digest]
        assert adapter.tier == Tier.LOADING, f"{digest} is {adapter.tier.name}"
        self._vacate(adapter)

    def pin(self, digest: str, now: float) -> None:
        """Keep a known adapter resident. Raises ResourceExhausted if pins would exceed their
        share."""
        adapter = self._adapters[digest]
        if adapter.pinned:
            return
        wanted_blocks = self.pinned_blocks + self._use.most_of(adapter)
        num_pinned = 1 + sum(a.pinned for a in self._adapters.values())
        self._limits.check_pins(digest, num_pinned, wanted_blocks)
        self._leave_idle(adapter)
        adapter.pinned = True
        adapter.last_used_s = now
        self.pinned_blocks = wanted_blocks
        self._note(digest)
        self.prefetch(digest)

    def unpin(self, digest: str) -> None:
        """Unpin an adapter, so that it may be evicted."""
        adapter = self._adapters.get(digest)
        if adapter is None or not adapter.pinned:
            return
        adapter.pinned = False
        self.pinned_blocks -= self._use.most_of(adapter)
        self._enter_idle(adapter)
        self.cancel_prefetch(digest)
        self._note(digest)

    def unload(self, digest: str) -> None:
        """Free an adapter now if it is idle, or else when its last request ends."""
        self.unpin(digest)
        self.cancel_prefetch(digest)
        adapter = self._adapters.get(digest)
        if adapter is None or adapter.tier == Tier.DISK:
            return
        adapter.unload = True
        if adapter.is_idle:
            self._evict(adapter)

    def idle_blocks(self, protected: Collection[str]) -> int:
        """Blocks that only idle adapters are in, none of them `protected`."""
        spared = (self._idle[digest] for digest in protected if digest in self._idle)
        return self._use.idle - self._use.idle_of(spared)

    def offer(self, protected: Collection[str], now: float) -> Offer | None:
        """The idle adapter that would be evicted next."""
        victim = self._order.next_victim(protected)
        if victim is None:
            return None
        num_blocks = self._num_blocks(victim)
        restore_s = self._copies.seconds(num_blocks)
        reuse = reuse_probability(now - victim.last_used_s)
        reuse = min(1.0, max(reuse, self._order.uses_per_s(victim, now)))
        return Offer(num_blocks, restore_s, reuse)

    def give_up(self, protected: Collection[str], whole_block: bool) -> None:
        """Evict the adapter that `offer` named. If a `whole_block` must become free, evict those
        with which it shares a block as well, where that frees the block."""
        victim = self._order.next_victim(protected)
        assert victim is not None, "there was an offer"
        others = self._use.co_residents(victim, protected) if whole_block else ()
        self._evict(victim)
        for digest in others:
            self._evict(self._adapters[digest])

    def take_actions(self) -> list[Load | Evict]:
        """Decisions since the last call, to be carried out in this order."""
        actions, self._actions = self._actions, []
        return actions

    def take_changes(self) -> list[tuple[str, CachedAdapter | None]]:
        """Adapters whose residency changed since the last call; None = gone."""
        changed, self._changed = self._changed, {}
        return [(digest, self._adapters.get(digest)) for digest in changed]

    def check_integrity(self) -> None:
        """Assert that counters, slots and block ownership agree with the adapters."""
        adapters = self._adapters.values()
        resident = [a for a in adapters if a.tier in (Tier.LOADING, Tier.DEVICE)]
        idle = {a.digest: a for a in adapters if a.is_idle}
        assert self._idle == idle, f"idle {set(self._idle)} != {set(idle)}"
        self._use.check_integrity(resident)
        assert self.pinned_blocks == sum(self._use.most_of(a) for a in adapters if a.pinned)
        assert self.in_use == {a.digest for a in adapters if a.num_running}
        slots = [a.slot for a in resident]
        assert len({*slots, *self._free_slots}) == len(slots) + len(self._free_slots)
        by_owner = self._arena.blocks_by_owner()
        for adapter in adapters:
            owned = by_owner.get(adapter_owner(adapter.digest), set())
            blocks = {
                first_page // self._arena.pages_per_block for first_page in adapter.first_pages
            }
            assert owned == blocks, f"{adapter.digest}: {owned} != {blocks}"
            assert bool(adapter.first_pages) == (adapter in resident), adapter.digest
            assert not (adapter.num_running and adapter.tier != Tier.DEVICE), adapter.digest

    def _note(self, digest: str) -> None:
        self._changed[digest] = None
        self.num_changes += 1

    def _num_blocks(self, adapter: CachedAdapter) -> float:
        """Size of an adapter in blocks."""
        return adapter.num_pages / self._arena.pages_per_block

    def _evict_one(self, protected: Collection[str]) -> bool:
        victim = self._order.next_victim(protected)
        if victim is None:
            return False
        self._evict(victim)
        return True

    def _evict(self, adapter: CachedAdapter) -> None:
        assert adapter.is_idle, f"evicting {adapter.digest}, which is not idle"
        self._leave_idle(adapter)
        self._actions.append(Evict(adapter.slot, adapter.digest))
        self._vacate(adapter)

    def _vacate(self, adapter: CachedAdapter) -> None:
        """Free the slot and the blocks of an adapter, which is then only on disk, or gone."""
        owner, num_pages = adapter_owner(adapter.digest), adapter.num_pages
        self._arena.free_pages(owner, adapter.first_pages, num_pages, adapter.last_step)
        self._free_slots.append(adapter.slot)
        self._use.drop(adapter)
        adapter.tier, adapter.slot, adapter.first_pages = Tier.DISK, -1, []
        adapter.unload = False
        self._note(adapter.digest)
        if not adapter.on_disk:
            self._forget(adapter)

    def _forget(self, adapter: CachedAdapter) -> None:
        self.unpin(adapter.digest)
        self.cancel_prefetch(adapter.digest)
        del self._adapters[adapter.digest]
        self._note(adapter.digest)

    def _leave_idle(self, adapter: CachedAdapter) -> None:
        if self._idle.pop(adapter.digest, None) is not None:
            self._order.leave(adapter)
            self._use.leave_idle(adapter)

    def _enter_idle(self, adapter: CachedAdapter) -> None:
        if not adapter.is_idle or adapter.digest in self._idle:
            return
        self._idle[adapter.digest] = adapter
        self._order.enter(adapter, self._copies.seconds(self._num_blocks(adapter)))
        self._use.enter_idle(adapter)
        if adapter.unload:
            self._evict(adapter)
