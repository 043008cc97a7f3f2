"""Checks the limits on the fields of a call before any work is done for it, for every API."""

from __future__ import annotations

from loraplex.errors import InvalidRequest
from loraplex_services.common.limits import (
    MAX_CACHE_SALT_CHARS,
    MAX_MODEL_CHARS,
    MAX_REQUEST_ID_CHARS,
    MAX_ROUTED_EXPERT_BYTES,
    MAX_SPLIT_KEY_CHARS,
    MAX_TRACE_CHARS,
    check_chars,
)
from loraplex_services.gateway.pipeline.sampling import check_bad_words
from loraplex_services.gateway.request import GenerateCall, ServedModel, Truncation


def check_call(call: GenerateCall) -> None:
    """Raises: InvalidRequest naming the field that is too long.

    These texts are copied into the job of every choice and kept while it runs.
    """
    check_bad_words(call.sampling.bad_words)
    check_chars("model", call.model, MAX_MODEL_CHARS)
    check_chars("request_id", call.request_id, MAX_REQUEST_ID_CHARS)
    check_chars("cache_salt", call.cache_salt, MAX_CACHE_SALT_CHARS)
    check_chars("split_key", call.split_key, MAX_SPLIT_KEY_CHARS)
    check_chars("traceparent", call.trace, MAX_TRACE_CHARS)
    for adapter in call.adapters:
        check_chars("adapters.ref", adapter.ref, MAX_MODEL_CHARS)


def truncation_of(call: GenerateCall, model: ServedModel) -> Truncation | None:
    """How the prompt is shortened; None = not at all. Raises: InvalidRequest."""
    if (given := call.truncate_prompt_tokens) is None:
        return None
    if given != -1 and not 1 <= given <= model.max_model_len:
        raise InvalidRequest.field(
            "truncate_prompt_tokens",
            given,
            f"must be 1 to {model.max_model_len}, the context length, or -1 for what fits it",
        )
    if given > 0:
        return Truncation(given, keeps_end=not call.pooling)
    if call.pooling:
        return Truncation(model.max_model_len, keeps_end=False)
    num_output = call.sampling.max_tokens
    return Truncation(max(1, model.max_model_len - (num_output or 1)), keeps_end=True)


def check_experts(
    call: GenerateCall, model: ServedModel, num_prompt_tokens: int, num_choices: int
) -> None:
    """Whether the experts of each token can be returned. Raises: InvalidRequest."""
    if (first := call.routed_from) is None:
        return
    if not model.routing_bytes:
        why = f"{model.base_id} has no experts that its workers can name; leave the field out"
        raise InvalidRequest.field("routed_from", first, why)
    if not 0 <= first <= num_prompt_tokens:
        why = f"start at a position from 0 to {num_prompt_tokens}, the length of the prompt"
        raise InvalidRequest.field("routed_from", first, why)
    num_bytes = (num_prompt_tokens - first) * model.routing_bytes * num_choices
    if num_bytes > MAX_ROUTED_EXPERT_BYTES:
        why = (
            f"{num_prompt_tokens - first} tokens of the prompt and n = {num_choices} make "
            f"{num_bytes} bytes of experts, and one answer has at most {MAX_ROUTED_EXPERT_BYTES}; "
            "start at a later position, or ask for fewer choices"
        )
        raise InvalidRequest.field("routed_from", first, why)
