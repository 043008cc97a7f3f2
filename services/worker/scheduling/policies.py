"""Policies: the order in which waiting requests are tried. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from loraplex_services.common.virtual_counters import Account, VirtualCounters, service
from loraplex_services.worker.types.request import Request


@dataclass(frozen=True, slots=True)
class QueueView:
    """What a policy may read in addition to the request."""

    now: float
    in_use: Collection[str]
    """Digests of the adapters that running requests use."""
    num_waiting: int = 0
    num_running: int = 0


SortKey = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """An order of the queue: a sort key for each request, smallest first.

    A policy orders requests and never drops one. Requests of one tenant, priority and adapter set
    are always served by arrival, and keys must agree with that. A priority may order only the
    requests of one tenant.

    A key has two parts, so that a step does not have to look at all waiting requests. The
    requests of one tenant form a group and are ordered in it by their own part of the key. While
    a request waits, neither part may fall.
    """

    group_key: Callable[[Request, QueueView], SortKey]
    """Key of a group, computed from the first of its requests."""
    own_key: Callable[[Request, QueueView], SortKey]
    num_tenant_parts: int
    """How many leading parts of the group's key identify the tenant. With 0, all tenants share
    their groups."""
    clusters: bool = False
    """A tenant's requests whose adapters are in use form a separate group. The parts of a group's
    key after the tenant's may then fall."""

    def key(self, request: Request, view: QueueView) -> SortKey:
        """Both parts of a request's key."""
        return (*self.group_key(request, view), *self.own_key(request, view))


def running_order(requests: Iterable[Request]) -> list[Request]:
    """Running requests by arrival, where each tenant's positions are filled by its requests in
    order of priority number. No tenant gets ahead of another by the priorities that it sends."""
    by_arrival = sorted(requests, key=lambda request: request.arrival_s)
    if len({request.priority for request in by_arrival}) <= 1:
        return by_arrival
    of_tenant: dict[str, list[Request]] = {}
    for request in by_arrival:
        of_tenant.setdefault(request.tenant, []).append(request)
    urgent = {
        tenant: iter(sorted(own, key=lambda request: request.priority))
        for tenant, own in of_tenant.items()
    }
    return [next(urgent[request.tenant]) for request in by_arrival]


FIRST_COME = Policy(lambda request, view: (), lambda request, view: (request.arrival_s,), 0)
"""By arrival. Priorities count only at the gateway."""


MAX_CLUSTER_AGE_S = 30.0
"""If this were shorter than the usual waiting time, clustering would become first come, first
served."""
MIN_CLUSTER_QUEUE = 0.5
"""Waiting requests per running request. In a shorter queue, no request is passed over, because
clustering gains little there and makes requests late. `docs/experiments.md` has the measurements of
both constants."""


def clustered(
    policy: Policy,
    cluster_size: int,
    max_age_s: float = MAX_CLUSTER_AGE_S,
    min_queue: float = MIN_CLUSTER_QUEUE,
) -> Policy:
    """`policy`, except that while `cluster_size` adapters run, requests for these come before the
    others of the same group (with `fair`, the requests of one tenant and priority).

    A step with fewer distinct adapters reads fewer bytes. The request that is next in `policy` is
    passed over for at most `max_age_s` after its arrival, and never in a short queue.

    Source: S-LoRA section 4.2 (adapter clustering), with both bounds and fairness added.
    """

    def group_key(request: Request, view: QueueView) -> SortKey:
        own = policy.group_key(request, view)
        is_short = view.num_waiting < min_queue * view.num_running
        if is_short or len(view.in_use) < cluster_size:
            return (*own, 0)
        is_aged = view.now - request.arrival_s >= max_age_s
        return (*own, 0 if is_aged else 1 if request.adapters.within(view.in_use) else 2)

    return Policy(group_key, policy.own_key, policy.num_tenant_parts, clusters=True)


class ServiceCounters:
    """The service that each tenant, and each adapter set of a tenant, has received; for `fair`."""

    def __init__(self) -> None:
        self.tenants = VirtualCounters()
        self._adapters: dict[str, VirtualCounters] = {}
        self._accounts: dict[Request, tuple[Account, Account]] = {}
        """Of each live request: the account of its tenant, and of its adapter set within the
        tenant."""

    def arrive(self, request: Request) -> None:
        """Add a live request."""
        adapters = self._adapters.setdefault(request.tenant, VirtualCounters())
        of_tenant = self.tenants.arrive(request.tenant)
        self._accounts[request] = of_tenant, adapters.arrive(request.adapters)

    def leave(self, request: Request, now: float) -> None:
        """Remove a live request."""
        del self._accounts[request]
        self.tenants.leave(request.tenant, now)
        self._adapters[request.tenant].leave(request.adapters)
        if request.tenant not in self.tenants.present:
            del self._adapters[request.tenant]

    def charge(self, request: Request, num_input: int, num_output: int) -> None:
        """Add tokens that were computed for a live `request`, divided by its weight."""
        cost = service(num_input, num_output, request.fairness_weight)
        of_tenant, of_adapters = self._accounts[request]
        self.tenants.charge(of_tenant, cost)
        of_adapters.served += cost

    def accounts(self, request: Request) -> tuple[Account, Account]:
        """The accounts of a live request: of its tenant, and of its adapter set within the
        tenant."""
        return self._accounts[request]


def reserved_slots(max_running: int) -> int:
    """Number of slots of a batch that are reserved for the least-served tenant.

    That tenant can then start immediately instead of waiting in a full batch for a request to
    end. The slots are idle only while the tenant uses less than its share. A few are enough,
    because they become free again as fast as other requests end.
    """
    return math.isqrt(max_running // 3)


def fair(counters: ServiceCounters) -> Policy:
    """The least-served tenant first. Its requests are ordered by priority, then by the service of
    their adapter set, then by arrival."""

    def group_key(request: Request, view: QueueView) -> SortKey:
        tenant, _ = counters.accounts(request)
        return (tenant.served, tenant.number, request.priority)

    def own_key(request: Request, view: QueueView) -> SortKey:
        return (request.priority, counters.accounts(request)[1].served, request.arrival_s)

    return Policy(group_key, own_key, num_tenant_parts=3)


Policies: TypeAlias = Mapping[str, Callable[[ServiceCounters], Policy]]

POLICIES: Policies = {
    "fcfs": lambda counters: FIRST_COME,
    "fair": fair,
}
COUNTING_POLICIES = ("fair",)
"""Policies that read the service counters. For other policies, nothing is counted."""


def make_policy(
    name: str, cluster_size: int, policies: Policies
) -> tuple[Policy, ServiceCounters | None]:
    """The order of waiting requests, and the counters that it reads, if any.

    Args:
        name: a key of `policies`.
        cluster_size: see `clustered`; 0 = no clustering.
    """
    counters = ServiceCounters() if name in COUNTING_POLICIES else None
    policy = policies[name](counters or ServiceCounters())
    return (clustered(policy, cluster_size) if cluster_size else policy), counters
