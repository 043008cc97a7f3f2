"""Checks whether the engine can run a request; each refusal names its field. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from loraplex.adapter_format.added_tokens import MAX_TOKEN_CHARS
from loraplex.adapter_format.rope_scaling import MAX_CONTEXT
from loraplex.adapter_format.vocabulary import MAX_ADDED_TOKENS
from loraplex.api.pooling import Pooling
from loraplex.api.request import WorkerRequest
from loraplex.api.sampling import RANGES, GrammarTokens, SamplingParams
from loraplex.errors import InvalidRequest
from loraplex.refs import check_digest
from loraplex.units import counted
from loraplex_services.common.limits import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_CANDIDATES,
    MAX_REQUEST_ID_CHARS,
    MAX_TOKEN_IDS_PER_FIELD,
)

NO_EXPERTS = "this base has no experts that it could name; leave the field out"

MAX_ID_CHARS = 2 * MAX_REQUEST_ID_CHARS
"""A gateway appends the choice and the attempt to the id of a request."""
MAX_BAD_SEQUENCES = 2 * MAX_BAD_WORDS
"""Each word with and without a space before it."""
MAX_BAD_SEQUENCE_IDS = 4 * MAX_BAD_WORD_CHARS + 1
"""One for each byte, at most."""


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """The limits of what this worker accepts."""

    vocab_size: int
    max_model_len: int
    """Prompt and output together, in tokens."""
    max_adapters: int
    """In one request."""
    routes: bool = False
    """Whether steps can say which experts compute a token."""
    num_added_ids: int = 0
    """Token ids above the vocabulary that an adapter may have."""


MAX_KEPT = 256
"""Parts of a prefix that other adapters computed."""


def check_request(request: WorkerRequest, limits: IntakeLimits) -> None:
    """Raises InvalidRequest naming the first bad field."""
    if not 1 <= len(request.request_id) <= MAX_ID_CHARS:
        why = f"must have 1 to {MAX_ID_CHARS} characters"
        _refuse("request_id", request.request_id, why)
    if not request.prompt_ids:
        _refuse("prompt_ids", "[]", "must hold at least one token")
    if request.pooling and (request.sampling.max_tokens or request.grammar or request.output_ids):
        why = "goes with max_tokens 0, and without output_ids and grammar"
        _refuse("pooling", request.pooling, why)
    if request.pooling is Pooling.HEAD and not request.adapters.adapters:
        _refuse("pooling", request.pooling, "needs an adapter with a head: the base has none")
    # Adapters may add tokens and context; the engine knows how many.
    if request.adapters.adapters:
        limits = replace(limits, num_added_ids=MAX_ADDED_TOKENS, max_model_len=MAX_CONTEXT)
    if request.routed_from is not None:
        _check_routed_from(request, request.routed_from, limits)
    _check_grammar_tokens(request.grammar_tokens, limits)
    _check_ids("prompt_ids", request.prompt_ids, limits)
    _check_ids("output_ids", request.output_ids, limits)
    _check_lengths(request, limits)
    _check_adapters(request, limits)
    if len(request.kept) > MAX_KEPT:
        _refuse("kept", f"{len(request.kept)} parts", f"at most {MAX_KEPT}")
    _check_sampling(request.sampling, limits)
    if not (math.isfinite(request.fairness_weight) and request.fairness_weight > 0):
        _refuse("fairness_weight", request.fairness_weight, "must be above 0")


def _check_grammar_tokens(tokens: GrammarTokens, limits: IntakeLimits) -> None:
    if len(tokens.added) > MAX_TOKEN_IDS_PER_FIELD or any(
        not 0 < len(text) <= MAX_TOKEN_CHARS for _, text in tokens.added
    ):
        why = f"at most {MAX_TOKEN_IDS_PER_FIELD} tokens of 1 to {MAX_TOKEN_CHARS} characters"
        _refuse("grammar_tokens", f"{len(tokens.added)} tokens", why)
    _check_ids("grammar_tokens", [token_id for token_id, _ in tokens.added], limits)
    _check_ids("grammar_eos_ids", tokens.eos_ids, limits)


def _check_routed_from(request: WorkerRequest, first: int, limits: IntakeLimits) -> None:
    num_tokens = len(request.prompt_ids) + len(request.output_ids)
    if not limits.routes:
        _refuse("routed_from", first, NO_EXPERTS)
    if not 0 <= first <= num_tokens:
        _refuse("routed_from", first, f"must be a position from 0 to {num_tokens}")


def _check_lengths(request: WorkerRequest, limits: IntakeLimits) -> None:
    num_prompt, max_tokens = len(request.prompt_ids), request.sampling.max_tokens
    if num_prompt + max_tokens > limits.max_model_len:
        _refuse(
            "sampling.max_tokens",
            max_tokens,
            f"prompt ({counted(num_prompt, 'token')}) and max_tokens ({max_tokens}) exceed the "
            f"context of {limits.max_model_len} tokens: shorten one of them",
        )
    if len(request.output_ids) >= max(1, max_tokens):
        _refuse(
            "output_ids",
            f"{len(request.output_ids)} tokens",
            f"nothing is left to generate: max_tokens is {max_tokens}",
        )


def _check_adapters(request: WorkerRequest, limits: IntakeLimits) -> None:
    adapters = request.adapters.adapters
    if len(adapters) > limits.max_adapters:
        _refuse(
            "adapters", f"{len(adapters)} adapters", f"at most {limits.max_adapters} in a request"
        )
    for digest, weight in adapters:
        check_digest(digest, field="adapters.digest")
        if not math.isfinite(weight):
            _refuse("adapters.weight", weight, "must be a finite number")
    if len(set(request.adapters.digests)) < len(adapters):
        _refuse("adapters", "a digest twice", "name each adapter once and add up the weights")


def _check_sampling(sampling: SamplingParams, limits: IntakeLimits) -> None:
    for name, allowed in RANGES.items():
        value = getattr(sampling, name)
        if fault := allowed.fault(value):
            _refuse(f"sampling.{name}", value, fault)
    if sampling.min_tokens > sampling.max_tokens:
        _refuse(
            "sampling.min_tokens",
            sampling.min_tokens,
            f"must not exceed max_tokens ({sampling.max_tokens})",
        )
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(sampling, name) or 0) > MAX_CANDIDATES:
            _refuse(f"sampling.{name}", getattr(sampling, name), f"at most {MAX_CANDIDATES}")
    if len(sampling.logprob_token_ids) > MAX_CANDIDATES:
        num_ids = len(sampling.logprob_token_ids)
        _refuse("sampling.logprob_token_ids", f"{num_ids} ids", f"at most {MAX_CANDIDATES}")
    for name in ("stop_token_ids", "allowed_token_ids", "bad_token_ids", "logprob_token_ids"):
        _check_ids(f"sampling.{name}", getattr(sampling, name), limits)
    _check_sequences(sampling.bad_sequences, limits)
    _check_ids("sampling.logit_bias", [i for i, _ in sampling.logit_bias], limits)
    if not all(math.isfinite(bias) for _, bias in sampling.logit_bias):
        _refuse("sampling.logit_bias", "not finite", "every bias must be a finite number")


def _check_sequences(sequences: Sequence[Sequence[int]], limits: IntakeLimits) -> None:
    if len(sequences) > MAX_BAD_SEQUENCES:
        why = f"at most {MAX_BAD_SEQUENCES}"
        _refuse("sampling.bad_sequences", f"{len(sequences)} sequences", why)
    for index, sequence in enumerate(sequences):
        field = f"sampling.bad_sequences[{index}]"
        if not 2 <= len(sequence) <= MAX_BAD_SEQUENCE_IDS:
            _refuse(field, f"{len(sequence)} ids", f"send 2 to {MAX_BAD_SEQUENCE_IDS}")
        _check_ids(field, sequence, limits)


def _check_ids(field: str, token_ids: Sequence[int], limits: IntakeLimits) -> None:
    """Raises InvalidRequest. The message gives the position of the first bad token id, never the id
    itself."""
    num_ids = limits.vocab_size + limits.num_added_ids
    if token_ids and (max(token_ids) >= num_ids or min(token_ids) < 0):
        index = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < num_ids)
        why = f"token ids of the base are 0 to {limits.vocab_size - 1}"
        if limits.num_added_ids:
            why += f", and adapters add at most {limits.num_added_ids}"
        _refuse(f"{field}[{index}]", "out of range", why)


def _refuse(field: str, value: object, description: str) -> None:
    raise InvalidRequest.field(field, value, description)
