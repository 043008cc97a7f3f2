"""One worker's engine: intake -> residency -> plan -> launch -> collect -> tokens, one call of
`step` each.

If the runner overlaps steps, `step` launches one step and then collects the previous one, which has
run in the meantime (docs/internals/architecture.md, "Overlap"). The engine composes scheduler,
cache, arena and runner. It does no I/O except the runner's, and time comes from an injected clock.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from loraplex.errors import LoraplexError
from loraplex_services.worker.cache.adapter_cache import AdapterCache
from loraplex_services.worker.cache.adapter_limits import AdapterLimits
from loraplex_services.worker.cache.arena import Arena
from loraplex_services.worker.cache.kv_blocks import KvLayout
from loraplex_services.worker.cache.prefix_cache import PrefixCache
from loraplex_services.worker.cache.reclaimer import Reclaimer
from loraplex_services.worker.engine.adapter_checks import BaseFacts
from loraplex_services.worker.engine.adapter_loads import AdapterLoads
from loraplex_services.worker.engine.output_processor import OutputProcessor
from loraplex_services.worker.engine.outputs import residency_change, to_request
from loraplex_services.worker.engine.stats import EngineStats
from loraplex_services.worker.grammars.opening import Grammars
from loraplex_services.worker.scheduling.limits import SchedulerLimits
from loraplex_services.worker.scheduling.scheduler import Scheduler
from loraplex_services.worker.types.extents import count_pages_per_block
from loraplex_services.worker.types.messages import (
    AdapterFetched,
    Cancel,
    Command,
    EngineConfig,
    EngineReady,
    FetchFailed,
    Gone,
    Prefetch,
    ResidencyChange,
    StepOutput,
    Submit,
    TokenOutput,
    UnloadAdapter,
    Unpin,
)
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.runner_protocol import LaunchedStep, ModelInfo, Runner
from loraplex_services.worker.types.step_plan import StepPlan

logger = logging.getLogger(__name__)

MAX_ADAPTER_SHARE = 0.5
"""Largest share of the arena for one adapter."""
MAX_PINNED_SHARE = 0.5
"""Largest share for all pinned adapters, of what adapters may hold."""


class InFlight(NamedTuple):
    """A step in flight."""

    plan: StepPlan
    launched: LaunchedStep
    begin_s: float
    """When its planning began, on the engine's clock."""


def _limits(config: EngineConfig, runner: Runner) -> SchedulerLimits:
    info = runner.model_info()
    can_draft = info.verifies_drafts and not runner.overlaps and info.rope_switch_len is None
    drafts = config.drafts and can_draft
    return SchedulerLimits(
        config.max_num_batched_tokens,
        config.max_num_seqs,
        config.max_loras,
        cluster_size=config.cluster_size,
        rope_switch_len=info.rope_switch_len,
        max_step_s=config.max_step_s,
        drafts=drafts,
        proposal_cost=info.proposal_cost if drafts else 0.0,
        expert_share=info.expert_share,
        active_experts=info.active_experts,
    )


def _adapter_limits(config: EngineConfig, runner: Runner) -> AdapterLimits:
    num_blocks = config.lora_bytes // runner.block_bytes
    if not config.lora_bytes:
        num_blocks = int(runner.arena_blocks * config.lora_share)
    max_blocks = min(max(1, num_blocks), runner.arena_blocks)
    return AdapterLimits(
        config.max_resident,
        max_adapter_blocks=int(runner.arena_blocks * MAX_ADAPTER_SHARE),
        max_pinned_blocks=int(max_blocks * MAX_PINNED_SHARE),
        max_blocks=max_blocks,
    )


class Engine:
    """Turns commands into tokens, one step at a time."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._clock = clock
        self._info = info = runner.model_info()
        self._base = BaseFacts(info.vocab_size, info.max_model_len, info.caps_context)
        self._arena = Arena(runner.arena_blocks, count_pages_per_block(runner.block_bytes))
        self._reclaimer = Reclaimer(self._arena)
        self._adapter_limits = _adapter_limits(config, runner)
        self.cache = AdapterCache(self._arena, self._reclaimer, self._adapter_limits)
        limits = _limits(config, runner)
        layout = KvLayout(
            runner.tokens_per_block,
            tuple(runner.kv_group_windows),
            limits.max_step_tokens,
            runner.state_blocks,
        )
        base_key = _base_key(info, layout)
        self._prefixes = PrefixCache(self._arena, layout, base_key, enabled=config.prefix_cache)
        self.scheduler = Scheduler(
            limits,
            layout,
            self._arena,
            self.cache,
            self._prefixes,
            self._reclaimer,
        )
        tokenizer = Path(config.model_dir) / "tokenizer.json"
        self._grammars = Grammars(tokenizer, info.vocab_size, info.eos_token_ids)
        self._stats = EngineStats(config.max_num_seqs)
        self._outputs = OutputProcessor(
            self.scheduler, self._grammars, info.eos_token_ids, info.routing
        )
        self.adapter_loads = AdapterLoads(runner, self.cache, self.scheduler.times)
        """Loads in progress. The loop sets its `wake`."""
        self._residency_errors: dict[str, LoraplexError] = {}
        self.may_advance = False
        """True if another step could make progress without a new command."""
        self._in_flight: deque[InFlight] = deque()
        """Steps launched and not collected, oldest first."""
        self._collected_s = 0.0
        self._has_acted = False
        """Whether the step that is being planned has begun loads or evicted adapters."""
        self.announce: Callable[[list[str]], None] = lambda request_ids: None
        """Called with the requests whose first step is about to run."""

    @property
    def page_bytes(self) -> int:
        """Size of a page of the arena."""
        return self._runner.block_bytes // self._arena.pages_per_block

    @property
    def ready(self) -> EngineReady:
        """The message to the API server process when the engine is ready."""
        sizes = self._arena.num_blocks, self._runner.block_bytes
        max_bytes = int(self._adapter_limits.max_blocks * self._runner.block_bytes)
        return EngineReady(self._info, *sizes, self._runner.layout, max_bytes)

    @property
    def has_requests(self) -> bool:
        """True while any request waits or runs, or a step is in flight."""
        return bool(self.scheduler.has_work or self._grammars.num_opening or self._in_flight)

    @property
    def awaits_grammars(self) -> bool:
        """True while another thread compiles or follows a grammar."""
        return bool(self._grammars.num_opening) or self._grammars.has_held

    def step(self, commands: Iterable[Command]) -> StepOutput:
        """Handle `commands`, launch the planned step, collect the oldest one, return what changed.

        Raises:
            Exception: the runner failed; the engine's state is unknown and it must be replaced.
        """
        begin_s = self._clock()
        for command in commands:
            self._handle(command, begin_s)
        self._collect(begin_s)
        self._take_opened(begin_s)
        self._grammars.hold_back()
        for request, error in self.scheduler.expired(begin_s):
            self._outputs.fail(request, error, begin_s)
        self._has_acted = False
        plan = self.scheduler.plan(begin_s, lambda num_rows: self._start_loads(num_rows, begin_s))
        self._carry_out(begin_s)
        if plan.rows:
            self._launch(plan, begin_s)
        tokens: list[TokenOutput] = []
        is_collecting = len(self._in_flight) > (self._runner.overlaps and bool(plan.rows))
        if is_collecting:
            tokens = self._collect_oldest()
        if plan.awaits_masks:  # the tokens that they follow are known now
            self._in_flight[-1].launched.choose_tokens()
        self.may_advance = bool(plan.rows) or is_collecting or self._has_acted
        drafted, accepted = self.scheduler.drafts.take_counts()
        return StepOutput(
            step=plan.step,
            tokens=tokens,
            failures=self._outputs.take_failures(),
            residency=self._take_residency(),
            load=self._stats.load(self.scheduler, self._reclaimer, self._arena),
            copies_s=self.adapter_loads.take_copies_s(),
            drafted=drafted,
            accepted=accepted,
            preemptions=self.scheduler.num_preemptions,
            layer_stall_s=self._runner.stall_s,
        )

    def _launch(self, plan: StepPlan, now: float) -> None:
        if entered := [row.request for row in plan.rows if not row.request.has_entered]:
            for request in entered:
                request.has_entered = True
            self.announce([request.request_id for request in entered])
        self._in_flight.append(InFlight(plan, self._runner.launch(plan), now))
        self.scheduler.on_step_launched(plan)

    def _collect_oldest(self) -> list[TokenOutput]:
        """Wait for the oldest step in flight, and process its tokens."""
        plan, launched, begin_s = self._in_flight.popleft()
        rows = launched.result()
        now = self._clock()
        self.scheduler.on_step_done(plan)
        tokens = self._outputs.process(plan, rows, now)
        elapsed_s = now - max(begin_s, self._collected_s)
        self._stats.measure(plan, elapsed_s)
        self.scheduler.budget.measure(plan, elapsed_s)
        self.scheduler.decode_limit.measure(plan, elapsed_s)
        self._collected_s = now
        self._prefixes.token_s = self._stats.prefill_token_s or self._prefixes.token_s
        return tokens

    def check_integrity(self) -> None:
        """Assert that every block and slot is accounted for."""
        self.scheduler.check_integrity()

    def _handle(self, command: Command, now: float) -> None:
        match command:
            case Submit():
                self._submit(command, now)
            case Cancel(request_id):
                self._outputs.drop(request_id, now)
            case AdapterFetched():
                self._fail_all(self.adapter_loads.fetched(command, now), now)
            case FetchFailed(digest, error):
                self._fetch_failed(digest, error.to_error(), now)
            case Gone(digest):
                self.adapter_loads.gone(digest)
                self.cache.gone(digest)
            case Prefetch(digest, pin):
                self.adapter_loads.prefetch(digest, pin, now)
            case Unpin(digest):
                self.cache.unpin(digest)
            case UnloadAdapter(digest):
                self.cache.unload(digest)

    def _submit(self, command: Submit, now: float) -> None:
        request = to_request(command, now)
        for digest in request.adapters.digests:
            if (error := self.cache.failures.blocked(digest, now)) is not None:
                self._outputs.refuse(request, error)
                return
            self.adapter_loads.awaited(digest, now)
        message = command.request
        if message.grammar is None:
            self._queue(request, now)
        else:
            self._grammars.open(request, message.grammar, message.grammar_tokens)

    def _queue(self, request: Request, now: float) -> None:
        if self.cache.ready(request.adapters.digests):
            request.adapters_ready_s = request.arrival_s
        self.scheduler.submit(request)
        self._check([request], now)

    def _check(self, requests: Sequence[Request], now: float) -> None:
        """Fail requests that may not run with their adapters, once all adapters are known."""
        for request, error in self.adapter_loads.refusals(requests, self._base):
            self._outputs.fail(request, error, now)

    def _take_opened(self, now: float) -> None:
        """Queue requests whose grammar is compiled."""
        for request, error in self._grammars.opened():
            if error is None:
                self._queue(request, now)
            else:
                self._outputs.fail(request, error, now)

    def _fetch_failed(self, digest: str, error: LoraplexError, now: float) -> None:
        """Fail the requests that wait for an adapter. A copy on the device keeps serving without
        its files."""
        self.adapter_loads.fetch_failed(digest)
        if not self.cache.ready([digest]):
            self.cache.cancel_prefetch(digest)
            self._fail_waiting(digest, error, now)

    def _start_loads(self, num_rows: int, now: float) -> bool:
        """Begin the loads of the step that is being planned, and wait for them if that is worth it.
        True if an adapter may have arrived."""
        num_changes = self.cache.num_changes
        self._carry_out(now)
        num_wanted = len(self.scheduler.awaiting_copies)
        if self.adapter_loads.await_copies(num_rows, num_wanted, self._stats.step_s):
            self._collect(now)
        return self.cache.num_changes > num_changes

    def _carry_out(self, now: float) -> None:
        """Begin loads and carry out evictions."""
        self._has_acted |= self.adapter_loads.carry_out(self._stats.step_s)
        self._collect(now)

    def _collect(self, now: float) -> None:
        """Enter adapters that have been copied."""
        self._fail_all(self.adapter_loads.collect(now), now)
        for digest in self.adapter_loads.take_loaded():
            self._check(self.scheduler.waiting_for(digest), now)

    def _fail_all(self, failures: Iterable[tuple[str, LoraplexError]], now: float) -> None:
        for digest, error in failures:
            self._fail_waiting(digest, error, now)

    def _fail_waiting(self, digest: str, error: LoraplexError, now: float) -> None:
        self._residency_errors[digest] = error
        for request in self.scheduler.waiting_for(digest):
            self._outputs.fail(request, error, now)

    def _take_residency(self) -> list[ResidencyChange]:
        errors = {**self.adapter_loads.refused, **self._residency_errors}
        self._residency_errors.clear()
        self.adapter_loads.refused.clear()
        changes = dict(self.cache.take_changes())
        for digest in errors:
            changes.setdefault(digest, self.cache.get(digest))
        for digest in self.adapter_loads.take_moved_on_host():
            if (adapter := self.cache.get(digest)) is not None:
                changes.setdefault(digest, adapter)
        return [
            residency_change(
                digest,
                adapter,
                self.page_bytes,
                self.adapter_loads.host_bytes.get(digest, 0),
                errors.get(digest),
            )
            for digest, adapter in changes.items()
        ]


def _base_key(info: ModelInfo, layout: KvLayout) -> str:
    """A key of all that KV depends on besides each request: base, arithmetic and layout. The rope
    of an adapter is given with the request."""
    parts = (info.geometry.fingerprint, info.numerics_fingerprint, info.dtype)
    return repr((*parts, layout.tokens_per_block, layout.windows, "rope of the base"))
