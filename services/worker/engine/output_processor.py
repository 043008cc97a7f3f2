"""Appends the tokens that steps choose to their requests, and ends requests."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.api.output import (
    FinishReason,
    PackedLogprobs,
    RoutedExperts,
    RoutingShape,
    TokenLogprob,
)
from loraplex.api.pooling import Pooling
from loraplex.errors import InvalidRequest, LoraplexError
from loraplex_services.worker.engine.outputs import finish_reason, stop_token, timings
from loraplex_services.worker.grammars.opening import Grammars
from loraplex_services.worker.scheduling.scheduler import Scheduler
from loraplex_services.worker.types.messages import Failure, TokenOutput, WireError
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import PlannedRow, SampledRow, StepPlan


class OutputProcessor:
    """Appends sampled tokens, and removes requests that end from the scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        grammars: Grammars,
        eos_token_ids: Sequence[int],
        routing: RoutingShape | None = None,
    ) -> None:
        """`routing`: of the base."""
        self._scheduler = scheduler
        self._grammars = grammars
        self._eos_token_ids = eos_token_ids
        self._routing = routing
        self._prompt_logprobs: dict[str, PackedLogprobs] = {}
        self._sums: dict[str, list[float]] = {}
        """Partial sums of the hidden states of prompts with mean pooling, by request id."""
        self._failures: list[Failure] = []

    def process(self, plan: StepPlan, rows: Sequence[SampledRow], now: float) -> list[TokenOutput]:
        """Append what was sampled. Mutates the requests, and removes those that end. Requests that
        have ended since the step was launched get nothing more."""
        outputs: list[TokenOutput] = []
        runs, drafts = self._scheduler.runs, self._scheduler.drafts
        num_contexts = plan.num_contexts
        for index, (row, sampled) in enumerate(zip(plan.rows, rows, strict=True)):
            request = row.request
            if not runs(request):
                continue
            if index < num_contexts:
                self._keep_prompt_logprobs(row, sampled)
                self._add_up(row, sampled)
            if row.needs_logits:
                if self._follow(request, sampled, now):
                    if drafts.are_on:
                        drafts.verified(row, sampled, now)
                    outputs.append(self._append(row, sampled, now))
            elif experts := self._take_experts(row, sampled, 0):
                position = len(request.output_ids)
                outputs.append(
                    TokenOutput(request.request_id, [], position, routed_experts=experts)
                )
        return outputs

    def fail(self, request: Request, error: LoraplexError, now: float) -> None:
        """End a request with an error."""
        self.drop(request.request_id, now)
        self.refuse(request, error)

    def refuse(self, request: Request, error: LoraplexError) -> None:
        """Report why a request does not begin."""
        self._failures.append(Failure(request.request_id, WireError.of(error)))

    def drop(self, request_id: str, now: float) -> None:
        """Forget a request that has ended."""
        self._scheduler.remove(request_id, now)
        self._grammars.forget(request_id)
        self._prompt_logprobs.pop(request_id, None)
        self._sums.pop(request_id, None)

    def take_failures(self) -> list[Failure]:
        """Failures since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def _follow(self, request: Request, sampled: SampledRow, now: float) -> bool:
        """Pass the token to the request's grammar. False if the request has failed: no token was
        allowed, or the grammar does not accept it."""
        constraint, token_id, further = request.constraint, sampled.token_id, sampled.further
        if constraint is None and token_id is not None and not further:
            return True
        if request.sampling.max_tokens == 0:
            return True
        try:
            if token_id is None or any(each.token_id is None for each in further):
                raise _no_allowed_token(request)
            if constraint is not None:
                self._grammars.advance(request, [token_id])
        except LoraplexError as error:
            self.fail(request, error, now)
            return False
        return True

    def _keep_prompt_logprobs(self, row: PlannedRow, sampled: SampledRow) -> None:
        request = row.request
        if request.sampling.prompt_logprobs is None or request.output_ids:
            return
        before = self._prompt_logprobs[request.request_id] if row.start else PackedLogprobs()
        self._prompt_logprobs[request.request_id] = before.followed_by(sampled.prompt_logprobs)

    def _add_up(self, row: PlannedRow, sampled: SampledRow) -> None:
        if row.request.pooling is not Pooling.MEAN:
            return
        before = self._sums.get(row.request.request_id) if row.start else None
        sums = map(sum, zip(before, sampled.pooled, strict=True)) if before else sampled.pooled
        self._sums[row.request.request_id] = list(sums)

    def _vector(self, request: Request, sampled: SampledRow) -> list[float]:
        if request.pooling is not Pooling.MEAN:
            return list(sampled.pooled)
        num_tokens = len(request.prompt_ids)
        return [value / num_tokens for value in self._sums[request.request_id]]

    def _take_experts(
        self, row: PlannedRow, sampled: SampledRow, num_further: int
    ) -> RoutedExperts | None:
        """The experts of positions that were computed for the first time. Mutates: the request.

        Args:
            num_further: tokens that followed accepted drafts.
        """
        first = row.request.routed_from
        end = row.start + row.num_tokens - len(row.drafts) + num_further
        if first is None or self._routing is None or end <= first:
            return None
        assert row.start <= first, "the experts of a position are lost"
        row.request.routed_from = end
        return RoutedExperts(row.start, self._routing, sampled.experts).between(first, end)

    def _append(self, row: PlannedRow, sampled: SampledRow, now: float) -> TokenOutput:
        request = row.request
        is_first = request.first_token_s is None
        if is_first:
            request.first_token_s = now
            started_s = request.first_scheduled_s or now
            num_tokens = request.num_tokens - request.num_cached
            self._scheduler.times.prefills.add(num_tokens, now - started_s)
        position = len(request.output_ids)
        token_ids, logprobs, reason = self._take(request, sampled)
        if not (is_first or reason or logprobs) and request.routed_from is None:
            return TokenOutput(request.request_id, token_ids, position)
        experts = None
        if request.routed_from is not None:
            experts = self._take_experts(row, sampled, max(0, len(token_ids) - 1))
        prompt_logprobs = self._prompt_logprobs.pop(request.request_id, None)
        vector = self._vector(request, sampled)
        if reason:
            self.drop(request.request_id, now)
        return TokenOutput(
            request_id=request.request_id,
            token_ids=token_ids,
            output_position=position,
            finish_reason=reason,
            stop_token_id=stop_token(request, reason, self._eos_token_ids),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            cached_tokens=min(request.num_cached, len(request.prompt_ids)) if is_first else 0,
            timings=timings(request) if reason else None,
            pooled=vector,
            routed_experts=experts,
        )

    def _take(
        self, request: Request, sampled: SampledRow
    ) -> tuple[list[int], list[TokenLogprob], FinishReason | None]:
        """Append tokens until the request ends. Returns them, their logprobs, and why the request
        ends."""
        if request.sampling.max_tokens == 0:
            return [], [], finish_reason(request, self._eos_token_ids)
        token_ids = [sampled.token_id or 0]
        logprobs = [sampled.logprobs] if sampled.logprobs else []
        reason = self._take_one(request, token_ids[0])
        for token_id, logprob in sampled.further:
            if reason:
                break
            self._scheduler.on_draft(request)
            token_ids.append(token_id or 0)
            logprobs += [logprob] if logprob else []
            reason = self._take_one(request, token_ids[-1])
        return token_ids, logprobs, reason

    def _take_one(self, request: Request, token_id: int) -> FinishReason | None:
        """Append a token. Returns why the request ends after it."""
        request.take(token_id)
        self._scheduler.on_token(request)
        return finish_reason(request, self._eos_token_ids)


def _no_allowed_token(request: Request) -> InvalidRequest:
    """The error of a request whose grammar and masks allow no token."""
    sampling, field = request.sampling, "bad_token_ids"
    if request.constraint is not None:
        field = "grammar"
    elif sampling.allowed_token_ids:
        field = "allowed_token_ids"
    return InvalidRequest.field(
        field,
        "",
        "no token may follow the output so far: the grammar, allowed_token_ids, bad_token_ids, "
        "bad_words, stop_token_ids and min_tokens leave none",
    )
