"""Checks whether a request may run with its adapters, and applies what they change. No torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.adapter_format.tasks import CAUSAL_LM, SEQ_CLS
from loraplex.api.pooling import Pooling
from loraplex.errors import InvalidRequest
from loraplex.units import counted
from loraplex_services.worker.types.adapter_facts import AdapterFacts
from loraplex_services.worker.types.request import OwnRope, Request

NEVER = sys.maxsize
"""The invocation position of an adapter that is never invoked."""


@dataclass(frozen=True, slots=True)
class BaseFacts:
    """The facts of the base, which apply to requests unless their adapters change them."""

    vocab_size: int
    context_tokens: int
    caps_context: bool = False
    """Whether adapters with a context of their own keep to it as well."""


def admit(request: Request, facts: Sequence[AdapterFacts], base: BaseFacts) -> None:
    """Check a request against its adapters, and note in it what they change. Mutates it.

    Raises:
        InvalidRequest: adapters that do not combine, token ids that they do not have, or more
            tokens than their context.
    """
    digests = request.adapters.adapters
    for (digest, weight), fact in zip(digests, facts, strict=True):
        if len(digests) > 1 and fact.alone_because:
            why = f"it {fact.alone_because}, which adds to no other adapter; send it alone"
            raise InvalidRequest.field("adapters", digest, f"{digest} cannot be combined: {why}")
        if weight != 1.0 and fact.has_gain:
            why = f"{digest} uses DoRA, whose gains are trained for weight 1; leave the weight out"
            raise InvalidRequest.field("adapters.weight", f"{weight} of {digest}", why)
    _check_task(request, facts)
    own_sizes = [fact.vocab_size for fact in facts if fact.vocab_size]
    _check_ids(request, own_sizes[0] if own_sizes else base.vocab_size)
    own_context = facts[0].context_tokens if len(facts) == 1 else 0
    context = own_context or base.context_tokens
    _check_length(request, min(context, base.context_tokens) if base.caps_context else context)
    invoked = [fact.invocation_tokens for fact in facts if fact.invocation_tokens]
    if invoked:
        request.adapters_from = last_occurrence(request.prompt_ids, invoked[0])
        request.prefix_hashes.clear()
    if len(facts) == 1:
        request.own_eos_ids = tuple(facts[0].eos_token_ids)
        if facts[0].rope_scaling:
            request.rope = OwnRope(facts[0].rope_scaling, facts[0].rope_switch_len)


def _check_task(request: Request, facts: Sequence[AdapterFacts]) -> None:
    tasks = {fact.task for fact in facts}
    if request.pooling is Pooling.HEAD and SEQ_CLS not in tasks:
        why = f"the request's adapter has no head: scores take one of task_type {SEQ_CLS}"
        raise InvalidRequest.field("pooling", request.pooling, why)
    if request.pooling is Pooling.NONE and tasks - {CAUSAL_LM}:
        task = sorted(tasks - {CAUSAL_LM})[0]
        why = f"an adapter of task_type {task} does not generate"
        raise InvalidRequest.field("adapters", task, why)


def last_occurrence(prompt_ids: Sequence[int], tokens: Sequence[int]) -> int:
    """The start of the last occurrence of `tokens`; NEVER if they do not occur."""
    wanted = list(tokens)
    for start in range(len(prompt_ids) - len(wanted), -1, -1):
        if prompt_ids[start] == wanted[0] and prompt_ids[start : start + len(wanted)] == wanted:
            return start
    return NEVER


def _check_length(request: Request, context_tokens: int) -> None:
    if request.max_num_tokens > context_tokens:
        num_prompt, max_tokens = len(request.prompt_ids), request.sampling.max_tokens
        why = (
            f"prompt ({counted(num_prompt, 'token')}) and max_tokens ({max_tokens}) exceed the "
            f"context of {context_tokens} tokens: shorten one of them"
        )
        raise InvalidRequest.field("sampling.max_tokens", max_tokens, why)


def _check_ids(request: Request, vocab_size: int) -> None:
    """Raises InvalidRequest. The message gives the position of the first bad token id, never the id
    itself."""
    sampling = request.sampling
    fields = {
        "prompt_ids": request.prompt_ids,
        "output_ids": request.output_ids,
        "sampling.stop_token_ids": sampling.stop_token_ids,
        "sampling.allowed_token_ids": sampling.allowed_token_ids,
        "sampling.bad_token_ids": sampling.bad_token_ids,
        "sampling.logprob_token_ids": sampling.logprob_token_ids,
        "sampling.bad_sequences": [max(sequence) for sequence in sampling.bad_sequences],
        "sampling.logit_bias": [token_id for token_id, _ in sampling.logit_bias],
    }
    for field, token_ids in fields.items():
        if token_ids and max(token_ids) >= vocab_size:
            index = next(i for i, token_id in enumerate(token_ids) if token_id >= vocab_size)
            why = f"token ids go from 0 to {vocab_size - 1} with this adapter"
            raise InvalidRequest.field(f"{field}[{index}]", "out of range", why)
