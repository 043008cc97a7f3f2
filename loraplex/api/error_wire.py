"""Converts typed errors to and from gRPC's google.rpc details and ErrorDetail messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from loraplex.api.wire import violations_from_proto, violations_to_proto
from loraplex.errors import LoraplexError, Unavailable, Violation, codes_of, from_wire
from loraplex.v1 import common_pb2

DOMAIN = "loraplex.dev"
DETAILS_KEY = "grpc-status-details-bin"
MAX_VIOLATIONS = 20
"""Details travel in HTTP/2 trailers, which peers cap (often at 8 KiB)."""
MAX_DETAIL_BYTES = 6000
MAX_MESSAGE_BYTES = 1000
MAX_FIELD_CHARS = 1024

_LOST_STATUS = "Internal error from Core"
"""gRPC's asyncio client replaces the status of a server that ends a call with these words, and
INTERNAL, if a message that it still sends fails (grpc/grpc issue 36066)."""
STATUS_LOST = "STATUS_LOST"
"""Reason of the error that stands for such a status."""


def to_status(error: LoraplexError) -> grpc.Status:
    """The status for `context.abort_with_status`: ErrorInfo, then BadRequest and RetryInfo if any.

    Values of violations travel in ErrorInfo.metadata as `value.<index>`, because
    BadRequest.FieldViolation has no place for them.
    """
    shown = _fitting(error.violations)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    bad_request = error_details_pb2.BadRequest()
    for index, violation in enumerate(shown):
        info.metadata[f"value.{index}"] = violation.value
        bad_request.field_violations.add(field=violation.field, description=violation.description)
    details = [_packed(info)]
    if shown:
        details.append(_packed(bad_request))
    if error.retry_after_s is not None:
        details.append(_packed(_retry_info(error.retry_after_s)))
    message = _cut(error.message)
    status = status_pb2.Status(code=codes_of(error).grpc, message=message, details=details)
    return rpc_status.to_status(status)


def from_rpc_error(error: grpc.RpcError) -> LoraplexError:
    """The typed error behind a failed call. Statuses without our details keep code and message."""
    status = _status_in_trailers(error)
    if status is not None:
        return _from_details(status)
    code = getattr(error, "code", lambda: grpc.StatusCode.UNKNOWN)()
    text = getattr(error, "details", str)()
    if text == _LOST_STATUS:
        return Unavailable(
            "the server ended the call while data was being sent, and its reason was lost; retry",
            reason=STATUS_LOST,
            retry_after_s=1.0,
        )
    return from_wire(code.value[0], "", text or code.name)


def has_details(error: grpc.RpcError) -> bool:
    """True if a Loraplex server ended the call, false if the transport did."""
    return _status_in_trailers(error) is not None


def to_detail(error: LoraplexError) -> common_pb2.ErrorDetail:
    """The error as a message field, for streams that carry many requests."""
    return common_pb2.ErrorDetail(
        code=codes_of(error).grpc,
        reason=error.reason,
        message=error.message,
        violations=violations_to_proto(error.violations),
        retry_after_s=error.retry_after_s or 0.0,
    )


def from_detail(detail: common_pb2.ErrorDetail) -> LoraplexError:
    """The inverse of `to_detail`."""
    return from_wire(
        detail.code,
        detail.reason,
        detail.message,
        violations_from_proto(detail.violations),
        detail.retry_after_s or None,
    )


def _cut(message: str) -> str:
    """A message that fits into trailers: callers choose the names in it."""
    encoded = message.encode()
    if len(encoded) <= MAX_MESSAGE_BYTES:
        return message
    return encoded[: MAX_MESSAGE_BYTES - 3].decode(errors="ignore") + "..."


def _fitting(violations: Sequence[Violation]) -> list[Violation]:
    """The leading violations that fit into trailers; always at least one of those given."""
    shown: list[Violation] = []
    num_bytes = 0
    for violation in violations[:MAX_VIOLATIONS]:
        violation = replace(violation, field=violation.field[:MAX_FIELD_CHARS])
        num_bytes += sum(
            len(text.encode()) for text in (violation.field, violation.value, violation.description)
        )
        if shown and num_bytes > MAX_DETAIL_BYTES:
            break
        shown.append(violation)
    return shown


def _retry_info(retry_after_s: float) -> error_details_pb2.RetryInfo:
    fraction, seconds = math.modf(retry_after_s)
    delay = duration_pb2.Duration(seconds=int(seconds), nanos=int(fraction * 1e9))
    return error_details_pb2.RetryInfo(retry_delay=delay)


def _packed(
    message: error_details_pb2.ErrorInfo
    | error_details_pb2.BadRequest
    | error_details_pb2.RetryInfo,
) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _status_in_trailers(error: grpc.RpcError) -> status_pb2.Status | None:
    trailers: Any = getattr(error, "trailing_metadata", tuple)()
    for key, value in trailers or ():
        if key == DETAILS_KEY:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


def _from_details(status: status_pb2.Status) -> LoraplexError:
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    retry_after_s = None
    for detail in status.details:
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(bad_request.DESCRIPTOR):
            detail.Unpack(bad_request)
        elif detail.Is(retry.DESCRIPTOR):
            detail.Unpack(retry)
            retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    violations = [
        Violation(v.field, info.metadata.get(f"value.{index}", ""), v.description)
        for index, v in enumerate(bad_request.field_violations)
    ]
    reason = info.reason if info.domain == DOMAIN else ""
    return from_wire(status.code, reason, status.message, violations, retry_after_s)
