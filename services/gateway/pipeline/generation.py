"""Runs one request through the gateway: resolve, tokenize, check, admit, relay, detokenize."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Sequence
from contextlib import aclosing

from loraplex.api.output import FinishReason, Usage
from loraplex.api.pooling import Pooling
from loraplex.api.request import ChatPrompt
from loraplex.api.sampling import GrammarTokens
from loraplex.errors import InvalidRequest, LoraplexError
from loraplex_services.common.telemetry.tracing import Span, Tracer
from loraplex_services.gateway.clock import now_s
from loraplex_services.gateway.metrics import (
    COMPLETION_TOKENS,
    FIRST_TOKEN_S,
    PROMPT_TOKENS,
    REQUEST_S,
)
from loraplex_services.gateway.pipeline.admission_steps import AdmissionSteps
from loraplex_services.gateway.pipeline.call_limits import (
    check_call,
    check_experts,
    truncation_of,
)
from loraplex_services.gateway.pipeline.choice_text import ChoiceText
from loraplex_services.gateway.pipeline.collected_bytes import CollectedBytes
from loraplex_services.gateway.pipeline.history import CANCELLED, OK
from loraplex_services.gateway.pipeline.interleaving import TextDeltas, interleaved
from loraplex_services.gateway.pipeline.live import LiveRequests, check_update_policy
from loraplex_services.gateway.pipeline.mirror import Mirrors, draining
from loraplex_services.gateway.pipeline.pooling import choose_pooling, scored_ids
from loraplex_services.gateway.pipeline.prepared import PreparedRequest, scaled
from loraplex_services.gateway.pipeline.sampling import check_grammar_tokens, resolve
from loraplex_services.gateway.pipeline.spans import end_refused, end_span
from loraplex_services.gateway.pipeline.usage import UsageCounter, outcome_of
from loraplex_services.gateway.registry.resolve import Resolver
from loraplex_services.gateway.request import GenerateCall, Target, TextDelta, name_adapters
from loraplex_services.gateway.routing.relay import Relay
from loraplex_services.gateway.routing.steering import Steering
from loraplex_services.gateway.text.adapter_text import AdapterText
from loraplex_services.gateway.text.chat_style import AS_DETECTED, StyleSettings
from loraplex_services.gateway.workers.fleet import Fleet


def draw_seed() -> int:
    """A random seed for a request without one."""
    return secrets.randbits(64)


def _first_token_due_s(call: GenerateCall, arrival_s: float) -> float | None:
    """Raises: InvalidRequest."""
    if (seconds := call.first_token_s) is None:
        return None
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidRequest.field("first_token_s", seconds, "must be a number of seconds above 0")
    return arrival_s + seconds


class Generation:
    """Prepares and runs requests, independently of gRPC and HTTP."""

    def __init__(
        self,
        resolver: Resolver,
        fleet: Fleet,
        adapter_text: AdapterText,
        relay: Relay,
        live: LiveRequests,
        admission: AdmissionSteps,
        *,
        max_request_s: float,
        chat_style: StyleSettings = AS_DETECTED,
        draw_seed: Callable[[], int] = draw_seed,
        tracer: Tracer | None = None,
    ) -> None:
        """
        Args:
            chat_style: how answers of chats are read.
            tracer: begins a span for each request; None = none is exported.
        """
        self._resolver = resolver
        self._fleet = fleet
        self._adapter_text = adapter_text
        self._relay = relay
        self._live = live
        self._admission = admission
        self._max_request_s = max_request_s
        self._chat_style = chat_style
        self._draw_seed = draw_seed
        self._tracer = tracer or Tracer()
        self._is_draining = False
        self.usage = UsageCounter()
        self.mirrors = Mirrors()
        self.collected = CollectedBytes()
        """Memory of the answers that are collected before they are sent."""

    def refuse_new(self) -> None:
        """Refuse new requests, and end mirrors. Requests that are already prepared still run."""
        self._is_draining = True
        self.mirrors.end()

    async def prepare(self, call: GenerateCall) -> PreparedRequest:
        """Check a request and resolve everything that a worker needs.

        Raises: ResourceExhausted, NotFound, InvalidRequest, Unsupported, Unavailable.
        """
        span = self._tracer.begin("gateway request", call.trace, now_s())
        try:
            prepared = await self._prepared(call, span)
        except LoraplexError as error:
            self.usage.refuse(call, error)
            end_refused(span, call, error)
            raise
        span.child("prepare", prepared.arrival_s, now_s())
        return prepared

    async def _prepared(self, call: GenerateCall, span: Span) -> PreparedRequest:
        if self._is_draining:
            raise draining()
        check_call(call)
        arrival_s = now_s()
        limits = await self._admission.charge_request(call.tenant)
        target = await self._resolver.target(call)
        check_update_policy(call, target)
        pooling = choose_pooling(call, target.adapters)
        served = self._fleet.served(target.base_id)
        model = served.model.under(target.adapters)
        tokenizer = await self._adapter_text.tokenizer(served, target, call.tenant)
        truncation = truncation_of(call, model)
        prompt_ids = await tokenizer.encode(call.prompt, model, call.tenant, truncation)
        if pooling is Pooling.HEAD:
            prompt_ids = scored_ids(prompt_ids, target.adapters, model)
        resolved = resolve(
            call.sampling,
            model,
            len(prompt_ids),
            await tokenizer.words(call.sampling.bad_words),
            fills_context=isinstance(call.prompt, ChatPrompt),
            draw_seed=self._draw_seed,
        )
        check_experts(call, model, len(prompt_ids), resolved.num_choices)
        grammar_tokens = _grammar_tokens(target, tokenizer.added_texts)
        check_grammar_tokens(call.sampling.grammar, grammar_tokens)
        target = scaled(target, resolved.scale)
        timeout_s = min(call.timeout_s or self._max_request_s, self._max_request_s)
        return PreparedRequest(
            call=call,
            target=target,
            base=served.model,
            tokens=tokenizer.tokens,
            style=self._chat_style.over(tokenizer.style),
            prompt_ids=prompt_ids,
            resolved=resolved,
            arrival_s=arrival_s,
            deadline_s=arrival_s + timeout_s,
            first_token_due_s=_first_token_due_s(call, arrival_s),
            limits=limits,
            pooling=pooling,
            grammar_tokens=grammar_tokens,
            usage=Usage(),
            labels={adapter.digest: adapter.label for adapter in target.adapters},
            span=span,
        )

    async def prepare_all(self, calls: Sequence[GenerateCall]) -> list[PreparedRequest]:
        """Prepare the prompts of one request one after another, so that the event loop serves
        other requests between them. The first error ends it. Raises as `prepare` does."""
        prepared = []
        for call in calls:
            prepared.append(await self.prepare(call))
            await asyncio.sleep(0)
        return prepared

    async def run(self, prepared: PreparedRequest) -> TextDeltas:
        """Yield the text of all choices as it arrives; each choice ends with a finish reason.

        Closing the iterator cancels the request. Raises: ResourceExhausted, Unavailable,
        DeadlineExceeded, or a worker's error.
        """
        outcome = CANCELLED
        try:
            async with aclosing(self._counted(prepared)) as text_deltas:
                async for text_delta in text_deltas:
                    if text_delta.pooled:
                        outcome = OK
                    yield text_delta
            outcome = OK
        except BaseException as error:
            if isinstance(error, InvalidRequest):
                name_adapters(error, prepared.labels)
            if outcome != OK:
                outcome = outcome_of(error)
            raise
        finally:
            self.usage.add(prepared, outcome)
            end_span(prepared, outcome)

    async def _counted(self, prepared: PreparedRequest) -> TextDeltas:
        base_id = prepared.base.base_id
        async with (
            self._live.entered(prepared) as steering,
            self._admission.admitted(prepared) as permit,
            aclosing(self._choices(prepared, steering)) as text_deltas,
        ):
            PROMPT_TOKENS.labels(base_id).inc(prepared.usage.prompt_tokens)
            is_first = True
            recording = self.mirrors.recording(prepared)
            async for text_delta in text_deltas:
                if is_first:
                    first_token_s = now_s() - prepared.arrival_s
                    FIRST_TOKEN_S.labels(base_id).observe(first_token_s, prepared.span.exemplar)
                    self.usage.history.first_token(first_token_s)
                    is_first = False
                _count(prepared.usage, text_delta)
                self.usage.history.generated(len(text_delta.token_ids))
                permit.served(len(text_delta.token_ids))
                if recording is not None:
                    recording.add(text_delta)
                yield text_delta
        if recording is not None:
            recording.end()
        COMPLETION_TOKENS.labels(base_id).inc(prepared.usage.completion_tokens)
        duration_s = now_s() - prepared.arrival_s
        REQUEST_S.labels(base_id).observe(duration_s, prepared.span.exemplar)

    def _choices(self, prepared: PreparedRequest, steering: Steering) -> TextDeltas:
        count = prepared.resolved.num_choices
        if count == 1:
            return self._choice(prepared, 0, steering)
        return interleaved([self._choice(prepared, index, steering) for index in range(count)])

    async def _choice(
        self, prepared: PreparedRequest, index: int, steering: Steering
    ) -> TextDeltas:
        sampling = prepared.resolved.sampling
        of_prompt = (sampling.prompt_logprobs, prepared.call.routed_from)
        is_silent = not prepared.resolved.emits_tokens and of_prompt == (None, None)
        if is_silent and not prepared.pooling:
            yield TextDelta(index, finish_reason=FinishReason.LENGTH)
            return
        text = ChoiceText(index, prepared.tokens, prepared.resolved.text)
        async with aclosing(self._relay.stream(prepared.job(index), steering)) as events:
            async for event in events:
                if not prepared.resolved.emits_tokens:
                    yield _prompt_only(text.add(event))
                    return
                text_delta = text.add(event, sampling.stop_token_ids)
                yield text_delta
                if text_delta.finish_reason is not None:
                    return


def _prompt_only(text_delta: TextDelta) -> TextDelta:
    """The answer to `max_tokens` 0, which concerns only the prompt."""
    return TextDelta(
        text_delta.index,
        finish_reason=FinishReason.LENGTH,
        prompt_logprobs=text_delta.prompt_logprobs,
        cached_tokens=text_delta.cached_tokens,
        timings=text_delta.timings,
        worker_id=text_delta.worker_id,
        pooled=text_delta.pooled,
        routed_experts=text_delta.routed_experts,
    )


def _count(usage: Usage, text_delta: TextDelta) -> None:
    """Mutates: usage."""
    usage.completion_tokens += len(text_delta.token_ids)
    usage.cached_tokens = max(usage.cached_tokens, text_delta.cached_tokens)


def _grammar_tokens(target: Target, added_texts: tuple[tuple[int, str], ...]) -> GrammarTokens:
    """How the adapter's tokens differ from the base's, which constrained output depends on."""
    if len(target.adapters) != 1:
        return GrammarTokens()
    return GrammarTokens(added_texts, target.adapters[0].eos_token_ids)
