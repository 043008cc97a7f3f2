"""What the console shows, as plain JSON objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import Counter, Histogram

from loraplex.api.registry import TagTarget
from loraplex.api.residency import AdapterResidency, Tier
from loraplex_services.gateway import metrics
from loraplex_services.gateway.registry.snapshot import Listing
from loraplex_services.gateway.request import ServedModel
from loraplex_services.gateway.workers.view import WorkerView

MAX_RESIDENT = 500
"""Adapters listed for one worker."""


def base_state(base: ServedModel) -> dict[str, Any]:
    """One base."""
    return {"id": base.base_id, "max_model_len": base.max_model_len, "dtype": base.dtype}


def worker_state(view: WorkerView, labels: Mapping[str, str], sees_all: bool) -> dict[str, Any]:
    """One worker and its adapters, those on the device first; `labels` are names by digest.

    Unless the caller `sees_all`, only adapters with a label are shown.
    """
    load = view.load
    held = sorted(view.adapters.values(), key=lambda r: (-r.tier, labels.get(r.digest, r.digest)))
    shown = held if sees_all else [r for r in held if r.digest in labels]
    return {
        "id": view.worker_id or view.address,
        "base": view.base_id,
        "state": _condition(view),
        "running": load.running_requests,
        "waiting": load.waiting_requests,
        "queued_tokens": load.queued_tokens,
        "free_blocks": load.free_blocks,
        "total_blocks": load.total_blocks,
        "step_s": load.step_s,
        "steps": load.steps,
        "on_device": sum(r.tier is Tier.DEVICE for r in held),
        "adapters": [_resident(r, labels) for r in shown[:MAX_RESIDENT] if r.tier],
    }


def adapter_state(listing: Listing) -> dict[str, Any]:
    """One name with its versions, newest first, and its tags."""
    return {
        "tenant": listing.tenant,
        "name": listing.name,
        "versions": [
            {
                "number": version.number,
                "digest": version.digest,
                "base": version.base_id,
                "rank": version.max_rank,
                "created_unix_s": version.created_unix_s,
                "public": version.is_public,
            }
            for version in listing.versions
        ],
        "tags": [
            {"tag": tag.tag, "sides": _sides(tag.targets), "pending": _sides(tag.pending)}
            for tag in listing.tags
        ],
    }


def totals() -> dict[str, Any]:
    """Counts since the start of the gateway; two readings give rates and percentiles."""
    return {
        "requests": _sum(metrics.REQUESTS, {"outcome": "ok"}),
        "failed": _sum(metrics.REQUESTS, {}) - _sum(metrics.REQUESTS, {"outcome": "ok"}),
        "rejected": _sum(metrics.REJECTIONS, {}),
        "prompt_tokens": _sum(metrics.PROMPT_TOKENS, {}),
        "completion_tokens": _sum(metrics.COMPLETION_TOKENS, {}),
        "first_token_s": _buckets(metrics.FIRST_TOKEN_S),
        "request_s": _buckets(metrics.REQUEST_S),
    }


def _condition(view: WorkerView) -> str:
    if not view.connected:
        return "away"
    if view.draining:
        return "draining"
    return "ready" if view.ready else "starting"


def _resident(residency: AdapterResidency, labels: Mapping[str, str]) -> dict[str, Any]:
    return {
        "ref": labels.get(residency.digest, residency.digest[:19]),
        "digest": residency.digest,
        "tier": residency.tier.name.lower(),
        "rank": residency.max_rank,
        "bytes": residency.device_bytes,
        "pinned": residency.pinned,
        "running": residency.running_requests,
    }


def _sides(sides: Sequence[TagTarget]) -> list[dict[str, int]]:
    return [{"number": side.version, "weight": side.weight} for side in sides]


def _sum(counter: Counter, wanted: Mapping[str, str]) -> float:
    return sum(
        sample.value
        for family in counter.collect()
        for sample in family.samples
        if sample.name.endswith("_total") and wanted.items() <= sample.labels.items()
    )


def _buckets(histogram: Histogram) -> list[tuple[float | None, float]]:
    """(upper bound in seconds, observations up to it) over all labels; None = no bound."""
    counts: dict[float, float] = {}
    for family in histogram.collect():
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                counts[bound] = counts.get(bound, 0.0) + sample.value
    return [(None if bound == float("inf") else bound, counts[bound]) for bound in sorted(counts)]


def found(listings: Iterable[Listing], search: str, limit: int) -> tuple[list[Listing], int]:
    """The first `limit` listings whose name or tenant contains the text, and their total number."""
    needle = search.strip().lower()
    matching = [one for one in listings if needle in f"{one.tenant}/{one.name}".lower()]
    return matching[:limit], len(matching)
