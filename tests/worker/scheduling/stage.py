"""A scheduler with everything it decides over, and the engine's part of a step without a model."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from typing import NamedTuple

from loraplex.api.request import AdapterSet
from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.cache.adapter_cache import AdapterCache
from loraplex_services.worker.cache.adapter_limits import AdapterLimits
from loraplex_services.worker.cache.arena import Arena
from loraplex_services.worker.cache.kv_blocks import KvLayout
from loraplex_services.worker.cache.prefix_cache import PrefixCache
from loraplex_services.worker.cache.reclaimer import Reclaimer
from loraplex_services.worker.scheduling.limits import SchedulerLimits
from loraplex_services.worker.scheduling.scheduler import Scheduler
from loraplex_services.worker.scheduling.state_planner import StatePlanner
from loraplex_services.worker.types.request import RELEASED_BLOCK, Request
from loraplex_services.worker.types.residency import Evict, Load
from loraplex_services.worker.types.step_plan import PlannedRow, StateSpan, StepPlan, batch_order

STEP_S = 1.0
TOKEN = 7
"""What every step chooses."""
SIZES = {f"sha256:{name}": size for name, size in zip("abcde", (1, 2, 3, 4, 6), strict=True)}


def make_request(
    request_id: str,
    num_prompt: int = 3,
    max_tokens: int = 4,
    digests: tuple[str, ...] = (),
    **fields: object,
) -> Request:
    adapters = AdapterSet(tuple((digest, 1.0) for digest in sorted(digests)))
    prompt_ids = fields.pop("prompt_ids", [1] * num_prompt)
    sampling = SamplingParams(max_tokens=max_tokens, seed=0)
    return Request(request_id, prompt_ids, sampling, adapters, **fields)


def make_states(num_blocks: int = 1, state_blocks: int = 0) -> StatePlanner:
    """The states of a base, over an arena of their own."""
    arena = Arena(num_blocks)
    prefixes = PrefixCache(arena, KvLayout(16, (None,), 64, state_blocks))
    return StatePlanner(arena, prefixes, Reclaimer(arena))


class AnyToken:
    """A grammar's place, for requests whose next step depends on what the last one chose."""

    def __init__(self, is_quick: bool = False) -> None:
        self.is_quick = is_quick

    is_ready = True
    is_finished = False

    def bitmask(self) -> bytes:
        return b""


class InFlight(NamedTuple):
    plan: StepPlan
    blocks: dict[str, set[int]]
    """What each request reads or writes, its adapters included."""


class Stage:
    """A scheduler with its arena and cache, and the engine's part of a step without a model.

    With `overlaps`, a step lands when the next one has been planned and launched. A copy ends with
    the step that is planned `copy_steps` after the one that began it.
    """

    def __init__(
        self,
        num_blocks: int = 24,
        windows: tuple[int | None, ...] = (None,),
        prefix_cache: bool = True,
        overlaps: bool = False,
        state_blocks: int = 0,
        copy_steps: int = 0,
        adapter_blocks: float = math.inf,
        **limits: float,
    ) -> None:
        bounds = SchedulerLimits(**{"max_step_tokens": 16, "max_running": 6, **limits})
        self.layout = KvLayout(4, windows, bounds.max_step_tokens, state_blocks)
        self.arena = Arena(num_blocks)
        self.reclaimer = Reclaimer(self.arena)
        adapter_limits = AdapterLimits(8, 8, 4, adapter_blocks)
        self.cache = AdapterCache(self.arena, self.reclaimer, adapter_limits)
        self.prefixes = PrefixCache(self.arena, self.layout, enabled=prefix_cache)
        self.scheduler = Scheduler(
            bounds,
            self.layout,
            self.arena,
            self.cache,
            self.prefixes,
            self.reclaimer,
        )
        self.limits = bounds
        self.states: dict[int, tuple[int, object]] = {}
        """What each block of a state has: its place in the state, and a hash of the tokens."""
        self.content: dict[int, list[object]] = {}
        """What stands at each position of each block: a hash of all that decides it."""
        self.now = 0.0
        self.finished: list[str] = []
        self.lost: list[str] = []
        self.reasons: dict[str, str] = {}
        self.is_measuring = True
        self.overlaps = overlaps
        self.copy_steps = copy_steps
        self.copies: deque[tuple[float, str]] = deque()
        """When each ends."""
        self.wronged: set[str] = set()
        """Adapters of the next requests that the latest plan evicted although it left at least as
        many blocks of others idle."""
        self.in_flight: deque[InFlight] = deque()
        self.stopping: set[str] = set()
        """Requests whose next token ends them."""

    def fetch(self, *digests: str) -> None:
        for digest in digests:
            self.cache.fetched(digest, Path("/cache"), SIZES[digest], max_rank=8)

    def submit(self, *requests: Request) -> None:
        for request in requests:
            request.arrival_s = self.now
            self.scheduler.submit(request)

    def step(self) -> StepPlan:
        """Plan at `now`; what is planned, or the step before it, has run at `now` + STEP_S."""
        self.now += STEP_S
        for request, error in self.scheduler.expired(self.now):
            self.scheduler.remove(request.request_id, self.now)
            self.lost.append(request.request_id)
            self.reasons[request.request_id] = error.reason
        spared = set(self.reclaimer.spared)
        plan = self.scheduler.plan(self.now)
        actions = self.cache.take_actions()
        others = self.cache.idle_blocks(spared.union(self.reclaimer.spared))
        evicted = {action.digest for action in actions if isinstance(action, Evict)}
        self.wronged = {d for d in evicted & spared if SIZES[d] <= others}
        for action in actions:
            if isinstance(action, Load):
                for step in self.in_flight:
                    assert not set(action.extents.first_pages) & set().union(
                        *step.blocks.values()
                    ), "in use"
                self.copies.append((self.now + self.copy_steps * STEP_S, action.digest))
        while self.copies and self.copies[0][0] <= self.now:
            self.cache.loaded(self.copies.popleft()[1])
        self.check(plan)
        if plan.rows:
            spans = plan.states or ((),) * len(plan.rows)
            rows = zip(plan.rows, spans, strict=True)
            self.in_flight.append(
                InFlight(plan, {r.request.request_id: self.used(r, s) for r, s in rows})
            )
            self.scheduler.on_step_launched(plan)
        if len(self.in_flight) > (self.overlaps and bool(plan.rows)):
            self.land()
        self.scheduler.check_integrity()
        return plan

    def land(self) -> None:
        plan, _ = self.in_flight.popleft()
        self.scheduler.on_step_done(plan)
        for row in plan.rows:
            if self.scheduler.runs(row.request):
                self.advance(row.request, row)

    def used(self, row: PlannedRow, spans: tuple[StateSpan, ...]) -> set[int]:
        tables = {block for table in row.request.block_tables for block in table}
        tables |= {block for span in spans for block in (*span.source, *span.target)}
        adapters = (self.cache.get(digest).first_pages for digest in row.request.adapters.digests)
        return tables.union(*adapters)

    def advance(self, request: Request, row: PlannedRow) -> None:
        if row.needs_logits and request.pooling:
            self.scheduler.remove(request.request_id, self.now)
            self.finished.append(request.request_id)
        elif row.needs_logits:
            self.measure(request)
            request.take(TOKEN)
            self.scheduler.on_token(request)
            is_stopped = request.request_id in self.stopping
            if is_stopped or len(request.output_ids) >= request.sampling.max_tokens:
                self.scheduler.remove(request.request_id, self.now)
                self.finished.append(request.request_id)

    def measure(self, request: Request) -> None:
        if request.first_token_s is None:
            request.first_token_s = self.now + STEP_S
            assert request.first_scheduled_s is not None
            prefill_s = request.first_token_s - request.first_scheduled_s
            if self.is_measuring:
                num_tokens = request.num_tokens - request.num_cached
                self.scheduler.times.prefills.add(num_tokens, prefill_s)

    def check(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.limits.max_step_tokens
        assert len(plan.rows) <= self.limits.max_running
        assert [batch_order(r) for r in plan.rows] == sorted(batch_order(r) for r in plan.rows)
        if self.limits.max_loras is not None:
            assert plan.num_distinct_adapters <= self.limits.max_loras
        written: list[int] = []
        self.check_states(plan)
        for row in plan.rows:
            self.check_input(row)
            contents = contents_of(row.request)
            assert row.start == row.request.num_computed and row.num_tokens > 0
            assert len(row.slots) == len(row.request.adapters.digests)
            assert row.request.without_cache != plan.uses_cache, "a step of two kinds"
            for digest, (slot, _) in zip(row.request.adapters.digests, row.slots, strict=True):
                assert self.cache.get(digest).slot == slot
            if row.request.without_cache:
                assert row.start == 0 and row.needs_logits and not row.request.block_tables
                continue
            for group, window in enumerate(self.layout.windows):
                table = row.request.block_tables[group]
                first = max(0, row.start - window + 1) if window else 0
                last = row.start + row.num_tokens - 1
                seen = table[first // 4 : last // 4 + 1]
                assert len(seen) == last // 4 - first // 4 + 1 and RELEASED_BLOCK not in seen
                for position in range(row.start, last + 1):
                    block = self.content.setdefault(table[position // 4], [None] * 4)
                    block[position % 4] = (group, contents[position])
                own = set(table[row.start // 4 : last // 4 + 1])
                for step in self.in_flight:
                    others = (
                        b for name, b in step.blocks.items() if name != row.request.request_id
                    )
                    assert not own & set().union(*others), "a step in flight has the block"
                written += own
                for position in range(first, last + 1):
                    found = self.content[table[position // 4]][position % 4]
                    assert found == (group, contents[position]), "another's KV is read"
        assert len(written) == len(set(written)), "two rows write to a block"
        assert not any(self.prefixes.is_cached(block) for block in written)

    def check_states(self, plan: StepPlan) -> None:
        """Every row begins with the state of all tokens before it, and leaves the next one."""
        if not self.layout.state_blocks:
            assert not plan.states
            return
        written: set[int] = set()
        for row, spans in zip(plan.rows, plan.states, strict=True):
            contents, position = contents_of(row.request), row.start
            assert sum(span.num_tokens for span in spans) == row.num_tokens
            for span in spans:
                assert span.num_tokens > 0 and len(span.target) == self.layout.state_blocks
                assert bool(span.source) == (position > 0)
                for index, block in enumerate(span.source):
                    assert self.states[block] == (index, contents[position - 1]), "another's state"
                position += span.num_tokens
                for index, block in enumerate(span.target):
                    self.states[block] = index, contents[position - 1]
                    self.content.pop(block, None)
                assert not written & set(span.target), "two rows write to a block"
                for step in self.in_flight:
                    others = (
                        b for name, b in step.blocks.items() if name != row.request.request_id
                    )
                    assert not set(span.target) & set().union(*others), "a step in flight has it"
                written |= set(span.target)
        tables = {block for row in plan.rows for t in row.request.block_tables for block in t}
        assert not written & tables, "a state where KV is"

    def check_input(self, row: PlannedRow) -> None:
        """A token that nobody knows yet is an output of the step before."""
        request, end = row.request, row.start + row.num_tokens
        needed = len(request.prompt_ids) + request.sampling.max_tokens + bool(request.pooling)
        assert end < needed, "more than it needs"
        assert (row.follows is None) == (end <= request.num_tokens)
        if row.follows is not None:
            assert request.constraint is None or request.constraint.is_quick
            assert row.num_tokens == 1
            choosing = [r.request for r in self.in_flight[-1].plan.rows if r.chooses]
            assert choosing[row.follows] is request

    def run_dry(self) -> None:
        for _ in range(2000):
            if not (self.scheduler.has_work or self.in_flight):
                return
            self.step()
        raise AssertionError("requests wait forever")


def contents_of(request: Request) -> list[int]:
    """For each expected position, a hash of what its KV depends on."""
    own = request.adapters if request.adapters_from == 0 else AdapterSet()
    chain = hash((own, request.tenant, request.cache_salt, request.is_long))
    contents = []
    in_flight = [TOKEN] * request.num_in_flight_tokens
    for position, token_id in enumerate(request.prompt_ids + request.output_ids + in_flight):
        if 0 < position == request.adapters_from:
            chain = hash((chain, request.adapters))
        chain = hash((chain, token_id))
        contents.append(chain)
    return contents
