"""A checked request: the facts that admission needs, and the request that a worker gets."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from loraplex.api.output import ServedBy, Usage
from loraplex.api.pooling import Pooling
from loraplex.api.request import AdapterSet, TextPrompt, WorkerRequest
from loraplex.api.sampling import Grammar, GrammarTokens
from loraplex.api.tenants import TenantLimits
from loraplex_services.common.telemetry.tracing import Span
from loraplex_services.gateway.admission.request import AdmissionRequest
from loraplex_services.gateway.pipeline.sampling import (
    ResolvedSampling,
    check_grammar,
    check_grammar_tokens,
)
from loraplex_services.gateway.request import (
    GenerateCall,
    RunningAdapter,
    ServedModel,
    Target,
    WorkerJob,
)
from loraplex_services.gateway.text.chat_style import ChatStyle
from loraplex_services.gateway.text.detokenize import TokenBytes, decode_all

_MAX_UNUSED_LABELS = 32


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A `GenerateCall` with its adapters and token ids; made by `Generation.prepare`, run once."""

    call: GenerateCall
    target: Target
    base: ServedModel
    tokens: TokenBytes
    style: ChatStyle
    prompt_ids: tuple[int, ...]
    resolved: ResolvedSampling
    arrival_s: float
    deadline_s: float
    limits: TenantLimits
    grammar_tokens: GrammarTokens
    """Token rules of the grammar, if there is one."""
    pooling: Pooling = Pooling.NONE
    first_token_due_s: float | None = None
    """Deadline of the first token; None = only the deadline counts."""
    usage: Usage = field(default_factory=Usage)
    """Counts grow while the request runs."""
    labels: dict[str, str] = field(default_factory=dict)
    """tenant/name:vN by digest of the adapters that it began or has run with. If it follows a tag,
    there may be `_MAX_UNUSED_LABELS` others."""
    span: Span = field(default_factory=Span)

    @property
    def adapter_set(self) -> AdapterSet:
        """The adapters with which the request begins."""
        return adapter_set(self.target)

    def note_labels(self, target: Target, used: Collection[str]) -> None:
        """Remember the names of adapters, and forget those from which no tokens came or can come.
        Mutates: labels.

        Args:
            used: digests of the adapters that have computed tokens, or may still do so.
        """
        self.labels.update((adapter.digest, adapter.label) for adapter in target.adapters)
        if len(self.labels) > len(used) + _MAX_UNUSED_LABELS:
            needed = {*self.adapter_set.digests, *adapter_set(target).digests, *used}
            for digest in self.labels.keys() - needed:
                del self.labels[digest]

    def can_follow(self, target: Target) -> bool:
        """Whether the request may continue with a target: its tokens mean the same there."""
        return (self.target.base_id, *map(_token_facts, self.target.adapters)) == (
            target.base_id,
            *map(_token_facts, target.adapters),
        )

    def prompt_text(self) -> str:
        """The prompt as text, for echo."""
        if isinstance(self.call.prompt, TextPrompt):
            return self.call.prompt.text
        skip_special = self.resolved.text.skip_special
        return decode_all(self.tokens, self.prompt_ids, skip_special=skip_special)

    def base_token(self, text: str) -> int | None:
        """The id of an added token of the base, by its text. Grammars cannot name a token that only
        an adapter has."""
        token_id = self.tokens.added_id(text)
        return None if token_id is None or token_id >= self.base.vocab_size else token_id

    def kept_to(self, grammar: Grammar | None) -> PreparedRequest:
        """A copy of the request with another grammar. Raises: InvalidRequest if it is too large,
        Unsupported if the adapter adds too many tokens."""
        check_grammar(grammar)
        check_grammar_tokens(grammar, self.grammar_tokens)
        sampling = replace(self.call.sampling, grammar=grammar)
        return replace(self, call=replace(self.call, sampling=sampling))

    def job(self, sample_index: int) -> WorkerJob:
        """The job of one choice, for a worker."""
        call, sampling, grammar = self.call, self.resolved.sampling, self.call.sampling.grammar
        request = WorkerRequest(
            request_id=call.request_id,
            tenant=call.tenant,
            prompt_ids=self.prompt_ids,
            adapters=self.adapter_set,
            sampling=replace(sampling, max_tokens=0) if self.pooling else sampling,
            sample_index=sample_index,
            cache_salt=call.cache_salt or call.tenant,
            priority=call.priority,
            trace=self.span.traceparent,
            grammar=grammar,
            grammar_tokens=GrammarTokens() if grammar is None else self.grammar_tokens,
            pooling=self.pooling,
            routed_from=call.routed_from,
            fairness_weight=self.limits.fairness_weight,
        )
        return WorkerJob(request, self.base.base_id, self.deadline_s, self.first_token_due_s)

    def served_by(self, worker_id: str, digests: Sequence[str] | None = None) -> ServedBy:
        """Describe what runs the request, with these adapters; None = those with which it
        begins."""
        digests = self.adapter_set.digests if digests is None else digests
        return ServedBy(
            adapters=tuple(self.labels[digest] for digest in digests),
            digests=tuple(digests),
            worker_id=worker_id,
            base_id=self.base.base_id,
            tokenizer_digest=self.target.tokenizer_digest(self.base),
        )

    def admission_request(self, run_s: float, *, awaits_fetch: bool) -> AdmissionRequest:
        """The request as admission sees it."""
        return AdmissionRequest(
            self.call.tenant,
            self.resolved.num_choices,
            self.call.priority,
            self.deadline_s,
            num_prompt_tokens=len(self.prompt_ids),
            run_s=run_s,
            weight=self.limits.fairness_weight,
            first_token_due_s=self.first_token_due_s,
            adapters=self.adapter_set,
            awaits_fetch=awaits_fetch,
        )

    @property
    def max_tokens(self) -> int:
        """Tokens of the prompt plus the most that may be generated."""
        return len(self.prompt_ids) + self.max_output * self.resolved.num_choices

    @property
    def min_output(self) -> int:
        """The least number of tokens that one choice generates, unless a stop string ends it."""
        sampling = self.resolved.sampling
        most = self.max_output
        return most if sampling.ignore_eos else min(sampling.min_tokens, most)

    @property
    def max_output(self) -> int:
        """The most tokens that one choice may generate."""
        return self.resolved.sampling.max_tokens if self.resolved.emits_tokens else 0


def adapter_set(target: Target) -> AdapterSet:
    """The adapters of a target as workers know them."""
    return AdapterSet.of((adapter.digest, adapter.weight) for adapter in target.adapters)


def scaled(target: Target, scale: float) -> Target:
    """A target with its adapters' weights multiplied."""
    adapters = tuple(replace(each, weight=each.weight * scale) for each in target.adapters)
    return replace(target, adapters=adapters)


def _token_facts(adapter: RunningAdapter) -> tuple[object, ...]:
    """Facts that decide what tokens mean under an adapter, and how long a sequence may be."""
    return adapter.text_files, adapter.rope_scaling, adapter.eos_token_ids, adapter.task
