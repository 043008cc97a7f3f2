"""Where a request runs: pure functions over worker views, the same on every gateway.

An adapter has a *home set*: the first workers of its rendezvous order, as many as its share of the
load deserves. A request goes to the home that promises the first token soonest among those under
the load bound. An adapter that none of them holds, or whose homes are at the bound, goes to where
it is among the next few workers of the order, else to the one of these that will have it soonest:
loads queue up behind each other, so a few to choose from cut the wait most of all (Mitzenmacher,
The Power of Two Choices), and it can never scatter beyond them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from services.gateway.workers.view import Tier, WorkerView

LOAD_BOUND = 1.25
"""No worker takes more than this multiple of the mean number of requests (rounded up)."""
FREE_REQUESTS = 8
"""So few requests never make a worker full: a batch of them costs hardly more than one."""
SPARE_HOMES = 2
"""Workers behind its homes at which an adapter may be, or be loaded, when no home holds it."""
REQUESTS_PER_HOME = 4
"""An adapter needs this many requests in flight for each home beyond its first."""
_SHRINK_MARGIN = 0.25
"""A home set shrinks only when the load fell this far below what it was grown for."""
_DEFAULT_TOKENS_PER_S = 2000.0
_RESIDENCY_COST_S = {Tier.DEVICE: 0.0, Tier.LOADING: 0.02, Tier.DISK: 0.05, Tier.NONE: 0.5}
_LOAD_AHEAD_S = 0.05
"""Added per adapter that is on its way to a device: copies come one after another."""
_RANK_COST_S = 1e-5
"""Added per rank of other adapters' largest rank above ours: wide company slows a batch."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What the router must know of a request."""

    key: str
    """What decides the home set: the digest, or for the base the request itself."""
    digests: tuple[str, ...]
    num_prompt_tokens: int
    homes: int = 1
    """Size of the home set; 0 = every worker is home (requests of the base)."""
    numerics: str = ""
    """Prefer workers with this fingerprint: a continuation stays exact there."""


def rendezvous_score(key: str, worker_id: str) -> int:
    """The weight of a worker for a key: 64 bits, independent between workers."""
    data = key.encode() + b"\0" + worker_id.encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())


def rendezvous_order(key: str, worker_ids: Iterable[str]) -> list[str]:
    """All workers, best first. Removing one never changes the order of the others."""
    return sorted(worker_ids, key=lambda w: (-rendezvous_score(key, w), w))


def home_count(adapter_load: float, total_load: float, num_workers: int, current: int) -> int:
    """How many homes an adapter deserves: its share of the load in workers, rounded up.

    A cold adapter has one, however idle the fleet is. Grows at once; shrinks one at a time and
    only with a margin, so that a load at the edge does not move adapters back and forth.
    """
    if num_workers == 0 or total_load <= 0:
        return 1
    share = min(adapter_load / total_load * num_workers, adapter_load / REQUESTS_PER_HOME)
    wanted = min(max(1, math.ceil(share)), num_workers)
    if wanted >= current:
        return wanted
    return current - 1 if share + _SHRINK_MARGIN <= current - 1 else min(current, num_workers)


def load_cap(views: Sequence[WorkerView]) -> int:
    """The most requests a worker may hold, counting the one to be placed."""
    total = sum(view.num_requests for view in views) + 1
    return max(FREE_REQUESTS, math.ceil(LOAD_BOUND * total / len(views)))


class HomeSizes:
    """Remembers the home set size of each adapter with requests in flight at this gateway."""

    def __init__(self) -> None:
        self._in_flight: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._total = 0

    @property
    def total(self) -> int:
        """Requests in flight."""
        return self._total

    def start(self, key: str, num_workers: int) -> int:
        """Count a request in; returns the adapter's home set size now."""
        load = self._in_flight[key] = self._in_flight.get(key, 0) + 1
        self._total += 1
        size = home_count(load, self._total, num_workers, self._sizes.get(key, 1))
        self._sizes[key] = size
        return size

    def end(self, key: str) -> None:
        """Count a request out; an adapter without any is forgotten."""
        self._total -= 1
        self._in_flight[key] -= 1
        if not self._in_flight[key]:
            del self._in_flight[key], self._sizes[key]


def first_token_s(view: WorkerView, placement: Placement) -> float:
    """Estimated seconds from now to the first token there."""
    speed = view.load.prefill_tokens_per_s or _DEFAULT_TOKENS_PER_S
    queued = max(view.load.queued_tokens, view.in_flight_tokens)
    compute_s = (queued + placement.num_prompt_tokens) / speed + view.load.step_s
    tiers = [view.tier_of(digest) for digest in placement.digests]
    load_s = sum(_RESIDENCY_COST_S[tier] for tier in tiers)
    if min(tiers, default=Tier.DEVICE) < Tier.LOADING:
        load_s += view.num_loading * _LOAD_AHEAD_S
    return compute_s + load_s + _rank_cost_s(view, placement)


def can_start_within(views: Sequence[WorkerView], num_prompt_tokens: int, left_s: float) -> bool:
    """False when no worker could give a first token in time, by the speeds that were measured."""
    able = [view for view in views if view.takes_requests]
    if left_s <= 0:
        return False
    return not able or any(_prefill_s(view, num_prompt_tokens) <= left_s for view in able)


def are_on_a_device(views: Sequence[WorkerView], digests: Collection[str]) -> bool:
    """Whether some worker that takes requests has all these adapters ready; if there is one."""
    able = [view for view in views if view.takes_requests]
    return not able or any(
        all(view.tier_of(digest) is Tier.DEVICE for digest in digests) for view in able
    )


def _prefill_s(view: WorkerView, num_prompt_tokens: int) -> float:
    speed = view.load.prefill_tokens_per_s
    return (view.load.queued_tokens + num_prompt_tokens) / speed if speed else 0.0


def choose(views: Sequence[WorkerView], placement: Placement) -> WorkerView | None:
    """The worker for a request, or None when none takes requests."""
    able = [view for view in views if view.takes_requests]
    if not able:
        return None
    fresh = [view for view in able if not view.stale] or able
    return min(_candidates(fresh, placement), key=_cost(placement))


def _candidates(views: list[WorkerView], placement: Placement) -> list[WorkerView]:
    """Homes under the load bound, if one holds the adapter; else those of the next few workers
    that hold it, else all of both; when none is under the bound, the next of the order that is."""
    by_id = {view.worker_id: view for view in views}
    order = [by_id[w] for w in rendezvous_order(placement.key, by_id)]
    cap = load_cap(views)
    under = [view for view in order if view.num_requests < cap]
    # The mean is never above the cap, so somebody is under it.
    assert under, f"no worker under the bound {cap}"
    if placement.homes == 0:
        return under
    nearest = [view for view in order[: placement.homes + SPARE_HOMES] if view.num_requests < cap]
    holders = [view for view in nearest if _holds(view, placement)]
    homes = {view.worker_id for view in order[: placement.homes]}
    if any(view.worker_id in homes for view in holders):
        return [view for view in nearest if view.worker_id in homes]
    return holders or nearest or under[:1]


def _holds(view: WorkerView, placement: Placement) -> bool:
    """Whether all adapters of a request are on a worker's device or on their way there."""
    return all(view.tier_of(digest) >= Tier.LOADING for digest in placement.digests)


def _cost(placement: Placement) -> Callable[[WorkerView], tuple[bool, float, int, int]]:
    """Sort key: same arithmetic, then time, then the smaller batch, then the rendezvous order."""

    def cost(view: WorkerView) -> tuple[bool, float, int, int]:
        differs = bool(placement.numerics) and view.numerics != placement.numerics
        time_s = round(first_token_s(view, placement), 3)
        return (
            differs,
            time_s,
            view.num_requests,
            -rendezvous_score(placement.key, view.worker_id),
        )

    return cost


def _rank_cost_s(view: WorkerView, placement: Placement) -> float:
    if not placement.digests:
        return 0.0
    own = max((r.max_rank for d in placement.digests if (r := view.adapters.get(d))), default=0)
    running = (r.max_rank for r in view.adapters.values() if r.running_requests)
    return max(max(running, default=0) - own, 0) * _RANK_COST_S
