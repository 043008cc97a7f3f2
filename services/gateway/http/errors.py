"""OpenAI error objects."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from loraplex.errors import InvalidRequest, LoraplexError, NotFound, Violation, codes_of


def error_object(error: LoraplexError) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`."""
    param = error.violations[0].field if error.violations else None
    code = error.reason.lower()
    if isinstance(error, NotFound):
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
    """`retry-after`, in whole seconds, where waiting helps."""
    if error.retry_after_s is None:
        return {}
    return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}


def with_names(error: LoraplexError, names: Mapping[str, str]) -> LoraplexError:
    """The error with fields called as the caller calls them. Mutates: error."""
    renamed = [
        Violation(names.get(v.field, v.field), v.value, v.description) for v in error.violations
    ]
    if isinstance(error, InvalidRequest) and len(renamed) == 1:
        error.message = f"{renamed[0].field}: {renamed[0].description}"
        error.args = (error.message,)
    error.violations = tuple(renamed)
    return error
