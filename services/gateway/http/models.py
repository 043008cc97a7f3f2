"""Formats the responses of /v1/models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NotRequired, TypedDict

from loraplex.errors import InvalidRequest
from loraplex_services.gateway.http.pages import Page, limit_of, page_body
from loraplex_services.gateway.registry.resolve import model_id
from loraplex_services.gateway.registry.snapshot import Version
from loraplex_services.gateway.request import ServedModel

MAX_LIMIT = 10_000


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: NotRequired[int]


def list_models(
    models: Iterable[ServedModel | Version], query: Mapping[str, str], tenant: str
) -> Page[ModelCard]:
    """All models, or a page of at most `limit` that follows `after` or ends right before `before`.

    `has_more` refers to the requested direction. Raises: InvalidRequest.
    """
    entries = [show_model(model, model_id(model, tenant)) for model in models]
    ids = [entry["id"] for entry in entries]
    limit = limit_of(query, MAX_LIMIT, MAX_LIMIT)
    if "before" in query:
        if "after" in query:
            raise InvalidRequest.field("before", query["before"], "send either before or after")
        entries = entries[: _index_of(ids, "before", query["before"])]
        page = entries[-limit:]
    else:
        start = _index_of(ids, "after", query["after"]) + 1 if "after" in query else 0
        entries = entries[start:]
        page = entries[:limit]
    return page_body(page, has_more=len(page) < len(entries))


def show_model(model: ServedModel | Version, shown_id: str) -> ModelCard:
    """One entry of the list."""
    if isinstance(model, ServedModel):
        return {
            "id": shown_id,
            "object": "model",
            "created": model.created_unix_s,
            "owned_by": "loraplex",
            "root": model.base_id,
            "parent": None,
            "max_model_len": model.max_model_len,
        }
    return {
        "id": shown_id,
        "object": "model",
        "created": int(model.created_unix_s),
        "owned_by": model.tenant,
        "root": model.digest,
        "parent": model.base_id,
    }


def _index_of(ids: list[str], field: str, wanted: str) -> int:
    if wanted not in ids:
        raise InvalidRequest.field(field, wanted, "no such model; use an id of this list")
    return ids.index(wanted)
