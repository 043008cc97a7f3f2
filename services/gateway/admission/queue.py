"""Decides which requests run, wait or are refused: a pure queue under a given clock.

Bounds: running sequences, running sequences of one tenant, waiting requests, and prompt tokens in
flight, which are those of running requests that have no first token yet. The last bound keeps
requests waiting here, where the order is fair over all workers, and sends workers only what their
next few steps need (`dispatch_window.py`).

The least-served tenant (virtual token counters) goes first, with the oldest of its most urgent
requests. A priority orders only the requests of one tenant: anybody may send any priority, so it
must not put a tenant before others. A tenant that has reached its own limit or filled its own
window delays no other tenant. Requests of the background priority start only while no others wait,
fill at most half of what the others leave of the workers' batches, and are not charged to their
tenant. If the running sequences are too many, the queue waits for the next
request to fit, so that small requests do not starve large ones.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass

from loraplex.errors import DeadlineExceeded, LoraplexError, ResourceExhausted
from loraplex_services.common.limits import MAX_QUEUED, MAX_RUNNING
from loraplex_services.common.virtual_counters import VirtualCounters, service
from loraplex_services.gateway.admission.dispatch_window import InFlightTokens, Window
from loraplex_services.gateway.admission.request import AdmissionRequest
from loraplex_services.gateway.admission.tenant_queue import TenantQueue

_UNKNOWN_CAPACITY = 16
"""Sequences that workers are taken to run at once before they say it."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds of one gateway."""

    max_running: int = MAX_RUNNING
    max_waiting: int = MAX_QUEUED

    def __post_init__(self) -> None:
        assert self.max_running > 0 and self.max_waiting >= 0, f"bad limits {self}"


class Decision(enum.Enum):
    """The decision of the queue about a request."""

    RUN = "run"
    WAIT = "wait"


class AdmissionQueue:
    """Accounts for every request. Each one that runs must come back through `release`."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self.window = Window()
        """Limits on prompt tokens in flight; may change while requests run."""
        self._tenants: dict[str, TenantQueue] = {}
        """The queue of every tenant with live requests."""
        self._waiting: dict[str, TenantQueue] = {}
        """The queues with waiting requests."""
        self.num_waiting = 0
        """Requests in the queue."""
        self.dropped: list[AdmissionRequest] = []
        """Waiting requests that were dropped for others; the caller of `offer` empties it."""
        self.num_running = 0
        """Sequences running now."""
        self._by_tenant: dict[str, int] = {}
        """Running sequences. No empty entries."""
        self._background: Counter[str] = Counter()
        """Running sequences of background requests by tenant."""
        self.tenant_limits: dict[str, int] = {}
        """Running sequences allowed to each tenant that has a limit of its own."""
        self.tenant_share = 0
        """Running sequences allowed to each tenant that has none; 0 = no limit."""
        self._in_flight = InFlightTokens()
        self._fetching = InFlightTokens()
        """In-flight tokens of requests whose adapters no worker had."""
        self._served = VirtualCounters()
        self._service_s = 0.0
        """Moving mean of the seconds that one request runs."""

    @property
    def background_limit(self) -> int:
        """Sequences of background requests that may run now; always one."""
        capacity = self.window.batch_capacity or _UNKNOWN_CAPACITY
        return max(1, (capacity - self.num_running + self._background.total()) // 2)

    def counts_by_tenant(self) -> dict[str, tuple[int, int]]:
        """Running sequences and waiting requests of each tenant that has any."""
        tenants = self._by_tenant.keys() | self._waiting.keys()
        return {
            tenant: (self.num_running_of(tenant), self._num_waiting_of(tenant))
            for tenant in tenants
        }

    def _num_waiting_of(self, tenant: str) -> int:
        return len(self._waiting.get(tenant, ()))

    def num_running_of(self, tenant: str) -> int:
        """Sequences of one tenant running now."""
        return self._by_tenant.get(tenant, 0)

    def offer(self, request: AdmissionRequest, now_s: float) -> Decision:
        """Run it, queue it or refuse it. A full queue drops the newest of the tenant with most.

        Raises: ResourceExhausted when the queue is full, DeadlineExceeded if it would start too
        late.
        """
        runs = self._fits(request) and not self._is_preceded(request)
        if not runs:
            if now_s + self.expected_wait_s(request.tenant, request.run_s) > request.start_by_s:
                raise deadline_infeasible()
            if self.num_waiting >= self._limits.max_waiting:
                self._drop_for(request)
        self._served.arrive(request.tenant)
        own = self._tenants.setdefault(request.tenant, TenantQueue())
        own.served.arrive(request.adapters)
        if runs:
            self._start(request)
            return Decision.RUN
        own.push(request)
        self._waiting[request.tenant] = own
        self.num_waiting += 1
        return Decision.WAIT

    def first_token(self, request: AdmissionRequest) -> bool:
        """A running request has its first token; True if it was in flight. Call `take_ready`
        next."""
        return self._in_flight_of(request).remove(request.number)

    def charge(self, request: AdmissionRequest, num_tokens: int) -> None:
        """A running request generated tokens."""
        self._charge(request, 0, num_tokens)

    def release(self, request: AdmissionRequest, held_s: float) -> None:
        """A request ended after `held_s` seconds; 0 = it never began. Call `take_ready` next."""
        self.first_token(request)
        self.num_running -= request.cost
        if request.is_background:
            self._background[request.tenant] -= request.cost
            self._background += Counter()  # without tenants that have none left
        left = self._by_tenant[request.tenant] - request.cost
        self._by_tenant[request.tenant] = left
        if left == 0:
            del self._by_tenant[request.tenant]
        self._leave(request)
        if held_s > 0:
            self._service_s += (held_s - self._service_s) * (0.1 if self._service_s else 1.0)

    def withdraw(self, request: AdmissionRequest) -> None:
        """The client of a waiting request has disconnected."""
        self._unqueue(request)
        self._leave(request)

    def take_ready(self) -> list[AdmissionRequest]:
        """Start every waiting request that fits, in order."""
        started = []
        while (request := self._next()) is not None and self._running_fits(request):
            self._unqueue(request)
            self._start(request)
            started.append(request)
        return started

    def expected_wait_s(self, tenant: str | None = None, run_s: float = 0.0) -> float:
        """Seconds until a request that joins the queue now would start; 0 = unknown.

        By Little's law, running requests leave at their number over the time that one runs, which
        is `run_s` until it was measured. A request waits for as many requests of each other tenant
        as its own tenant has waiting; with `tenant` None it waits for all.
        """
        ahead = self.num_waiting
        if tenant is not None:
            mine = self._num_waiting_of(tenant)
            ahead = sum(min(len(queue), mine + 1) for queue in self._waiting.values())
        return (self._service_s or run_s) * (ahead + 1) / max(self.num_running, 1)

    def _drop_for(self, request: AdmissionRequest) -> None:
        """Drop a waiting request in favour of this one. Raises: ResourceExhausted.

        The victim is the newest of the least urgent requests of one tenant: of this request's own
        if that has less urgent ones waiting, else of the tenant with most of them, which must have
        more requests waiting.
        """
        own = self._waiting.get(request.tenant)
        if own and own.least_urgent > request.priority:
            victims = own
        else:
            queues = self._waiting
            most = max(queues, key=lambda tenant: (len(queues[tenant]), tenant), default=None)
            if most is None or len(queues[most]) <= self._num_waiting_of(request.tenant) + 1:
                raise queue_full(self.expected_wait_s())
            victims = queues[most]
        victim = victims.newest()
        self.withdraw(victim)
        self.dropped.append(victim)

    def _next(self) -> AdmissionRequest | None:
        """The waiting request that starts next; tenants at their own limit are skipped, and those
        that fill the window themselves."""
        firsts = {tenant: self._first_of(queue) for tenant, queue in self._waiting.items()}
        others_wait = self._others_wait()
        able = [
            tenant
            for tenant, request in firsts.items()
            if self._tenant_fits(request)
            and self._window_fits(request)
            and not (request.is_background and others_wait)
        ]
        present = self._served.present
        least = min(able, key=lambda tenant: (present[tenant].served, tenant), default=None)
        return None if least is None else firsts[least]

    def _others_wait(self) -> bool:
        """True if a request that is not of the background priority waits, and its tenant may start
        it."""
        firsts = map(self._first_of, self._waiting.values())
        return any(not first.is_background and self._tenant_fits(first) for first in firsts)

    def _first_of(self, queue: TenantQueue) -> AdmissionRequest:
        """The request of one tenant that starts next. While the window for fetches is full, the
        requests that need no fetch pass the others."""
        first = queue.first()
        assert first is not None, "an empty queue"
        if first.awaits_fetch and not self._window_fits(first):
            return queue.first(but_awaiting_fetch=True) or first
        return first

    def _fits(self, request: AdmissionRequest) -> bool:
        return (
            self._running_fits(request)
            and self._window_fits(request)
            and self._tenant_fits(request)
        )

    def _running_fits(self, request: AdmissionRequest) -> bool:
        """An idle gateway runs any request, however many sequences it has."""
        return not self.num_running or self.num_running + request.cost <= self._limits.max_running

    def _window_fits(self, request: AdmissionRequest) -> bool:
        window = self.window
        fits_batch = self.num_running + request.cost <= window.batch_capacity
        if request.awaits_fetch:
            window, fits_batch = Window(window.fetching_tokens), False
        return self._in_flight_of(request).fit(
            request.tenant, request.in_flight_tokens, window, fits_batch=fits_batch
        )

    def _in_flight_of(self, request: AdmissionRequest) -> InFlightTokens:
        return self._fetching if request.awaits_fetch else self._in_flight

    def _tenant_fits(self, request: AdmissionRequest) -> bool:
        mine = self.num_running_of(request.tenant)
        limit = self.tenant_limits.get(request.tenant)
        if limit == 0:
            return False
        limit = limit or self.tenant_share
        if request.is_background and not self._background_fits(request, limit):
            return False
        return not limit or not mine or mine + request.cost <= limit

    def _background_fits(self, request: AdmissionRequest, tenant_limit: int) -> bool:
        """Half of its tenant's limit stays free as well, for the tenant's other requests."""
        running, mine = self._background.total(), self._background[request.tenant]
        if mine and tenant_limit and mine + request.cost > tenant_limit // 2:
            return False
        return not running or running + request.cost <= self.background_limit

    def _is_preceded(self, request: AdmissionRequest) -> bool:
        """True if a waiting request goes first: one of its tenant, or one of another tenant that
        was served no more."""
        own = self._waiting.get(request.tenant)
        if own and self._precedes(own, self._first_of(own), request):
            return True
        if request.is_background and self._others_wait():
            return True
        other = self._next()
        if other is None or other.tenant == request.tenant:
            return False
        if other.is_background and not request.is_background:
            return False
        return self._served.served_of(request.tenant) >= self._served.served_of(other.tenant)

    def _precedes(
        self, own: TenantQueue, first: AdmissionRequest, request: AdmissionRequest
    ) -> bool:
        """Whether the first waiting request of a tenant goes before a new one. One for which the
        window for fetches has no space does not, if the new one needs no fetch."""
        if first.awaits_fetch and not request.awaits_fetch and not self._window_fits(first):
            return False
        return own.precedes(first, request)

    def _start(self, request: AdmissionRequest) -> None:
        self.num_running += request.cost
        self._by_tenant[request.tenant] = self._by_tenant.get(request.tenant, 0) + request.cost
        if request.is_background:
            self._background[request.tenant] += request.cost
        self._in_flight_of(request).add(request.number, request.tenant, request.in_flight_tokens)
        self._charge(request, request.num_prompt_tokens, 0)

    def _charge(self, request: AdmissionRequest, num_input: int, num_output: int) -> None:
        if request.is_background:
            return
        account = self._served.present[request.tenant]
        cost = service(num_input, num_output, request.weight)
        self._served.charge(account, cost)
        self._tenants[request.tenant].served.present[request.adapters].served += cost

    def _leave(self, request: AdmissionRequest) -> None:
        self._served.leave(request.tenant)
        self._tenants[request.tenant].served.leave(request.adapters)
        if request.tenant not in self._served.present:
            del self._tenants[request.tenant]

    def _unqueue(self, request: AdmissionRequest) -> None:
        own = self._waiting[request.tenant]
        own.remove(request)
        self.num_waiting -= 1
        if not own:
            del self._waiting[request.tenant]


def queue_full(wait_s: float) -> LoraplexError:
    """The error of a request that does not fit the queue, or was dropped from it."""
    return ResourceExhausted(
        "the queue is full; retry later",
        reason="QUEUE_FULL",
        retry_after_s=max(1.0, wait_s),
    )


def deadline_infeasible() -> LoraplexError:
    """The error of a request that would start too late for its deadline."""
    return DeadlineExceeded(
        "cannot finish before its deadline; allow more time or retry later",
        reason="DEADLINE_INFEASIBLE",
        retry_after_s=1.0,
    )
