"""What the next step computes. Owns the queue and the running batch; no torch, no clock, no I/O.

Every step may add, drop and mix requests: chunks of prompts beside single decoded tokens, any
adapters beside the bare base. Blocks are found in this order: free ones, idle adapters and
prefixes, and as the last resort those of the request that arrived last, which is recomputed later.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from loraplex.errors import DeadlineExceeded, LoraplexError, ResourceExhausted
from services.worker.adapters.cache import AdapterCache
from services.worker.adapters.residency import Tier
from services.worker.memory.arena import Arena
from services.worker.memory.kv_blocks import (
    KvLayout,
    grow_tables,
    kv_owner,
    release_behind_windows,
    release_tables,
)
from services.worker.memory.prefix_cache import PrefixCache
from services.worker.memory.reclaimer import Reclaimer
from services.worker.request import RELEASED_BLOCK, PlannedRow, Request, StepPlan, batch_order
from services.worker.scheduling.admission import peak_kv_blocks
from services.worker.scheduling.early_abort import (
    Alarms,
    Outlook,
    ServiceTimes,
    latest_start_s,
)
from services.worker.scheduling.limits import SchedulerLimits
from services.worker.scheduling.policies import (
    Policy,
    QueueView,
    ServiceCounters,
    arrival_key,
    first_come,
)
from services.worker.scheduling.queue import WaitingQueue
from services.worker.scheduling.rope_switch import measure, outgrown

MAX_LOADS_PER_STEP = 16
"""Copies of adapters to the device between two steps: bounds how long the second one waits."""


class Scheduler:
    """Continuous batching with chunked prefill, memory-safe admission and late preemption."""

    def __init__(
        self,
        limits: SchedulerLimits,
        layout: KvLayout,
        arena: Arena,
        cache: AdapterCache,
        prefixes: PrefixCache,
        reclaimer: Reclaimer,
        policy: Policy = first_come,
        counters: ServiceCounters | None = None,
    ) -> None:
        self._limits = limits
        self._layout = layout
        self._arena = arena
        self._cache = cache
        self._prefixes = prefixes
        self._reclaimer = reclaimer
        reclaimer.add(prefixes)
        self._policy = policy
        self._counters = counters or ServiceCounters()
        self._waiting = WaitingQueue()
        self._running: dict[str, Request] = {}
        self._slots: dict[str, tuple[int, ...]] = {}
        self._deadlines = Alarms()
        self._starts = Alarms()
        """The latest moments at which requests with a deadline can start."""
        self._lost: list[tuple[Request, LoraplexError]] = []
        """Found while planning, to be given up before the next plan."""
        self._next_step = 0
        self.times = ServiceTimes()
        self.num_preemptions = 0

    @property
    def waiting(self) -> Collection[Request]:
        """Requests not in the batch, in no particular order."""
        return self._waiting

    @property
    def num_waiting(self) -> int:
        """Requests not in the batch."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def num_waiting_adapters(self) -> int:
        """Distinct adapters that waiting requests need."""
        return self._waiting.num_adapters

    @property
    def has_work(self) -> bool:
        """True while any request waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def queued_tokens(self) -> int:
        """Known tokens whose KV is still to be computed."""
        return self._waiting.num_tokens + sum(r.num_pending for r in self._running.values())

    def submit(self, request: Request) -> None:
        """Queue a request, fresh or resumed."""
        assert request.request_id not in self._running, request.request_id
        self._counters.arrive(request)
        measure(request, self._limits.rope_switch_len)
        self._waiting.push(request)
        if (error := self._too_large(request)) is not None:
            self._lost.append((request, error))
        if request.deadline_s is not None:
            self._deadlines.set(request.deadline_s, request)
            self._starts.set(self._latest_start_s(request, request.arrival_s), request)

    def remove(self, request_id: str, now: float) -> Request | None:
        """Take a finished, cancelled or failed request out and free its blocks at once."""
        request = self._waiting.pop(request_id)
        if request is None and (request := self._running.pop(request_id, None)) is not None:
            self._vacate(request, now)
        if request is not None:
            self._counters.leave(request)
        return request

    def waiting_for(self, digest: str) -> list[Request]:
        """Requests that cannot start without this adapter."""
        return self._waiting.needing(digest)

    def hopeless(self, now: float) -> list[tuple[Request, LoraplexError]]:
        """Requests to give up, each named once: past their deadline, waiting without a chance to
        meet it, or too large for what pins leave. The caller removes them."""
        lost = {r: error for r, error in self._lost if self._is_live(r)}
        self._lost.clear()
        for request in self._deadlines.due(now, self._is_live):
            lost[request] = DeadlineExceeded("the request's deadline has passed")
        for request in self._starts.due(now, self._is_live):
            if not _is_fresh(request) or request in lost:
                continue
            if (latest_s := self._latest_start_s(request, now)) > now:
                self._starts.set(latest_s, request)
            else:
                lost[request] = _infeasible()
        return list(lost.items())

    def plan(self, now: float) -> StepPlan:
        """Decide one step. Mutates requests' block tables; queues loads and evictions."""
        for request in outgrown(self._running.values(), self._limits.rope_switch_len):
            self._preempt(request, now)
        shares = self._share_budget()
        has_preempted = self._find_blocks(shares, now)
        rows = [self._row(r, shares[r.request_id]) for r in self._running.values()]
        rows = [row for row in rows if row.num_tokens]
        if not has_preempted:
            rows += self._admit(now, self._limits.max_step_tokens - sum(shares.values()))
        rows.sort(key=batch_order)
        plan = StepPlan(self._next_step, tuple(rows))
        self._arena.planned(plan.step)
        self._next_step += 1
        return plan

    def computed(self, row: PlannedRow) -> None:
        """The step of `row` has run: its positions are in the KV cache."""
        request = row.request
        request.num_computed += row.num_tokens
        if row.needs_logits:
            self._counters.charge(request, 0, 1)
        self._prefixes.keep(request, row.start)

    def check_integrity(self) -> None:
        """Assert that the requests' tables and the arena agree on every block."""
        self._arena.check_integrity()
        self._cache.check_integrity()
        self._waiting.check_integrity()
        for request in self._waiting:
            assert not request.block_tables and not request.num_computed, request.request_id
        by_owner = self._arena.blocks_by_owner()
        for request in self._running.values():
            held = [b for table in request.block_tables for b in table if b != RELEASED_BLOCK]
            own = [block for block in held if not self._prefixes.is_cached(block)]
            owned = by_owner.get(kv_owner(request), set())
            assert len(own) == len(owned) and set(own) == owned, request.request_id
        assert set(self._slots) == set(self._running), "slots of requests that do not run"
        tables = [table for r in self._running.values() for table in r.block_tables]
        self._prefixes.check_integrity(tables)

    def _find_blocks(self, shares: dict[str, int], now: float) -> bool:
        """Grow every running request by its share, oldest first. True when one had to go."""
        queue = sorted(self._running.values(), key=arrival_key)
        num_before = len(queue)
        index = 0
        while index < len(queue):
            request = queue[index]
            if passed := release_behind_windows(self._layout, request):
                self._prefixes.give_back(request, passed, now, passed=True)
            if self._grow(request, request.num_computed + shares[request.request_id], now):
                index += 1
            else:
                self._preempt(queue.pop(), now)
        return len(queue) < num_before

    def _share_budget(self) -> dict[str, int]:
        """Tokens of each running request in this step: decodes first, then prompts by arrival."""
        queue = sorted(self._running.values(), key=lambda r: (r.num_pending > 1, *arrival_key(r)))
        budget = self._limits.max_step_tokens
        shares = {}
        for request in queue:
            num_wanted = 0 if request.is_held else request.num_pending
            shares[request.request_id] = min(num_wanted, budget)
            budget -= shares[request.request_id]
        return shares

    def _row(self, request: Request, num_tokens: int) -> PlannedRow:
        weights = (weight for _, weight in request.adapters.adapters)
        return PlannedRow(
            request=request,
            start=request.num_computed,
            num_tokens=num_tokens,
            needs_logits=num_tokens == request.num_pending,
            slots=tuple(zip(self._slots[request.request_id], weights, strict=True)),
        )

    def _grow(self, request: Request, num_tokens: int, now: float) -> bool:
        missing = self._layout.missing_blocks(request, num_tokens)
        if missing > 0:
            if not self._reclaimer.reclaim(missing, now):
                return False
            grow_tables(self._arena, self._layout, request, num_tokens)
        return True

    def _preempt(self, request: Request, now: float) -> None:
        """Back to the queue; everything but its output is computed again later."""
        del self._running[request.request_id]
        self._vacate(request, now)
        self._waiting.push(request)
        self.num_preemptions += 1

    def _vacate(self, request: Request, now: float) -> None:
        self._leave_blocks(request, now)
        del self._slots[request.request_id]
        self._cache.release(request.adapters.digests, now)

    def _leave_blocks(self, request: Request, now: float) -> None:
        self._prefixes.give_back(request, release_tables(request), now)
        request.num_computed = 0

    def _admit(self, now: float, budget: int) -> list[PlannedRow]:
        """Start waiting requests in the policy's order, and the loads that they wait for."""
        rows: list[PlannedRow] = []
        ahead: set[str] = set()
        loads_left = MAX_LOADS_PER_STEP
        walk = self._waiting.walk(self._policy, QueueView(now, frozenset(self._cache.in_use)))
        while len(self._running) < self._limits.max_running:
            request = next(walk, None)
            if request is None:
                break
            digests = request.adapters.digests
            is_ready = self._cache.ready(digests)
            if not self._cache.known(digests) or not (is_ready or loads_left):
                walk.skip_flow()
                continue
            if request.is_held or self._is_lost(request, now):
                continue
            if not self._has_room(request):
                break
            ahead.update(digests)
            if is_ready and request.adapters_ready_s is None:
                request.adapters_ready_s = now
            if is_ready and not self._too_many_adapters(digests):
                row = self._start(request, budget, now) if budget else None
                if row is not None:
                    rows.append(row)
                    budget -= row.num_tokens
                elif budget:
                    break
                else:
                    walk.skip_flow()
                continue
            if not is_ready:
                loads_left = loads_left - 1 if self._cache.load(digests, ahead, now) else 0
            if now - request.arrival_s >= self._limits.max_overtaking_s:
                break
            walk.skip_flow()
        self._cache.load_wanted(ahead, now)
        return rows

    def _is_lost(self, request: Request, now: float) -> bool:
        """True for what `hopeless` will name: it must not start."""
        error: LoraplexError | None = self._too_large(request)
        if error is None and request.deadline_s is not None and _is_fresh(request):
            error = _infeasible() if self._latest_start_s(request, now) <= now else None
        if error is not None:
            self._lost.append((request, error))
        return error is not None

    def _start(self, request: Request, budget: int, now: float) -> PlannedRow | None:
        slots = self._cache.acquire(request.adapters.digests, now)
        measure(request, self._limits.rope_switch_len)
        self._prefixes.share(request, self._prefixes.match(request))
        num_tokens = min(request.num_pending, budget)
        if not self._grow(request, request.num_computed + num_tokens, now):
            self._cache.release(request.adapters.digests, now)
            self._leave_blocks(request, now)
            return None
        self._waiting.pop(request.request_id)
        self._slots[request.request_id] = slots
        self._running[request.request_id] = request
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now
            request.num_cached = request.num_computed
            self._counters.charge(request, request.num_pending, 0)
        return self._row(request, num_tokens)

    def _is_live(self, request: Request) -> bool:
        request_id = request.request_id
        return request in (self._waiting.get(request_id), self._running.get(request_id))

    def _latest_start_s(self, request: Request, now: float) -> float:
        """When `request`, which has a deadline, must have started at the latest.

        What is cached of its prompt is looked up only when it would be too late otherwise.
        """
        assert request.deadline_s is not None
        tiers = [self._cache.tier(digest) for digest in request.adapters.digests]
        outlook = Outlook(
            num_tokens=request.num_pending,
            num_copies=sum(tier < Tier.DEVICE for tier in tiers),
            fetched_for_s=now - request.arrival_s if Tier.GONE in tiers else None,
        )
        is_contended = len(self._running) + len(self._waiting) > 1
        latest_s = latest_start_s(request.deadline_s, outlook, self.times, is_contended)
        if latest_s <= now and (num_cached := self._prefixes.match(request)):
            outlook = replace(outlook, num_tokens=request.num_pending - num_cached)
            latest_s = latest_start_s(request.deadline_s, outlook, self.times, is_contended)
        return latest_s

    def _too_many_adapters(self, digests: tuple[str, ...]) -> bool:
        limit = self._limits.max_loras
        return limit is not None and len(self._cache.in_use.union(digests)) > limit

    def _has_room(self, request: Request) -> bool:
        """The peak test; always true when nothing else runs, as `_too_large` has been asked."""
        if not self._running:
            return True
        adapters = self._cache.held_blocks + self._cache.new_blocks(request.adapters.digests)
        peak = peak_kv_blocks((*self._running.values(), request), self._layout)
        return peak + adapters <= self._arena.num_blocks

    def _too_large(self, request: Request) -> ResourceExhausted | None:
        """Refuses what would wait for ever; adapters not fetched yet count nothing."""
        known = [digest for digest in request.adapters.digests if self._cache.known([digest])]
        kv_blocks = self._layout.max_blocks(request.max_num_tokens)
        adapter_blocks = self._cache.unpinned_blocks(known)
        left = self._arena.num_blocks - self._cache.pinned_blocks
        if kv_blocks + adapter_blocks <= left:
            return None
        return ResourceExhausted(
            f"the request needs up to {kv_blocks} arena blocks for {request.max_num_tokens} tokens "
            f"and {adapter_blocks} for its adapters, {left} are not pinned: lower max_tokens or "
            "raise LORAPLEX_KV_MEMORY",
            reason="REQUEST_TOO_LARGE",
        )


def _is_fresh(request: Request) -> bool:
    """True before any work was put into it, here or elsewhere."""
    return request.first_scheduled_s is None and not request.output_ids


def _infeasible() -> DeadlineExceeded:
    return DeadlineExceeded(
        "the first token would come after the request's deadline: allow more time or try later",
        reason="DEADLINE_INFEASIBLE",
    )
