"""Who may run now, who waits, who is refused: a pure queue under the caller's clock.

Bounds: sequences running at once, sequences of one tenant running at once, requests waiting, and
prompt tokens sent ahead: those of running requests that have no first token yet. That last bound
keeps the queue here, where it is fair over all workers, and gives the workers only their next few
steps (`dispatch_window.py`).

Waiting requests go by priority, then to the tenant served least (virtual token counters), then in
order of arrival. A tenant's own limit delays nobody else; any other request that does not fit is
waited for, so that large ones are not starved by small ones.
"""

from __future__ import annotations

import enum
import itertools
from collections import deque
from dataclasses import dataclass, field

from loraplex.errors import DeadlineExceeded, LoraplexError, ResourceExhausted
from services.gateway.admission.dispatch_window import Room, TokensAhead
from services.gateway.admission.fairness import ServiceCounters

LEAST_AHEAD_TOKENS = 128
"""A short prompt counts as so many: it takes a place in the batch, too."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds of one gateway."""

    max_running: int = 4096
    max_waiting: int = 4096
    max_running_per_tenant: int = 0
    """0 = no limit."""

    def __post_init__(self) -> None:
        assert self.max_running > 0 and self.max_waiting >= 0, f"bad limits {self}"


@dataclass(frozen=True, slots=True)
class Ticket:
    """One request at the door. Cost is counted in choices: each is a sequence on a worker."""

    tenant: str
    cost: int = 1
    priority: int = 0
    deadline_s: float = float("inf")
    """Absolute, on the caller's clock."""
    num_prompt_tokens: int = 1
    run_s: float = 0.0
    """How long it will probably run once it starts; 0 = unknown."""
    weight: float = 1.0
    """A tenant with weight 2 deserves twice the service of one with 1."""
    first_token_due_s: float | None = None
    """When its first token must be there, as `deadline_s`; None = whenever that allows."""
    awaits_adapter: bool = False
    """Its adapters are on no device yet."""
    number: int = field(default_factory=itertools.count().__next__)

    @property
    def start_by_s(self) -> float:
        """The latest start that leaves time to finish, and for a first token in time."""
        finish_s = self.deadline_s - self.run_s
        due_s = self.first_token_due_s
        return finish_s if due_s is None else min(due_s, finish_s)

    @property
    def ahead_tokens(self) -> int:
        """What it counts until its first token."""
        return max(self.num_prompt_tokens, LEAST_AHEAD_TOKENS)


class Verdict(enum.Enum):
    """What an offer came to."""

    RUN = "run"
    WAIT = "wait"


class AdmissionQueue:
    """The door's books. Every running ticket must come back through `release`."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self.room = Room()
        """For prompt tokens sent ahead; may change while requests run."""
        self._waiting: dict[int, dict[str, deque[Ticket]]] = {}
        """By priority, then tenant. No empty entries."""
        self._waiting_by_tenant: dict[str, int] = {}
        """Requests waiting. No empty entries."""
        self._num_waiting = 0
        self.shed: list[Ticket] = []
        """Waiting tickets that made room for others; whoever offers takes them out."""
        self._running = 0
        self._by_tenant: dict[str, int] = {}
        """Sequences running."""
        self.shares: dict[str, int] = {}
        """Sequences of a tenant that may run at once, where a tenant has a limit of its own."""
        self._present: dict[str, int] = {}
        """Requests waiting or running."""
        self._ahead = TokensAhead()
        self._loading = TokensAhead()
        """The same of tickets that await adapters."""
        self._served = ServiceCounters()
        self._service_s = 0.0
        """Moving mean of how long one request holds its place."""

    @property
    def num_running(self) -> int:
        """Sequences running now."""
        return self._running

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return self._num_waiting

    def num_running_of(self, tenant: str) -> int:
        """Sequences of one tenant running now."""
        return self._by_tenant.get(tenant, 0)

    def offer(self, ticket: Ticket, now_s: float) -> Verdict:
        """Run it, queue it, or refuse it. A full queue sheds the newest of who waits most.

        Raises: ResourceExhausted when the queue is full, DeadlineExceeded when its turn would come
        too late.
        """
        runs = self._fits(ticket) and not self._someone_before(ticket)
        if not runs:
            if now_s + self.expected_wait_s(ticket.tenant, ticket.run_s) > ticket.start_by_s:
                raise too_late()
            if self._num_waiting >= self._limits.max_waiting:
                self._make_room(ticket)
        self._present[ticket.tenant] = self._present.get(ticket.tenant, 0) + 1
        self._served.arrive(ticket.tenant)
        if runs:
            self._start(ticket)
            return Verdict.RUN
        tenants = self._waiting.setdefault(ticket.priority, {})
        tenants.setdefault(ticket.tenant, deque()).append(ticket)
        mine = self._waiting_by_tenant.get(ticket.tenant, 0)
        self._waiting_by_tenant[ticket.tenant] = mine + 1
        self._num_waiting += 1
        return Verdict.WAIT

    def first_token(self, ticket: Ticket) -> bool:
        """A running ticket has its first token: True when it was ahead; call `take_ready` next."""
        return self._ahead_of(ticket).remove(ticket.number)

    def charge(self, ticket: Ticket, num_tokens: int) -> None:
        """A running ticket generated tokens."""
        self._served.charge(ticket.tenant, 0, num_tokens, ticket.weight)

    def release(self, ticket: Ticket, held_s: float) -> None:
        """A running ticket ended after `held_s` seconds, 0 = it never began; `take_ready` next."""
        self.first_token(ticket)
        self._running -= ticket.cost
        left = self._by_tenant[ticket.tenant] - ticket.cost
        self._by_tenant[ticket.tenant] = left
        if left == 0:
            del self._by_tenant[ticket.tenant]
        self._leave(ticket)
        if held_s > 0:
            self._service_s += (held_s - self._service_s) * (0.1 if self._service_s else 1.0)

    def withdraw(self, ticket: Ticket) -> None:
        """A waiting ticket's client went away."""
        self._unqueue(ticket)
        self._leave(ticket)

    def take_ready(self) -> list[Ticket]:
        """Start every waiting ticket whose turn it is, in order."""
        started = []
        while (ticket := self._next()) is not None and self._fits(ticket):
            self._unqueue(ticket)
            self._start(ticket)
            started.append(ticket)
        return started

    def expected_wait_s(self, tenant: str | None = None, run_s: float = 0.0) -> float:
        """Seconds until a ticket that joins the queue now would start; 0 = unknown.

        By Little's law: what runs now leaves at the rate of what runs over how long one runs, which
        is taken as `run_s` until it was measured. A tenant waits for as many of each other as it
        has waiting itself, None for all that wait.
        """
        ahead = self._num_waiting
        if tenant is not None:
            mine = self._waiting_by_tenant.get(tenant, 0)
            ahead = sum(min(count, mine + 1) for count in self._waiting_by_tenant.values())
        return (self._service_s or run_s) * (ahead + 1) / max(self._running, 1)

    def _make_room(self, ticket: Ticket) -> None:
        """Shed a waiting ticket that has less right to wait. Raises: ResourceExhausted.

        That is the newest of the least urgent, of the tenant with most of them; among equals in
        urgency only of a tenant that has more waiting than the new one's.
        """
        last = max(self._waiting, default=None)
        if last is not None and last >= ticket.priority:
            tenants = self._waiting[last]
            most = max(tenants, key=lambda tenant: (len(tenants[tenant]), tenant))
            mine = self._waiting_by_tenant.get(ticket.tenant, 0)
            if last > ticket.priority or len(tenants[most]) > mine + 1:
                victim = tenants[most][-1]
                self.withdraw(victim)
                self.shed.append(victim)
                return
        raise queue_full(self.expected_wait_s())

    def _next(self) -> Ticket | None:
        """The waiting ticket whose turn it is, tenants at their own limit left out."""
        for priority in sorted(self._waiting):
            tenants = self._waiting[priority]
            able = [t for t, queue in tenants.items() if self._tenant_fits(queue[0])]
            if able:
                return tenants[self._served.least_served(able)][0]
        return None

    def _fits(self, ticket: Ticket) -> bool:
        """An idle door lets any ticket in, however large it is."""
        if self._running and self._running + ticket.cost > self._limits.max_running:
            return False
        room, finds_place = self.room, self._running + ticket.cost <= self.room.num_places
        if ticket.awaits_adapter:
            room, finds_place = Room(room.loading_tokens), False
        fits = self._ahead_of(ticket).fit(
            ticket.tenant, ticket.ahead_tokens, room, finds_place=finds_place
        )
        return fits and self._tenant_fits(ticket)

    def _ahead_of(self, ticket: Ticket) -> TokensAhead:
        return self._loading if ticket.awaits_adapter else self._ahead

    def _tenant_fits(self, ticket: Ticket) -> bool:
        mine = self.num_running_of(ticket.tenant)
        share = self.shares.get(ticket.tenant)
        if share == 0:
            return False
        limits = [n for n in (self._limits.max_running_per_tenant, share) if n]
        return not limits or not mine or mine + ticket.cost <= min(limits)

    def _someone_before(self, ticket: Ticket) -> bool:
        """True when a waiting ticket must go first: it is more urgent, or as urgent and its tenant
        was served no more than the new one's."""
        other = self._next()
        if other is None or other.priority != ticket.priority:
            return other is not None and other.priority < ticket.priority
        is_queued = ticket.tenant in self._waiting[ticket.priority]
        return is_queued or not self._served.is_less_served(ticket.tenant, other.tenant)

    def _start(self, ticket: Ticket) -> None:
        self._running += ticket.cost
        self._by_tenant[ticket.tenant] = self._by_tenant.get(ticket.tenant, 0) + ticket.cost
        self._ahead_of(ticket).add(ticket.number, ticket.tenant, ticket.ahead_tokens)
        self._served.charge(ticket.tenant, ticket.num_prompt_tokens, 0, ticket.weight)

    def _unqueue(self, ticket: Ticket) -> None:
        tenants = self._waiting[ticket.priority]
        queue = tenants[ticket.tenant]
        queue.remove(ticket)
        self._num_waiting -= 1
        self._waiting_by_tenant[ticket.tenant] -= 1
        if not self._waiting_by_tenant[ticket.tenant]:
            del self._waiting_by_tenant[ticket.tenant]
        if not queue:
            del tenants[ticket.tenant]
        if not tenants:
            del self._waiting[ticket.priority]

    def _leave(self, ticket: Ticket) -> None:
        self._present[ticket.tenant] -= 1
        if not self._present[ticket.tenant]:
            del self._present[ticket.tenant]
            self._served.leave(ticket.tenant)


def queue_full(wait_s: float) -> LoraplexError:
    """The error of a request that there is no place to wait for, or none any more."""
    return ResourceExhausted(
        "too many requests are waiting already; try again later",
        reason="QUEUE_FULL",
        retry_after_s=max(1.0, wait_s),
    )


def too_late() -> LoraplexError:
    """The error of a request whose turn comes after its deadline."""
    return DeadlineExceeded(
        "the request would not be done by its deadline; send a later one or try again later",
        reason="DEADLINE_INFEASIBLE",
        retry_after_s=1.0,
    )
