"""OpenAI error objects."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any, TypedDict

from starlette.types import Message

from loraplex.errors import AdapterNotFound, LoraplexError, NotFound, codes_of

MESSAGES_PATH = "/v1/messages"
_MESSAGES_TYPES = defaultdict(
    lambda: "api_error",
    {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        409: "invalid_request_error",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
    },
)
"""Anthropic's types of errors by HTTP status."""
_MODEL_REASONS = (NotFound.reason, AdapterNotFound.reason)
"""Reasons of errors that concern the model unless they name a field."""


class ErrorFields(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """Why a request is refused; `param` names the field."""

    error: ErrorFields


def error_object(error: LoraplexError) -> Error:
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


def messages_error(error: LoraplexError) -> dict[str, Any]:
    """The object of the Messages API, in which the message alone names the field."""
    return {
        "type": "error",
        "error": {"type": _MESSAGES_TYPES[codes_of(error).http], "message": error.message},
    }


def error_body(error: LoraplexError, path: str = "") -> bytes:
    """The object as ASCII JSON, in the shape of the API at a path."""
    is_messages = path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")
    return json.dumps(messages_error(error) if is_messages else error_object(error)).encode()


def error_headers(error: LoraplexError) -> dict[str, str]:
    """`retry-after` in seconds, if a retry can help."""
    if error.retry_after_s is None:
        return {}
    return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}


def refusal(error: LoraplexError, path: str) -> tuple[Message, bytes]:
    """The start of an answer that refuses a request, and its body."""
    body = error_body(error, path)
    fields = {"content-type": "application/json", "content-length": str(len(body))}
    fields |= error_headers(error)
    headers = [(name.encode(), value.encode()) for name, value in fields.items()]
    start = {"type": "http.response.start", "status": codes_of(error).http, "headers": headers}
    return start, body
