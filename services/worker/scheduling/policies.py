"""In which order waiting requests are tried. Pure functions; the scheduler is given one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from loraplex_services.common.virtual_counters import Account, VirtualCounters, service
from loraplex_services.worker.types.request import Request


@dataclass(frozen=True, slots=True)
class QueueView:
    """What a policy may look at besides the request."""

    now: float
    in_use: Collection[str]
    """Digests of the adapters that running requests use."""
    num_waiting: int = 0
    num_running: int = 0


SortKey = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """An order of the queue: a sort key for each request, least first.

    It orders, it never drops: whatever comes first is admitted first if there is room. Requests
    of one tenant, priority and adapter set are always served by arrival, and keys must agree with
    that. A priority may order the requests of one tenant only.

    A key has two parts, so that a step need not look at all that wait. Requests of one tenant form
    a group, in which they stand by their own part of the key; while a request waits, both parts
    only rise.
    """

    group_key: Callable[[Request, QueueView], SortKey]
    """Of a group, which the first of its requests stands for."""
    own_key: Callable[[Request, QueueView], SortKey]
    num_tenant_parts: int
    """How many parts of the group's key, from its first, tell tenants apart. Without any, all
    tenants share their groups."""
    clusters: bool = False
    """A tenant's requests whose adapters are in use form another group than its others. Of the
    keys of groups, the parts behind the tenants' may fall."""

    def key(self, request: Request, view: QueueView) -> SortKey:
        """Both parts."""
        return (*self.group_key(request, view), *self.own_key(request, view))


def running_order(requests: Iterable[Request]) -> list[Request]:
    """By arrival, but in the positions of each tenant its requests of the lowest priority number
    come first: no tenant moves ahead of another by the priorities that it sends."""
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
"""By arrival. Priorities count at the gateway alone."""


MAX_CLUSTER_AGE_S = 30.0
"""A bound below the time that requests wait anyway would make clustering first come, first served.
"""
MIN_CLUSTER_QUEUE = 0.5
"""Waiting requests for each that runs. In a shorter queue nobody is passed over: clustering gains
little there, and makes those late who would have been in time. `docs/experiments.md` has the
measurements of both."""


def clustered(
    policy: Policy,
    cluster_size: int,
    max_age_s: float = MAX_CLUSTER_AGE_S,
    min_queue: float = MIN_CLUSTER_QUEUE,
) -> Policy:
    """`policy`, but while `cluster_size` adapters run, requests for these come before the others
    that `policy` puts into the same group (`fair`: one tenant's of one priority).

    Fewer distinct adapters a step read fewer bytes. Whoever would be next in `policy` is passed
    over for at most `max_age_s` after it came, and by nobody in a short queue.

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
    """Service by tenant, and inside a tenant by adapter set, for `fair`."""

    def __init__(self) -> None:
        self.tenants = VirtualCounters()
        self._adapters: dict[str, VirtualCounters] = {}
        self._accounts: dict[Request, tuple[Account, Account]] = {}
        """Of live requests: their tenant's, and in it their adapter set's."""

    def arrive(self, request: Request) -> None:
        """A live request more."""
        adapters = self._adapters.setdefault(request.tenant, VirtualCounters())
        of_tenant = self.tenants.arrive(request.tenant)
        self._accounts[request] = of_tenant, adapters.arrive(request.adapters)

    def leave(self, request: Request, now: float) -> None:
        """A live request less."""
        del self._accounts[request]
        self.tenants.leave(request.tenant, now)
        self._adapters[request.tenant].leave(request.adapters)
        if request.tenant not in self.tenants.present:
            del self._adapters[request.tenant]

    def charge(self, request: Request, num_input: int, num_output: int) -> None:
        """Count tokens computed for a live `request`, divided by its weight."""
        cost = service(num_input, num_output, request.fairness_weight)
        of_tenant, of_adapters = self._accounts[request]
        self.tenants.charge(of_tenant, cost)
        of_adapters.served += cost

    def accounts(self, request: Request) -> tuple[Account, Account]:
        """Of a live request: its tenant's, and inside the tenant its adapter set's."""
        return self._accounts[request]


def reserved_slots(max_running: int) -> int:
    """How many slots of a batch are reserved for the tenant that was served least.

    That tenant then starts at once, where in a full batch it would wait for a request to end. The
    slots are idle only while it asks for less than its share. A handful is enough, because they
    become free again as fast as other requests end.
    """
    return math.isqrt(max_running // 3)


def fair(counters: ServiceCounters) -> Policy:
    """The least-served tenant first; of its requests the most urgent, then those of its
    least-served adapter set, then by arrival."""

    def group_key(request: Request, view: QueueView) -> SortKey:
        tenant, _ = counters.accounts(request)
        return (tenant.served, tenant.number, request.priority)

    def own_key(request: Request, view: QueueView) -> SortKey:
        return (request.priority, counters.accounts(request)[1].served, request.arrival_s)

    return Policy(group_key, own_key, num_tenant_parts=3)
