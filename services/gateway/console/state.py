"""The state that the console shows, as plain JSON objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import Counter, Histogram

from loraplex.api.load import RecentLoad
from loraplex.api.residency import AdapterResidency, Tier
from loraplex_services.gateway import metrics
from loraplex_services.gateway.request import ServedModel
from loraplex_services.gateway.workers.view import WorkerView

MAX_RESIDENT = 500
"""Adapters listed for one worker."""
MAX_MODELS = 10
"""Models of the last minute that are shown."""


def base_state(base: ServedModel, can_chat: bool) -> dict[str, Any]:
    """One base."""
    return {
        "id": base.base_id,
        "max_model_len": base.max_model_len,
        "dtype": base.dtype,
        "can_chat": can_chat,
    }


def worker_state(view: WorkerView, labels: Mapping[str, str], sees_all: bool) -> dict[str, Any]:
    """One worker and its adapters, those on the device and in use first; `labels` are names by
    digest.

    Unless the caller `sees_all`, only adapters with a label are shown.
    """
    load = view.load
    held = sorted(view.adapters.values(), key=lambda r: _place(r, labels))
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
        "num_adapters": sum(r.tier is not Tier.NONE for r in shown),
        "on_device": sum(r.tier is Tier.DEVICE for r in held),
        "adapters": [_resident(r, labels) for r in shown[:MAX_RESIDENT] if r.tier],
    }


def recent_state(recent: RecentLoad) -> dict[str, Any]:
    """The last minute: failures by reason, most frequent first, and the models in use."""
    failures = sorted(recent.failures.items(), key=lambda item: (-item[1], item[0]))
    models = [dataclasses.asdict(model) for model in recent.models[:MAX_MODELS]]
    return {"requests": recent.requests, "failures": failures, "models": models}


def num_resident(views: Iterable[WorkerView]) -> int:
    """Adapters that at least one worker holds on its device."""
    held = (residency for view in views for residency in view.adapters.values())
    return len({residency.digest for residency in held if residency.tier is Tier.DEVICE})


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


def _place(residency: AdapterResidency, labels: Mapping[str, str]) -> tuple[int, int, str]:
    """Sort key: tier, traffic and name."""
    name = labels.get(residency.digest, residency.digest)
    return -residency.tier, -residency.running_requests, name


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
