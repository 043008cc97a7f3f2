"""Plans the next step: any mix of prompt chunks, decoded tokens and adapters.

The scheduler owns the waiting queue and the running batch, and uses no torch, clock or I/O. Blocks
are taken from the free list, then from idle adapters and prefixes, and last from the newest
request, which is preempted and recomputed later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import islice

from loraplex.errors import LoraplexError
from loraplex_services.common.virtual_counters import VirtualCounters, service
from loraplex_services.worker.cache.adapter_cache import AdapterCache
from loraplex_services.worker.cache.arena import Arena
from loraplex_services.worker.cache.kv_blocks import KvLayout
from loraplex_services.worker.cache.prefix_cache import PrefixCache
from loraplex_services.worker.cache.reclaimer import Reclaimer
from loraplex_services.worker.scheduling.admission import AdmissionTest
from loraplex_services.worker.scheduling.block_allocator import BlockAllocator
from loraplex_services.worker.scheduling.budget import TokenBudget
from loraplex_services.worker.scheduling.deadlines import Deadlines
from loraplex_services.worker.scheduling.decode_limit import DecodeLimit
from loraplex_services.worker.scheduling.drafts import Drafts
from loraplex_services.worker.scheduling.limits import SchedulerLimits
from loraplex_services.worker.scheduling.lookahead import Lookahead
from loraplex_services.worker.scheduling.queue import Cluster, WaitingQueue
from loraplex_services.worker.scheduling.queue_pass import QueuePass
from loraplex_services.worker.scheduling.rope_switch import measure, outgrown
from loraplex_services.worker.scheduling.running import Member, RunningBatch, in_batch_order
from loraplex_services.worker.scheduling.state_planner import StatePlanner
from loraplex_services.worker.scheduling.uncached import UncachedPrompts, num_cached_tokens
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import PlannedRow, StepPlan

MAX_SPARED = 64
"""Number of the first waiting requests whose adapters are evicted only if nothing else is idle."""
REWALK_S = 0.1
"""The queue is searched again at least this often, in seconds, because ages and estimates
change."""


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
    ) -> None:
        self._limits = limits
        self._layout = layout
        self._arena = arena
        self._cache = cache
        self._prefixes = prefixes
        reclaimer.add(prefixes, prefixes.states)
        self._states = StatePlanner(arena, prefixes, reclaimer)
        self._tenants = VirtualCounters()
        self._running = RunningBatch()
        self.runs = self._running.has
        """False once a request has ended. A step in flight may still compute it."""
        self.waiting = WaitingQueue(cache.tier, self._tenants.served_of)
        self._admission = AdmissionTest(limits, layout, arena, cache, self._running, self._tenants)
        self._allocator = BlockAllocator(layout, arena, prefixes, reclaimer, self._running)
        self._reclaimer = reclaimer
        self._lookahead = Lookahead(layout, arena, cache, reclaimer, self._running)
        self._idle_walk: tuple[int, float] | None = None
        """State and time of the last walk over the queue that started nothing."""
        self._num_changes = 0
        self._deadlines = Deadlines(cache, prefixes, (self.waiting, self._running))
        self._lost: list[tuple[Request, LoraplexError]] = []
        """Requests that planning has found, and that must be given up before the next plan."""
        self._next_step = 0
        self._num_in_flight = 0
        """Number of steps that were launched and have not ended."""
        self.times = self._deadlines.times
        self.budget = TokenBudget(limits.max_step_tokens, limits.max_step_s)
        self._uncached = UncachedPrompts(layout, prefixes, self.budget, self._running)
        self.decode_limit = DecodeLimit()
        self.drafts = Drafts(limits, layout.tokens_per_block, self._states)
        self._skipped: Collection[Member] = ()
        """Running requests that do not decode in this step."""
        self.num_preemptions = 0
        self.is_full = False
        """True if memory or the step's token budget kept a request waiting in the last walk."""
        self.awaiting_copies: list[Request] = []
        """Requests of the last walk that lacked nothing but their adapters, in its order."""

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """True while any request is waiting or running."""
        return bool(self.waiting or self._running)

    @property
    def queued_tokens(self) -> int:
        """Number of known tokens whose KV is not computed yet."""
        return self.waiting.num_tokens + self._running.num_pending

    def submit(self, request: Request) -> None:
        """Queue a new or continued request."""
        assert self._running.get(request.request_id) is None, request.request_id
        self._tenants.arrive(request.tenant)
        self._num_changes += 1
        measure(request, self._limits.rope_switch_len)
        self.waiting.push(request)
        if (error := self._admission.too_large(request)) is not None:
            self._lost.append((request, error))
        self._deadlines.watch(request)

    def remove(self, request_id: str, now: float) -> Request | None:
        """Remove a finished, cancelled or failed request and free its blocks immediately."""
        request = self.waiting.pop(request_id)
        if request is None and (request := self._running.pop(request_id)) is not None:
            self._vacate(request, now)
        if request is not None:
            self._num_changes += 1
            self.drafts.ended(request)
            self._tenants.leave(request.tenant, now)
        return request

    def waiting_for(self, digest: str) -> list[Request]:
        """Requests that cannot start without this adapter."""
        return self.waiting.needing(digest)

    def expired(self, now: float) -> list[tuple[Request, LoraplexError]]:
        """Requests to give up, each returned once: those that are past their deadline, waiting ones
        that cannot meet it, and those that do not fit in the memory that pinned adapters leave. The
        caller removes them."""
        lost = {r: error for r, error in self._lost if self._deadlines.is_live(r)}
        self._lost.clear()
        return list({**self._deadlines.passed(now), **lost}.items())

    def plan(self, now: float, arrive: Callable[[int], bool] | None = None) -> StepPlan:
        """Decide one step. Mutates requests' block tables; queues loads and evictions.

        The plan is empty if it would have to preempt a request while a step is in flight. A request
        with a slow grammar is left out until the token in flight is known.

        Args:
            arrive: starts queued loads, given the step's number of rows without them; returns True
                if one of them has completed.
        """
        outgrown_requests = outgrown(self._running, self._limits.rope_switch_len)
        if self._num_in_flight and outgrown_requests:
            return self._make_plan(())
        for request in outgrown_requests:
            self._preempt(request, now)
        shares, budget = self.budget.share(self._running, bool(self.waiting))
        wanted = self._allocator.wanted(shares)
        has_preempted = False
        if not self._allocator.grow_all(wanted, now):
            if self._num_in_flight:
                return self._make_plan(())
            preempt = partial(self._preempt, now=now)
            has_preempted = self._allocator.grow_some(wanted, preempt, now)
        self._uncached.begin_step()
        decodes = self._running.decode_rows(self._skipping(now))
        started: list[PlannedRow] = []
        if not has_preempted:
            started = self._admit(now, budget)
            num_others = sum(num_tokens > 0 for num_tokens in shares.values()) + len(started)
            if arrive is not None and arrive(len(decodes) + num_others):
                left = self.budget.left_after(num_cached_tokens(started), budget)
                started += self._admit(now, left)
            left = self.budget.left_after(num_cached_tokens(started), budget)
            self._allocator.grow_further(shares, left, now)
        prompts = self._running.prompts
        others = [prompts[name].row(n) for name, n in shares.items() if n and name in prompts]
        rows = self._uncached.choose(in_batch_order(decodes, others + started))
        return self._make_plan(self.drafts.added(rows, now, self.decode_limit.most_tokens), now)

    def _skipping(self, now: float) -> Collection[Member]:
        if not self._uncached.has_others_due:  # else the last step computed none of them
            self._skipped = self.decode_limit.skipping(
                self._running.decoding, self._next_step, self._tenants.num_expected(now)
            )
        return self._skipped

    def _make_plan(self, rows: Sequence[PlannedRow], now: float = 0.0) -> StepPlan:
        if rows:
            self._arena.planned(self._next_step)
        self._next_step += 1
        return StepPlan(self._next_step - 1, tuple(rows), self._states.spans(rows, now))

    def on_step_launched(self, plan: StepPlan) -> None:
        """Note that the runner has launched `plan`. Later steps find its KV in the cache."""
        num_outputs = 0
        for row in plan.rows:
            request = row.request
            request.num_computed += row.num_tokens - len(row.drafts)
            if row.follows is None and not request.without_cache:
                self._prefixes.keep(request, row.start)
            if row.needs_logits:
                if not request.pooling:
                    request.in_flight_output = num_outputs
                    request.num_in_flight_tokens += request.sampling.max_tokens > 0
                    num_outputs += 1
                self._running.caught_up(request)
        self._num_in_flight += 1

    def on_step_done(self, plan: StepPlan) -> None:
        """Note that the oldest step in flight has ended."""
        self._num_in_flight -= 1
        self._arena.retire(plan.step)

    def on_draft(self, request: Request) -> None:
        """Note that the draft after a request's last token was accepted: its position is computed,
        and the token after it is about to come."""
        request.num_computed += 1
        request.num_in_flight_tokens += 1
        self._prefixes.keep(request, request.num_computed - 1)

    def on_token(self, request: Request) -> None:
        """Note that a running request has received its next token."""
        cost = service(0, 1, request.fairness_weight)
        self._tenants.charge(self._tenants.present[request.tenant], cost)
        end = request.num_computed
        # A step in flight completes this position. Only the last one of a block completes it.
        if end % self._layout.tokens_per_block == 0 and end == request.num_tokens:
            self._prefixes.keep(request, end - 1)

    def check_integrity(self) -> None:
        """Assert that the block tables of requests agree with the arena."""
        self._arena.check_integrity()
        self._cache.check_integrity()
        self.waiting.check_integrity()
        for request in self.waiting:
            assert not request.block_tables and not request.num_computed, request.request_id
        self._allocator.check_integrity()
        self._running.check_integrity(self._layout.tokens_per_block)
        tables = [table for r in self._running for table in r.block_tables]
        self._prefixes.check_integrity(tables)
        self._prefixes.states.check_integrity(r.state_key for r in self._running if r.state_key)

    def _preempt(self, request: Request, now: float) -> None:
        """Return a running request to the queue. All of its KV is computed again later."""
        self._running.pop(request.request_id)
        self._vacate(request, now)
        self.waiting.push(request)
        self._num_changes += 1
        self.num_preemptions += 1

    def _vacate(self, request: Request, now: float) -> None:
        self._allocator.leave(request, now)
        self._cache.release(request.adapters.digests, now)

    def _admit(self, now: float, budget: int) -> list[PlannedRow]:
        """Start waiting requests in the policy's order, and the loads that they wait for.

        A walk over the queue that started nothing is repeated only after a relevant change, or
        after `REWALK_S`.
        """
        if not self.waiting and not self._cache.has_prefetches:
            self.is_full, self.awaiting_copies, self._reclaimer.spared = False, [], ()
            return []
        state = self._num_changes + self._cache.num_changes
        if self._idle_walk is not None:
            last_state, walked_s = self._idle_walk
            if state == last_state and now - walked_s < REWALK_S:
                return []
        rows, may_repeat = self._walk(now, budget)
        is_idle = not may_repeat and state == self._num_changes + self._cache.num_changes
        self._idle_walk = (state, now) if is_idle else None
        return rows

    def _walk(self, now: float, budget: int) -> tuple[list[PlannedRow], bool]:
        """Returns the rows of requests that start, and whether the next walk may start more even if
        nothing changes in between."""
        self.is_full, self.awaiting_copies = False, []
        walk = self.waiting.walk(self._cluster(now))
        queue_pass = QueuePass(walk, budget, self.budget.max_prompt_tokens)
        while (request := next(queue_pass.walk, None)) is not None:
            if not self._visit(request, queue_pass, now):
                break
        self._reclaimer.spared = frozenset(islice(queue_pass.ahead, MAX_SPARED))
        self._cache.load_prefetches(queue_pass.ahead, now)
        is_moving = bool(queue_pass.rows or self._arena.num_retiring)
        return queue_pass.rows, queue_pass.may_repeat or is_moving

    def _cluster(self, now: float) -> Cluster | None:
        """The adapters in use, if enough of them are and many requests wait."""
        limits, in_use = self._limits, self._cache.in_use
        is_short = len(self.waiting) < limits.min_cluster_queue * len(self._running)
        if not limits.cluster_size or is_short or len(in_use) < limits.cluster_size:
            return None
        return Cluster(frozenset(in_use), now - limits.max_cluster_age_s)

    def _visit(self, request: Request, queue_pass: QueuePass, now: float) -> bool:
        """Start a request, begin its loads, or leave it waiting. False ends the walk."""
        if not self._admission.has_slot(request, now):
            self._lookahead.load(request, queue_pass.walk, queue_pass.ahead, now)
            return False
        digests = request.adapters.digests
        is_ready = self._cache.ready(digests)
        if not self._cache.known(digests) or not (is_ready or queue_pass.loads_left):
            queue_pass.walk.skip_flow()
            return True
        if request.is_held or self._is_lost(request, now):
            queue_pass.may_repeat = True
            return True
        request.without_cache = self._uncached.accepts(request)
        if not self._admission.has_memory(request):
            self.is_full = True
            self._lookahead.load(request, queue_pass.walk, queue_pass.ahead, now)
            return False
        queue_pass.ahead.update(dict.fromkeys(digests))
        if not is_ready:
            self.awaiting_copies.append(request)
            queue_pass.loads_began(self._cache.load(digests, queue_pass.ahead, now))
        else:
            if request.adapters_ready_s is None:
                request.adapters_ready_s = now
            if self._must_wait(request, queue_pass.budget):
                queue_pass.pass_over()
                return True
            if not self._admission.has_too_many_adapters(digests):
                return self._try_start(request, queue_pass, now)
        if now - request.arrival_s >= self._limits.max_overtaking_s:
            queue_pass.walk.takes_ready = False  # no request overtakes it; those behind it may load
        queue_pass.walk.skip_flow()
        return True

    def _try_start(self, request: Request, queue_pass: QueuePass, now: float) -> bool:
        """Start a request that lacks nothing but tokens and blocks. False if there are no blocks
        for it, which ends the walk."""
        row = self._start(request, queue_pass.budget, now)
        if row is not None:
            queue_pass.started(row)
            return True
        self.is_full = True
        if queue_pass.budget:
            return False
        queue_pass.may_repeat = True
        queue_pass.walk.skip_flow()
        return True

    def _is_lost(self, request: Request, now: float) -> bool:
        """True if the request must not start; `expired` then returns it."""
        error = self._admission.too_large(request) or self._deadlines.too_late(request, now)
        if error is not None:
            self._lost.append((request, error))
        return error is not None

    def _start(self, request: Request, budget: int, now: float) -> PlannedRow | None:
        """Start a request. Returns its row, or None if the step has too few tokens or blocks."""
        if not budget and not request.without_cache:
            return None
        slots = self._cache.acquire(request.adapters.digests, now)
        measure(request, self._limits.rope_switch_len)
        num_tokens = request.num_pending
        if request.without_cache:
            self._uncached.start(request)
        else:
            self._prefixes.share(request, self._prefixes.match(request))
            num_tokens = min(request.num_pending, budget)
        pairs = zip(slots, (w for _, w in request.adapters.adapters), strict=True)
        member = self._running.add(request, tuple(pairs))
        if not self._allocator.grow(member, request.num_computed + num_tokens, now):
            self._running.pop(request.request_id)
            self._vacate(request, now)
            return None
        self.waiting.pop(request.request_id)
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now
            request.num_cached = request.num_computed
            cost = service(request.num_pending, 0, request.fairness_weight)
            self._tenants.charge(self._tenants.present[request.tenant], cost)
        return member.row(num_tokens)

    def _must_wait(self, request: Request, budget: int) -> bool:
        """True for a prompt that is too long for this step, while another such prompt is
        computed."""
        if request.without_cache:
            return self._uncached.must_wait(request)
        if not self.budget.is_cutting or not 0 < budget < request.num_pending:
            return False
        return request.num_pending - self._prefixes.match(request) > budget
