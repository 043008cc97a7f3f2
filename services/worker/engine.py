"""One worker's engine: intake -> residency -> plan -> execute -> tokens, one call of `step` each.

Composes scheduler, cache, arena and runner and is the only place where they meet. No I/O but the
runner's; time comes from an injected clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from loraplex.errors import LoraplexError, ResourceExhausted
from services.worker.adapters.cache import AdapterCache
from services.worker.adapters.residency import Load
from services.worker.gauges import Gauges
from services.worker.grammars.opening import Grammars, no_way_on
from services.worker.memory.arena import Arena
from services.worker.memory.kv_blocks import KvLayout
from services.worker.memory.prefix_cache import PrefixCache
from services.worker.memory.reclaimer import Reclaimer
from services.worker.messages import (
    Cancel,
    Command,
    EngineConfig,
    EngineReady,
    Failure,
    Fetched,
    FetchFailed,
    Gone,
    Residency,
    StepOutput,
    Submit,
    TokenOutput,
    Unload,
    Unpin,
    Want,
    WireError,
)
from services.worker.outputs import finish_reason, residency, stop_token, timings, to_request
from services.worker.request import (
    Logprobs,
    PlannedRow,
    Request,
    SampledRow,
    StepPlan,
)
from services.worker.runner_protocol import ModelInfo, Runner
from services.worker.scheduling.policies import (
    Policy,
    ServiceCounters,
    clustered,
    fair,
    first_come,
)
from services.worker.scheduling.scheduler import Scheduler, SchedulerLimits

logger = logging.getLogger(__name__)

MAX_ADAPTER_SHARE = 0.5
"""Of the arena, for one adapter."""
MAX_PINNED_SHARE = 0.5
"""Of the arena, for all pinned adapters."""

POLICIES: dict[str, Callable[[ServiceCounters], Policy]] = {
    "fcfs": lambda counters: first_come,
    "clustered": lambda counters: clustered(max_distinct=8, max_age_s=1.0),
    "fair": fair,
}


class Engine:
    """Turns commands into tokens, one step at a time."""

    def __init__(self, runner: Runner, config: EngineConfig, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._clock = clock
        self._info = runner.model_info()
        self._arena = Arena(runner.arena_blocks)
        self._reclaimer = Reclaimer(self._arena)
        self.cache = AdapterCache(
            self._arena,
            self._reclaimer,
            max_resident=config.max_resident,
            max_adapter_blocks=int(runner.arena_blocks * MAX_ADAPTER_SHARE),
            max_pinned_blocks=int(runner.arena_blocks * MAX_PINNED_SHARE),
        )
        limits = SchedulerLimits(config.max_step_tokens, config.max_running, config.max_loras)
        layout = KvLayout(
            runner.tokens_per_block, tuple(runner.kv_group_windows), limits.max_step_tokens
        )
        self._prefixes = PrefixCache(
            self._arena, layout, _base_key(self._info, layout), enabled=config.prefix_cache
        )
        counters = ServiceCounters()
        policy = POLICIES[config.policy](counters)
        self.scheduler = Scheduler(
            limits,
            layout,
            self._arena,
            self.cache,
            self._prefixes,
            self._reclaimer,
            policy,
            counters,
        )
        self._grammars = Grammars(
            Path(config.model_dir) / "tokenizer.json",
            self._info.vocab_size,
            self._info.eos_token_ids,
        )
        self._gauges = Gauges()
        self._prompt_logprobs: dict[str, list[Logprobs]] = {}
        self._failures: list[Failure] = []
        self._copies_s: list[float] = []
        self._awaited_since_s: dict[str, float] = {}
        """Adapters that requests came for while they were not on disk."""
        self._residency_errors: dict[str, LoraplexError] = {}
        self._may_advance = False
        self.announce: Callable[[list[str]], None] = lambda request_ids: None
        """Called with the requests whose first step is about to run."""

    @property
    def ready(self) -> EngineReady:
        """What the door is told when the engine stands."""
        return EngineReady(self._info, self._arena.num_blocks, self._runner.block_bytes)

    @property
    def may_advance(self) -> bool:
        """True when another step could do something without a new command."""
        return self._may_advance

    @property
    def has_requests(self) -> bool:
        """True while any request waits or runs."""
        return self.scheduler.has_work or bool(self._grammars.num_opening)

    @property
    def awaits_grammars(self) -> bool:
        """True while a grammar is compiled or followed beside the loop."""
        return bool(self._grammars.num_opening) or self._grammars.has_held

    def step(self, commands: Iterable[Command]) -> StepOutput:
        """Obey `commands`, run one forward pass over what is planned, return the news.

        Raises:
            Exception: the runner failed; the engine's state is unknown and it must be replaced.
        """
        begin_s = self._clock()
        for command in commands:
            self._obey(command, begin_s)
        self._take_opened(begin_s)
        self._grammars.hold_back()
        for request, error in self.scheduler.hopeless(begin_s):
            self._fail(request, error, begin_s)
        plan = self.scheduler.plan(begin_s)
        has_loaded = self._carry_out(begin_s)
        if entered := [r.request.request_id for r in plan.rows if _enters(r, begin_s)]:
            self.announce(entered)
        rows = self._runner.execute(plan) if plan.rows else []
        self._arena.retire(plan.step)
        now = self._clock()
        tokens = self._take_in(plan, rows, now)
        if plan.rows:
            self._gauges.measure(plan, now - begin_s)
            self._prefixes.token_s = self._gauges.prefill_token_s or self._prefixes.token_s
        self._may_advance = bool(plan.rows) or has_loaded
        return StepOutput(
            step=plan.step,
            tokens=tokens,
            failures=self._take_failures(),
            residency=self._take_residency(),
            load=self._gauges.load(self.scheduler, self._reclaimer, self._arena),
            copies_s=self._take_copies(),
        )

    def check_integrity(self) -> None:
        """Assert that every block and slot is accounted for."""
        self.scheduler.check_integrity()

    def _obey(self, command: Command, now: float) -> None:
        match command:
            case Submit():
                self._submit(command, now)
            case Cancel(request_id):
                self._drop(request_id, now)
            case Fetched():
                self._fetched(command, now)
            case FetchFailed(digest, error):
                self._fetch_failed(digest, error.to_error(), now)
            case Gone(digest):
                self.cache.gone(digest)
            case Want(digest, pin):
                self._want(digest, pin, now)
            case Unpin(digest):
                self.cache.unpin(digest)
            case Unload(digest):
                self.cache.unload(digest)

    def _submit(self, command: Submit, now: float) -> None:
        request = to_request(command, now)
        for digest in request.adapters.digests:
            if (error := self.cache.failures.blocked(digest, now)) is not None:
                self._failures.append(Failure(request.request_id, WireError.of(error)))
                return
            if not self.cache.known([digest]):
                self._awaited_since_s.setdefault(digest, now)
        if command.grammar is None:
            self.scheduler.submit(request)
        else:
            self._grammars.open(request, command.grammar)

    def _take_opened(self, now: float) -> None:
        """Queue requests whose grammar is compiled."""
        for request, error in self._grammars.opened():
            if error is None:
                self.scheduler.submit(request)
            else:
                self._fail(request, error, now)

    def _fetched(self, command: Fetched, now: float) -> None:
        path = Path(command.path)
        if (since_s := self._awaited_since_s.pop(command.digest, None)) is not None:
            self.scheduler.times.fetches.add(now - since_s)
        if (adapter := self.cache.get(command.digest)) is not None:
            self.cache.fetched(command.digest, path, adapter.num_blocks, command.max_rank)
            return
        try:
            num_blocks = self._runner.adapter_blocks(path)
            self.cache.fetched(command.digest, path, num_blocks, command.max_rank)
        except Exception as failure:
            self._fail_waiting(command.digest, _load_error(failure, command.digest), now)

    def _fetch_failed(self, digest: str, error: LoraplexError, now: float) -> None:
        """A copy on the device serves on, whatever became of the files."""
        self._awaited_since_s.pop(digest, None)
        if not self.cache.ready([digest]):
            self.cache.unwant(digest)
            self._fail_waiting(digest, error, now)

    def _want(self, digest: str, pin: bool, now: float) -> None:
        if not self.cache.known([digest]):
            return
        try:
            if pin:
                self.cache.pin(digest, now)
            self.cache.want(digest)
        except ResourceExhausted as error:
            self._residency_errors[digest] = error

    def _carry_out(self, now: float) -> bool:
        """Run loads and evictions. True when an adapter became usable or unusable."""
        actions = self.cache.take_actions()
        for action in actions:
            if isinstance(action, Load):
                self._load(action, now)
            else:
                self._runner.unload_adapter(action.slot)
        return bool(actions)

    def _load(self, action: Load, now: float) -> None:
        begin_s = self._clock()
        try:
            self._runner.load_adapter(action.slot, action.path, action.blocks)
        except Exception as failure:
            error = _load_error(failure, action.digest)
            self.cache.failed(action.digest, error, now)
            self._fail_waiting(action.digest, error, now)
        else:
            copy_s = self._clock() - begin_s
            self.cache.loaded(action.digest, copy_s)
            self._copies_s.append(copy_s)
            self.scheduler.times.copies.add(copy_s)

    def _take_in(self, plan: StepPlan, rows: Sequence[SampledRow], now: float) -> list[TokenOutput]:
        """Append what was sampled. Mutates the requests; removes those that end."""
        outputs = []
        for row, sampled in zip(plan.rows, rows, strict=True):
            assert sampled.request_id == row.request.request_id, "rows out of plan order"
            self.scheduler.computed(row)
            self._keep_prompt_logprobs(row, sampled)
            if row.needs_logits and self._follow(row.request, sampled, now):
                outputs.append(self._append(row.request, sampled, now))
        return outputs

    def _follow(self, request: Request, sampled: SampledRow, now: float) -> bool:
        """Take the token into the request's grammar. False when there is none: it has failed."""
        if request.constraint is None or request.sampling.max_tokens == 0:
            return True
        try:
            if sampled.token_id is None:
                raise no_way_on()
            self._grammars.advance(request, [sampled.token_id])
        except LoraplexError as error:
            self._fail(request, error, now)
            return False
        return True

    def _keep_prompt_logprobs(self, row: PlannedRow, sampled: SampledRow) -> None:
        request = row.request
        if request.sampling.prompt_logprobs is None or request.output_ids:
            return
        if row.start == 0:
            self._prompt_logprobs[request.request_id] = []
        self._prompt_logprobs[request.request_id].extend(sampled.prompt_logprobs)

    def _append(self, request: Request, sampled: SampledRow, now: float) -> TokenOutput:
        is_first = request.first_token_s is None
        if is_first:
            request.first_token_s = now
            started_s = request.first_scheduled_s or now
            num_tokens = request.num_tokens - request.num_cached
            self.scheduler.times.prefilled(num_tokens, now - started_s)
        position = len(request.output_ids)
        token_ids = [] if request.sampling.max_tokens == 0 else [sampled.token_id or 0]
        request.output_ids.extend(token_ids)
        reason = finish_reason(request, self._info.eos_token_ids)
        prompt_logprobs = self._prompt_logprobs.pop(request.request_id, None)
        if reason:
            self._drop(request.request_id, now)
        queue_s, load_s, prefill_s = timings(request) if reason else (0.0, 0.0, 0.0)
        return TokenOutput(
            request_id=request.request_id,
            token_ids=token_ids,
            output_position=position,
            finish_reason=reason,
            stop_token_id=stop_token(request, reason, self._info.eos_token_ids),
            logprobs=[sampled.logprobs] if sampled.logprobs and token_ids else [],
            prompt_logprobs=prompt_logprobs,
            cached_tokens=min(request.num_cached, len(request.prompt_ids)) if is_first else 0,
            queue_s=queue_s,
            load_s=load_s,
            prefill_s=prefill_s,
            pooled=list(sampled.pooled),
        )

    def _fail_waiting(self, digest: str, error: LoraplexError, now: float) -> None:
        self._residency_errors[digest] = error
        for request in self.scheduler.waiting_for(digest):
            self._fail(request, error, now)

    def _fail(self, request: Request, error: LoraplexError, now: float) -> None:
        self._drop(request.request_id, now)
        self._failures.append(Failure(request.request_id, WireError.of(error)))

    def _drop(self, request_id: str, now: float) -> None:
        """Forget a request that has ended."""
        self.scheduler.remove(request_id, now)
        self._grammars.forget(request_id)
        self._prompt_logprobs.pop(request_id, None)

    def _take_copies(self) -> list[float]:
        copies_s, self._copies_s = self._copies_s, []
        return copies_s

    def _take_failures(self) -> list[Failure]:
        failures, self._failures = self._failures, []
        return failures

    def _take_residency(self) -> list[Residency]:
        errors, self._residency_errors = self._residency_errors, {}
        changes = dict(self.cache.take_changes())
        for digest in errors:
            changes.setdefault(digest, self.cache.get(digest))
        block_bytes = self._runner.block_bytes
        return [
            residency(digest, adapter, block_bytes, errors.get(digest))
            for digest, adapter in changes.items()
        ]


def _base_key(info: ModelInfo, layout: KvLayout) -> str:
    """Base, arithmetic and KV layout. The rope variant is the base's: no adapter changes it."""
    parts = (info.geometry.fingerprint, info.numerics_fingerprint, info.dtype)
    return repr((*parts, layout.tokens_per_block, layout.windows, "rope of the base"))


def _enters(row: PlannedRow, now: float) -> bool:
    """True in the first step of a request."""
    return row.request.first_scheduled_s == now


def _load_error(failure: Exception, digest: str) -> LoraplexError:
    """What requests are told when an adapter cannot be read or copied."""
    if isinstance(failure, LoraplexError):
        return failure
    logger.error("adapter load failed", exc_info=failure, extra={"digest": digest})
    return LoraplexError(f"adapter {digest} could not be loaded", reason="ADAPTER_LOAD_FAILED")
