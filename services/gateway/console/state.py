"""The state that the console shows, as plain JSON objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from loraplex.api.load import RecentLoad
from loraplex.api.residency import AdapterResidency, Tier, WorkerLoad
from loraplex_services.gateway.pipeline.history import RANGES, LoadHistory, Point
from loraplex_services.gateway.request import ServedModel
from loraplex_services.gateway.workers.view import WorkerView

MAX_RESIDENT = 60
"""Adapters listed for one worker."""
MAX_NAMES = 20
"""Names listed for one content."""
MAX_MODELS = 10
"""Models of the last minute that are shown."""
Labels = Mapping[str, Sequence[str]]


def base_state(base: ServedModel, can_chat: bool) -> dict[str, Any]:
    """One base."""
    return {
        "id": base.base_id,
        "max_model_len": base.max_model_len,
        "dtype": base.dtype,
        "can_chat": can_chat,
    }


def worker_state(
    view: WorkerView, labels: Labels, requests: Mapping[str, int], sees_all: bool
) -> dict[str, Any]:
    """One worker and its adapters: those on the device, in use and most asked for first.

    Unless the caller `sees_all`, only adapters with a label are shown.

    Args:
        labels: names by digest, newest first.
        requests: of the last minute, by tenant/name.
    """
    load = view.load if view.connected else WorkerLoad()
    adapters = view.adapters.values() if view.connected else ()
    held = sorted(adapters, key=lambda r: _sort_key(r, labels, requests))
    shown = held if sees_all else [r for r in held if r.digest in labels]
    return {
        "id": view.worker_id or view.address,
        "base": view.base_id,
        "state": _condition(view),
        "running": load.running_requests,
        "waiting": load.waiting_requests,
        "used_blocks": load.total_blocks - load.free_blocks,
        "idle_blocks": load.idle_blocks,
        "total_blocks": load.total_blocks,
        "step_s": load.step_s,
        "num_adapters": sum(r.tier is not Tier.NONE for r in shown),
        "on_device": sum(r.tier is Tier.DEVICE for r in held),
        "adapters": [_resident(r, labels) for r in shown[:MAX_RESIDENT] if r.tier],
    }


def recent_state(recent: RecentLoad, sees_all: bool) -> dict[str, Any]:
    """The last minute. The models in use are named to those who see all of them."""
    per_s = 1 / max(recent.window_s, 1.0)
    models = [dataclasses.asdict(model) for model in recent.models[:MAX_MODELS]]
    return {
        "requests": recent.requests,
        "requests_per_s": recent.requests * per_s,
        "tokens_per_s": recent.generated_tokens * per_s,
        "first_token_p50_s": recent.first_token_p50_s or None,
        "first_token_p95_s": recent.first_token_p95_s or None,
        "models": models if sees_all else None,
    }


def history_state(history: LoadHistory, name: str, sees_all: bool) -> dict[str, Any]:
    """The charts of a range, by column, and what failed within it."""
    points = history.points(name)
    columns = [field.name for field in dataclasses.fields(Point)]
    return {
        "range_s": RANGES[name].step_s * RANGES[name].num_steps,
        "columns": {column: [getattr(each, column) for each in points] for column in columns},
        "failures": history.failures(name) if sees_all else None,
    }


def num_resident(views: Iterable[WorkerView]) -> int:
    """Adapters that at least one worker holds on its device."""
    held = (residency for view in views for residency in view.adapters.values())
    return len({residency.digest for residency in held if residency.tier is Tier.DEVICE})


def _condition(view: WorkerView) -> str:
    if not view.connected:
        return "unreachable"
    if view.draining:
        return "draining"
    return "ready" if view.ready else "starting"


def _sort_key(
    residency: AdapterResidency, labels: Labels, requests: Mapping[str, int]
) -> tuple[int, int, int, str]:
    """Sort key: tier, traffic now and within the last minute, and name."""
    names = labels.get(residency.digest, (residency.digest,))
    recent = sum(requests.get(name.rpartition(":")[0], 0) for name in names)
    return -residency.tier, -residency.running_requests, -recent, names[0]


def _resident(residency: AdapterResidency, labels: Labels) -> dict[str, Any]:
    return {
        "names": list(labels.get(residency.digest, (residency.digest[:19],)))[:MAX_NAMES],
        "tier": residency.tier.name.lower(),
        "rank": residency.max_rank,
        "bytes": residency.device_bytes,
        "pinned": residency.pinned,
        "running": residency.running_requests,
    }
