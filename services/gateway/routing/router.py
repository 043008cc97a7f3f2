"""Chooses the worker for a request: pure functions over worker views, the same on every gateway.

An adapter has a *replica set*: the first workers of its rendezvous order, as many as its part of
the load needs. A request goes to the replica with the lowest estimated time to first token among
those under the load bound. If no replica holds the adapter, or all of them are at the bound, the
next few workers of the order are considered too: one that holds the adapter, or else the one that
will have loaded it soonest. Loads queue behind each other, so a choice between a few workers
shortens the wait most (Mitzenmacher, The Power of Two Choices), and no adapter scatters further.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from loraplex.api.residency import Tier
from loraplex_services.common.nonzero_counter import NonzeroCounter
from loraplex_services.gateway.workers.view import WorkerView

LOAD_BOUND = 1.25
"""No worker gets more than this multiple of the mean number of requests, rounded up."""
FREE_REQUESTS = 8
"""A worker with fewer requests is never at the bound: they batch at almost no cost."""
SPARE_REPLICAS = 2
"""Workers after the replica set that may hold or load an adapter which no replica holds."""
REQUESTS_PER_REPLICA = 4
"""An adapter needs this many requests in flight for each replica after the first."""
_SHRINK_MARGIN = 0.25
"""A replica set shrinks only when the load is this far below what it was grown for."""
_DEFAULT_TOKENS_PER_S = 2000.0
_RESIDENCY_COST_S = {
    Tier.DEVICE: 0.0,
    Tier.LOADING: 0.02,
    Tier.HOST: 0.02,
    Tier.DISK: 0.05,
    Tier.NONE: 0.5,
}
_LOAD_AHEAD_S = 0.05
"""Added per adapter that the worker is loading: copies run one after another."""


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """The facts by which a request is routed; made by the relay and the simulator."""

    key: str
    """Determines the replica set: the digest, or for the base the request itself."""
    digests: tuple[str, ...]
    num_prompt_tokens: int
    num_replicas: int = 1
    """Size of the replica set; 0 = all workers, for requests to the base."""
    numerics: str = ""
    """Workers with this fingerprint are preferred: there a continuation is exact."""


def rendezvous_score(key: str, worker_id: str) -> int:
    """The weight of a worker for a key: 64 bits, independent between workers."""
    data = key.encode() + b"\0" + worker_id.encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())


def rendezvous_order(key: str, worker_ids: Iterable[str]) -> list[str]:
    """All workers, best first. Removing one never changes the order of the others."""
    return sorted(worker_ids, key=lambda w: (-rendezvous_score(key, w), w))


def replica_count(adapter_load: float, total_load: float, num_workers: int, current: int) -> int:
    """How many replicas an adapter needs: its part of the load in workers, rounded up.

    A cold adapter has one, however idle the workers are. The set grows at once. It shrinks by one
    at a time and only with a margin, so that a load at the edge does not move adapters around.
    """
    if num_workers == 0 or total_load <= 0:
        return 1
    share = min(adapter_load / total_load * num_workers, adapter_load / REQUESTS_PER_REPLICA)
    wanted = min(max(1, math.ceil(share)), num_workers)
    if wanted >= current:
        return wanted
    return current - 1 if share + _SHRINK_MARGIN <= current - 1 else min(current, num_workers)


def load_cap(views: Sequence[WorkerView]) -> int:
    """The most requests a worker may hold, including the one to be routed."""
    total = sum(view.num_requests for view in views) + 1
    return max(FREE_REQUESTS, math.ceil(LOAD_BOUND * total / len(views)))


class ReplicaCounts:
    """The replica set size of each adapter with requests in flight at this gateway."""

    def __init__(self) -> None:
        self._in_flight: NonzeroCounter[str] = NonzeroCounter()
        self._sizes: dict[str, int] = {}
        self.total = 0
        """Requests in flight."""

    def start(self, key: str, num_workers: int) -> int:
        """Count a request in; returns the adapter's replica set size now."""
        self._in_flight[key] += 1
        self.total += 1
        load = self._in_flight[key]
        size = replica_count(load, self.total, num_workers, self._sizes.get(key, 1))
        self._sizes[key] = size
        return size

    def end(self, key: str) -> None:
        """Count a request out; an adapter without any is forgotten."""
        self.total -= 1
        self._in_flight.remove(key)
        if key not in self._in_flight:
            del self._sizes[key]


def first_token_s(view: WorkerView, request: RoutingRequest) -> float:
    """Estimated time to first token at a worker, in seconds."""
    speed = view.load.prefill_tokens_per_s or _DEFAULT_TOKENS_PER_S
    queued = max(view.load.queued_tokens, view.in_flight_tokens)
    compute_s = (queued + request.num_prompt_tokens) / speed + view.load.step_s
    tiers = [view.tier_of(digest) for digest in request.digests]
    load_s = sum(_RESIDENCY_COST_S[tier] for tier in tiers)
    if min(tiers, default=Tier.DEVICE) < Tier.LOADING:
        load_s += view.num_loading * _LOAD_AHEAD_S
    return compute_s + load_s


def are_fetched(views: Sequence[WorkerView], digests: Collection[str]) -> bool:
    """True if a worker that takes requests has all these adapters, on its disk or nearer to the
    device, or if none takes any."""
    able = [view for view in views if view.takes_requests]
    return not able or any(all(digest in view.adapters for digest in digests) for view in able)


def choose(views: Sequence[WorkerView], request: RoutingRequest) -> WorkerView | None:
    """The worker for a request; None if no worker takes requests."""
    able = [view for view in views if view.takes_requests]
    if not able:
        return None
    fresh = [view for view in able if not view.stale] or able
    return min(_candidates(fresh, request), key=lambda view: _cost(view, request))


def _candidates(views: list[WorkerView], request: RoutingRequest) -> list[WorkerView]:
    """Workers to choose from, all under the load bound, by the first rule that yields any.

    1. The replicas, if one of them holds the adapter.
    2. Those of the next few workers that hold it.
    3. The replicas and the next few workers.
    4. The first worker of the order that is under the bound.
    """
    order = sorted(views, key=lambda view: _place(view, request))
    cap = load_cap(views)
    under = [view for view in order if view.num_requests < cap]
    # The mean is below the cap, so some worker is under it.
    assert under, f"no worker under the bound {cap}"
    if request.num_replicas == 0:
        return under
    nearest = [
        view for view in order[: request.num_replicas + SPARE_REPLICAS] if view.num_requests < cap
    ]
    holders = [view for view in nearest if _holds(view, request)]
    replicas = {view.address for view in order[: request.num_replicas]}
    if any(view.address in replicas for view in holders):
        return [view for view in nearest if view.address in replicas]
    return holders or nearest or under[:1]


def _holds(view: WorkerView, request: RoutingRequest) -> bool:
    """Whether a worker has loaded all adapters of a request, or is loading them."""
    return all(view.tier_of(digest) >= Tier.LOADING for digest in request.digests)


def _place(view: WorkerView, request: RoutingRequest) -> tuple[int, str, str]:
    """Sort key of the rendezvous order. Workers on sockets of one name have the same id."""
    return -rendezvous_score(request.key, view.worker_id), view.worker_id, view.address


def _cost(
    view: WorkerView, request: RoutingRequest
) -> tuple[bool, float, int, tuple[int, str, str]]:
    """Sort key: same numerics, then time to first token, then batch size, then rendezvous order."""
    differs = bool(request.numerics) and view.numerics != request.numerics
    time_s = round(first_token_s(view, request), 3)
    return differs, time_s, view.num_requests, _place(view, request)
