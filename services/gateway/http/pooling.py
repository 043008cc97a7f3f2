"""/pooling in vLLM's shape: classes of an adapter with a head, otherwise vectors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from loraplex.errors import Unsupported
from loraplex_services.gateway.http.embeddings import encoded, usage_of
from loraplex_services.gateway.pipeline.embedding import Pooled

TASKS = ("embed", "classify")


def task_of(fields: dict[str, Any]) -> str:
    """The task of a body; "" leaves it to the model. Mutates: fields. Raises: Unsupported."""
    task = fields.pop("task", None)
    if task is None:
        return ""
    if task not in TASKS:
        shown = task[:32] if isinstance(task, str) else ""
        raise Unsupported.field("task", shown, f"must be {' or '.join(TASKS)}")
    return str(task)


def pooling_body(
    model: str,
    request_id: str,
    pooled: Pooled,
    vectors: Sequence[Sequence[float]],
    *,
    is_base64: bool,
) -> dict[str, Any]:
    """The response body."""
    data = [
        {"index": index, "object": "pooling", "data": encoded(vector, is_base64=is_base64)}
        for index, vector in enumerate(vectors)
    ]
    return {
        "id": f"pool-{request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": usage_of(pooled),
    }
