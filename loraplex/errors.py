"""The typed errors of all parts, and the table of their gRPC and HTTP codes.

Domain code raises these; servers translate them with `codes_of`. Nothing here knows gRPC or HTTP
beyond the names and numbers in the table.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Self

MAX_VALUE_CHARS = 256
NOTE = "note"
"""The field of a warning that needs no action."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One bad field of an input."""

    field: str
    """Path of the field, such as `adapter_config.json:r` or `max_tokens`."""
    value: str
    """The offending value as text."""
    description: str
    """What is wrong, and what to do about it."""

    @classmethod
    def of(cls, field: str, value: object, description: str) -> Violation:
        """Build a violation from any value, shortening its text."""
        text = str(value) if isinstance(value, (str, PurePath)) else _spelled(value)
        if len(text) > MAX_VALUE_CHARS:
            text = text[: MAX_VALUE_CHARS - 3] + "..."
        return cls(field, text, description)


def _spelled(value: object) -> str:
    """The value as in the file or request: true, null and [1, 2], not True, None and (1, 2)."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return repr(value)


class LoraplexError(Exception):
    """Base class of all errors. `reason` is a constant in UPPER_SNAKE_CASE for programs."""

    reason = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        violations: Sequence[Violation] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.violations = tuple(violations)
        self.retry_after_s = retry_after_s
        if reason is not None:
            self.reason = reason

    @classmethod
    def field(
        cls, field: str, value: object, description: str, *, reason: str | None = None
    ) -> Self:
        """One violation whose description is also the message."""
        violation = Violation.of(field, value, description)
        return cls(f"{field}: {description}", reason=reason, violations=[violation])


class InvalidRequest(LoraplexError):
    """A request field is wrong."""

    reason = "INVALID_REQUEST"


class InvalidAdapter(LoraplexError):
    """An adapter was refused by validation."""

    reason = "INVALID_ADAPTER"

    @classmethod
    def of(cls, violations: Sequence[Violation]) -> InvalidAdapter:
        """Summarise every violation in the message."""
        first = violations[0]
        more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
        return cls(f"{first.field}: {first.description}{more}", violations=violations)


class Unsupported(LoraplexError):
    """A known field or method that this build does not serve."""

    reason = "UNSUPPORTED"

    @classmethod
    def without(cls, package: str) -> Unsupported:
        """The error for a package that a command needs and that is not installed."""
        message = f"this needs the package {package!r}: run `pip install {package}`"
        return cls(message, reason="NOT_INSTALLED")


class Unauthenticated(LoraplexError):
    """No key, or a key that is unknown, expired or revoked."""

    reason = "UNAUTHENTICATED"


class PermissionDenied(LoraplexError):
    """The key is valid, but its scope does not allow the call."""

    reason = "PERMISSION_DENIED"


class NotFound(LoraplexError):
    """The named object does not exist, or belongs to another tenant."""

    reason = "NOT_FOUND"


class AdapterNotFound(NotFound):
    """A reference names no adapter, version or tag that the caller may see."""

    reason = "ADAPTER_NOT_FOUND"
    ref = hint = ""
    """Empty for an error that a server sent; its message contains them."""

    def __init__(self, ref: str, hint: str = "") -> None:
        super().__init__(f"no adapter {ref!r}" + (f": {hint}" if hint else ""))
        self.ref = ref
        self.hint = hint


class AlreadyExists(LoraplexError):
    """The name is taken by something else."""

    reason = "ALREADY_EXISTS"


class Conflict(LoraplexError):
    """A compare-and-set failed, because the expected value has changed."""

    reason = "CONFLICT"


class Blocked(LoraplexError):
    """The current state does not allow the operation; something else must be done first."""

    reason = "BLOCKED"


class Undecided(LoraplexError):
    """A comparison ended without enough evidence for a decision."""

    reason = "UNDECIDED"


class NotCertified(LoraplexError):
    """A version lacks a certificate that its tenant needs, or diverges too much."""

    reason = "NOT_CERTIFIED"

    @classmethod
    def of(cls, value: str, description: str) -> NotCertified:
        """A violation of `max_kl` with the measured value; `description` names the bound and what
        to do."""
        violations = [Violation.of("max_kl", value, description)]
        return cls(f"max_kl: {description}", violations=violations)


class ResourceExhausted(LoraplexError):
    """A limit or quota is reached; `retry_after_s` is set if waiting helps."""

    reason = "RESOURCE_EXHAUSTED"


class Unavailable(LoraplexError):
    """No server is ready to do it at the moment."""

    reason = "UNAVAILABLE"


class DeadlineExceeded(LoraplexError):
    """The deadline passed or cannot be met."""

    reason = "DEADLINE_EXCEEDED"


class DataLoss(LoraplexError):
    """Stored bytes do not match their digest."""

    reason = "DATA_LOSS"


class Cancelled(LoraplexError):
    """The caller cancelled the request or disconnected."""

    reason = "CANCELLED"


@dataclass(frozen=True, slots=True)
class Codes:
    """The codes of one error class in every API."""

    grpc: int
    """google.rpc code."""
    http: int
    """HTTP status."""
    openai_type: str
    """`error.type` of the OpenAI error object."""
    exit: int
    """Exit code of the command line tools."""


TABLE: dict[type[LoraplexError], Codes] = {
    Cancelled: Codes(1, 499, "request_cancelled", 130),
    InvalidRequest: Codes(3, 400, "invalid_request_error", 2),
    InvalidAdapter: Codes(3, 400, "invalid_request_error", 3),
    DeadlineExceeded: Codes(4, 504, "timeout_error", 6),
    NotFound: Codes(5, 404, "invalid_request_error", 7),
    AlreadyExists: Codes(6, 409, "invalid_request_error", 4),
    PermissionDenied: Codes(7, 403, "permission_error", 5),
    ResourceExhausted: Codes(8, 429, "rate_limit_error", 6),
    NotCertified: Codes(9, 409, "invalid_request_error", 3),
    Blocked: Codes(9, 409, "invalid_request_error", 4),
    Undecided: Codes(9, 409, "invalid_request_error", 1),
    Conflict: Codes(10, 409, "invalid_request_error", 4),
    Unsupported: Codes(12, 400, "invalid_request_error", 2),
    LoraplexError: Codes(13, 500, "server_error", 1),
    Unavailable: Codes(14, 503, "server_error", 6),
    DataLoss: Codes(15, 502, "server_error", 1),
    Unauthenticated: Codes(16, 401, "authentication_error", 5),
}


def codes_of(error: LoraplexError) -> Codes:
    """The codes of the nearest class in the table."""
    for cls in type(error).__mro__:
        if cls in TABLE:
            return TABLE[cls]
    return TABLE[LoraplexError]


_CLASSES: tuple[type[LoraplexError], ...] = (AdapterNotFound, *TABLE)
_BY_REASON = {cls.reason: cls for cls in _CLASSES}
_BY_REASON_ONLY = (InvalidAdapter, NotCertified, Undecided)
_BY_GRPC = {codes.grpc: cls for cls, codes in TABLE.items() if cls not in _BY_REASON_ONLY}


def from_wire(
    grpc_code: int,
    reason: str,
    message: str,
    violations: Sequence[Violation] = (),
    retry_after_s: float | None = None,
) -> LoraplexError:
    """Rebuild an error from what a server sent. Unknown codes become the base class."""
    cls = _BY_REASON.get(reason) or _BY_GRPC.get(grpc_code, LoraplexError)
    error = cls.__new__(cls)
    LoraplexError.__init__(
        error,
        message,
        reason=reason or None,
        violations=violations,
        retry_after_s=retry_after_s,
    )
    return error
