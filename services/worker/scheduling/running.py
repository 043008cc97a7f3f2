"""The running batch, organised so that a step without changes costs little.

Requests that decode are kept in batch order. Those with more than one token to compute (prompts,
and preempted requests) are kept separately, in order of arrival. Requests whose last token is
chosen by a step in flight have nothing left to compute.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import PlannedRow, batch_order


@dataclass(slots=True, eq=False)
class Member:
    """A running request."""

    request: Request
    slots: tuple[tuple[int, float], ...]
    """(slot, coefficient) of each adapter."""
    order: tuple[bool, int, int]
    """Sort key of the batch among requests that decode: rows of the base last, others by first
    slot, then by entry."""
    num_allocated: int = 0
    """Number of positions that have a block."""
    is_decoding: bool = False
    last_decode_step: int = -1
    """The last step in which the request decoded while others of its tenant skipped it."""

    def row(self, num_tokens: int) -> PlannedRow:
        """Compute the next `num_tokens` positions."""
        request = self.request
        is_last = num_tokens == request.num_pending
        return PlannedRow(request, request.num_computed, num_tokens, is_last, self.slots)


_ORDER = attrgetter("order")


class RunningBatch:
    """All running requests, by id and by their work in a step."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._num_entered = 0
        self.decoding: list[Member] = []
        """Requests with one token to compute each, in batch order."""
        self.prompts: dict[str, Member] = {}
        """Requests with more tokens to compute, and those that have just begun."""
        self.ending: dict[str, Member] = {}
        """Requests without further work: their last token is being sampled."""
        self.max_num_tokens = 0
        """Tokens of all requests together, each at its full length."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        """All requests, in the order in which they entered."""
        return (member.request for member in self._members.values())

    def members(self) -> Iterable[Member]:
        """All members, in the order in which they entered."""
        return self._members.values()

    def get(self, request_id: str) -> Request | None:
        """The request of this id, if it runs."""
        member = self._members.get(request_id)
        return None if member is None else member.request

    def has(self, request: Request) -> bool:
        """Whether this very request runs."""
        member = self._members.get(request.request_id)
        return member is not None and member.request is request

    @property
    def num_pending(self) -> int:
        """Known tokens whose KV is still to be computed."""
        return len(self.decoding) + sum(m.request.num_pending for m in self.prompts.values())

    def add(self, request: Request, slots: tuple[tuple[int, float], ...]) -> Member:
        """Add a request to the batch."""
        self._num_entered += 1
        order = (not slots, slots[0][0] if slots else 0, self._num_entered)
        member = Member(request, slots, order)
        self._members[request.request_id] = self.prompts[request.request_id] = member
        self.max_num_tokens += request.max_num_tokens
        return member

    def pop(self, request_id: str) -> Request | None:
        """Remove a request; None if it does not run."""
        member = self._members.pop(request_id, None)
        if member is None:
            return None
        self._leave_stage(member)
        self.max_num_tokens -= member.request.max_num_tokens
        return member.request

    def caught_up(self, request: Request) -> None:
        """Note that all known tokens of a request are computed and that another one is in flight.
        From then on the request decodes, unless that token is its last."""
        member = self._members[request.request_id]
        if request.is_ending:
            self._leave_stage(member)
            self.ending[request.request_id] = member
        elif not member.is_decoding:
            self._leave_stage(member)
            member.is_decoding = True
            insort(self.decoding, member, key=_ORDER)

    def _leave_stage(self, member: Member) -> None:
        request_id = member.request.request_id
        if member.is_decoding:
            del self.decoding[bisect_left(self.decoding, member.order, key=_ORDER)]
            member.is_decoding = False
        elif self.prompts.pop(request_id, None) is None:
            del self.ending[request_id]

    def decode_rows(self, skipping: Collection[Member]) -> list[PlannedRow]:
        """A row for every request that decodes, need not wait and does not sit out."""
        return [
            PlannedRow(
                request,
                request.num_computed,
                1,
                True,
                member.slots,
                request.in_flight_output if request.num_in_flight_tokens else None,
            )
            for member in self.decoding
            if ((request := member.request).constraint is None or not request.must_wait)
            and member not in skipping
        ]

    def check_integrity(self, tokens_per_block: int) -> None:
        """Assert that each member is in exactly one list, and that the lists are in order."""
        for member in self._members.values():
            tables = member.request.block_tables
            assert bool(tables) != member.request.without_cache, member.request.request_id
            allocated = len(tables[0]) * tokens_per_block if tables else 0
            assert member.num_allocated == allocated, member.request.request_id
        decoding = [member.request.request_id for member in self.decoding]
        assert sorted([*decoding, *self.prompts, *self.ending]) == sorted(self._members)
        assert all(member.is_decoding for member in self.decoding)
        assert not any(member.is_decoding for member in self.prompts.values())
        assert self.decoding == sorted(self.decoding, key=_ORDER)
        assert self.max_num_tokens == sum(request.max_num_tokens for request in self)
        assert all(m.request.num_pending == 1 for m in self.decoding), "more than one token to do"


def in_batch_order(decodes: list[PlannedRow], others: list[PlannedRow]) -> list[PlannedRow]:
    """Contexts, then generations. `decodes`: generations in order already."""
    contexts = sorted((row for row in others if row.is_context), key=batch_order)
    late = [row for row in others if not row.is_context]
    return contexts + (sorted(decodes + late, key=batch_order) if late else decodes)


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
