"""OpenAI error objects."""

from __future__ import annotations

import json
import math
from typing import Any

from loraplex.errors import AdapterNotFound, LoraplexError, NotFound, codes_of

_MODEL_REASONS = (NotFound.reason, AdapterNotFound.reason)
"""Of errors that mean a model unless they name a field."""


def error_object(error: LoraplexError) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`."""
    param = error.violations[0].field if error.violations else None
    code = error.reason.lower()
    if isinstance(error, NotFound) and error.reason in _MODEL_REASONS:
        param, code = param or "model", "model_not_found"
    return {
        "error": {
            "message": error.message,
            "type": codes_of(error).openai_type,
            "param": param,
            "code": code,
        }
    }


def error_body(error: LoraplexError) -> bytes:
    """The object as ASCII JSON."""
    return json.dumps(error_object(error)).encode()


def error_headers(error: LoraplexError) -> dict[str, str]:
    """`retry-after` in seconds, if a retry can help."""
    if error.retry_after_s is None:
        return {}
    return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
