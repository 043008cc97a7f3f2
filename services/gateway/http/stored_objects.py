"""Files and batch jobs in OpenAI's shape: the body of a new job, and the objects in answers."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from loraplex.errors import InvalidRequest, Unsupported
from loraplex_services.common.callers import Caller
from loraplex_services.gateway.batches.files import FilePurpose, FileRecord
from loraplex_services.gateway.batches.records import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    EXPIRED,
    FAILED,
    BatchRecord,
    BatchStatus,
    Ending,
    new_batch_id,
    now_s,
)
from loraplex_services.gateway.http.body import Body

_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_WINDOW = "24h"


class BatchFault(TypedDict):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchFaults(TypedDict):
    object: Literal["list"]
    data: list[BatchFault]


class BatchCounts(TypedDict):
    total: int
    completed: int
    failed: int


class BatchUsage(TypedDict):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class BatchObject(TypedDict):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchFaults | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


def parse_batch(fields: dict[str, Any], caller: Caller) -> BatchRecord:
    """Body of /v1/batches: a new batch job. Raises: InvalidRequest, Unsupported."""
    body = Body(fields)
    input_file_id = body.text("input_file_id") or ""
    endpoint, window = body.text("endpoint") or "", body.text("completion_window") or ""
    metadata = body.metadata()
    lifetime_s = body.lifetime("output_expires_after")
    body.finish()
    if not input_file_id:
        raise InvalidRequest.field("input_file_id", "", "name a file that was uploaded")
    if endpoint not in _ENDPOINTS:
        raise Unsupported.field("endpoint", endpoint, f"must be one of {', '.join(_ENDPOINTS)}")
    if window != _WINDOW:
        raise Unsupported.field("completion_window", window, f"must be {_WINDOW}")
    return BatchRecord(
        batch_id=new_batch_id(),
        tenant=caller.tenant,
        key_id=caller.key_id,
        scopes=tuple(sorted(caller.scopes)),
        endpoint=endpoint,
        input_file_id=input_file_id,
        created_s=now_s(),
        output_lifetime_s=lifetime_s,
        metadata=metadata,
    )


def batch_object(record: BatchRecord) -> BatchObject:
    """A batch job as OpenAI shows it."""
    counts, has_ended = record.counts, record.has_ended
    is_cancelling = record.ending == CANCELLED and not has_ended

    def ended_at(ending: Ending) -> int | None:
        return record.ended_s if record.status == ending else None

    return {
        "id": record.batch_id,
        "object": "batch",
        "endpoint": record.endpoint,
        "errors": _errors(record),
        "input_file_id": record.input_file_id,
        "completion_window": "24h",
        "status": CANCELLING if is_cancelling else record.status,
        "output_file_id": record.output_file_id or None if has_ended else None,
        "error_file_id": record.error_file_id or None if has_ended else None,
        "created_at": record.created_s,
        "in_progress_at": record.in_progress_s or None,
        "expires_at": record.expires_s,
        "finalizing_at": record.finalizing_s or None,
        "cancelling_at": record.cancelling_s or None,
        "completed_at": ended_at(COMPLETED),
        "cancelled_at": ended_at(CANCELLED),
        "expired_at": ended_at(EXPIRED),
        "failed_at": ended_at(FAILED),
        "request_counts": {
            "total": record.num_lines,
            "completed": counts.completed,
            "failed": counts.failed,
        },
        "usage": {
            "input_tokens": counts.input_tokens,
            "input_tokens_details": {"cached_tokens": counts.cached_tokens},
            "output_tokens": counts.output_tokens,
            "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
            "total_tokens": counts.input_tokens + counts.output_tokens,
        },
        "metadata": record.metadata or None,
    }


def _errors(record: BatchRecord) -> BatchFaults | None:
    if not record.errors:
        return None
    data: list[BatchFault] = [
        {"code": error.code, "message": error.message, "param": None, "line": None}
        for error in record.errors
    ]
    return {"object": "list", "data": data}


class FileObject(TypedDict):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: FilePurpose
    status: Literal["processed"]
    status_details: str | None


class DeletedFile(TypedDict):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


def file_object(record: FileRecord) -> FileObject:
    """A file as OpenAI shows it."""
    return {
        "id": record.file_id,
        "object": "file",
        "bytes": record.num_bytes,
        "created_at": record.created_s,
        "expires_at": record.expires_s or None,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }
