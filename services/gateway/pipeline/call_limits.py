"""Limits of what one call brings besides its prompt and its sampling, from whichever API."""

from __future__ import annotations

from loraplex.errors import InvalidRequest
from loraplex_services.common.limits import (
    MAX_ADAPTERS_PER_REQUEST,
    MAX_CACHE_SALT_CHARS,
    MAX_MODEL_CHARS,
    MAX_REQUEST_ID_CHARS,
    MAX_SPLIT_KEY_CHARS,
    MAX_TRACE_CHARS,
    check_chars,
)
from loraplex_services.gateway.request import GenerateCall


def check_call(call: GenerateCall) -> None:
    """Raises: InvalidRequest naming the field that is too long.

    These texts are copied into the job of every choice and kept while it runs.
    """
    check_chars("model", call.model, MAX_MODEL_CHARS)
    check_chars("request_id", call.request_id, MAX_REQUEST_ID_CHARS)
    check_chars("cache_salt", call.cache_salt, MAX_CACHE_SALT_CHARS)
    check_chars("split_key", call.split_key, MAX_SPLIT_KEY_CHARS)
    check_chars("traceparent", call.trace, MAX_TRACE_CHARS)
    if len(call.adapters) > MAX_ADAPTERS_PER_REQUEST:
        raise InvalidRequest.field(
            "adapters", len(call.adapters), f"at most {MAX_ADAPTERS_PER_REQUEST} adapters"
        )
    for adapter in call.adapters:
        check_chars("adapters.ref", adapter.ref, MAX_MODEL_CHARS)
