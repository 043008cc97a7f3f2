"""Checks the limits on the fields of a call before any work is done for it, for every API."""

from __future__ import annotations

from loraplex.errors import InvalidRequest
from loraplex_services.common.limits import (
    MAX_CACHE_SALT_CHARS,
    MAX_MODEL_CHARS,
    MAX_REQUEST_ID_CHARS,
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
