"""How much work the workers get ahead of its first token, learnt from how fast those come. Pure.

Workers need a little more than they can start, so that a place that becomes free is taken at once;
what is beyond that waits there, where this gateway can no longer order, refuse or move it. So the
room is what gets its first token in a fraction of a second, by Little's law, and never so little
that a worker runs dry. What finds a place in a batch goes on beyond it, as far as workers compute
prompts in that time: a batch that is filled in one step stands still for as long, and ends as one.

Requests whose adapters are still to be loaded wait for that and not for steps: they have a wide
room of their own, and whatever is ready passes them.

A tenant does not wait for the first tokens of others who have filled the room: what it has ahead
itself may fill another, and the workers' own fair order lets it overtake there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from services.gateway.workers.view import WorkerView

TARGET_S = 0.05
"""A request waits at a worker about so long while others wait here."""
TARGET_STEPS = 3.0
"""But for so many steps where they are long: first tokens come in steps, and a bound below a step's
worth would shrink on its own account."""
LEAST_TOKENS_PER_WORKER, MOST_TOKENS_PER_WORKER = 256.0, 8192.0
_SMOOTHING = 0.1
_MOST_ROOMS = 3.0
"""For all tenants together, each of which may have one."""


@dataclass(frozen=True, slots=True)
class ReadyWorkers:
    """Those that take requests."""

    num: int
    step_s: float = 0.0
    """Of the slowest."""
    num_places: int = 0
    """Requests of this gateway that they take at once without a queue; 0 = not known."""
    prefill_tokens_per_s: float = math.inf
    """Of all of them."""


def ready_workers(views: Iterable[WorkerView]) -> ReadyWorkers:
    """Those of the views that take requests."""
    ready = [view for view in views if view.takes_requests]
    return ReadyWorkers(
        len(ready),
        max((view.load.step_s for view in ready), default=0.0),
        sum(view.num_places for view in ready),
        sum(view.load.prefill_tokens_per_s or math.inf for view in ready),
    )


@dataclass(frozen=True, slots=True)
class Room:
    """What may be ahead, in prompt tokens."""

    num_tokens: float = math.inf
    """Whether or not a place is free."""
    num_places: int = 0
    """While no more requests than this run, `most_tokens` may be ahead instead."""
    most_tokens: float = math.inf
    loading_tokens: float = math.inf
    """Of requests whose adapters are on no device yet, beside the others."""


class AheadRoom:
    """The room of all workers together, learnt."""

    def __init__(self) -> None:
        self._rate = 0.0
        """Prompt tokens a second that get their first token; 0 = not known."""
        self._begin_s = 0.0
        self._num_tokens = 0

    def begin(self, now_s: float) -> None:
        """Requests begin to wait for room: from now on the rate is what the workers can do."""
        self._begin_s, self._num_tokens = now_s, 0

    def started(self, num_tokens: int, now_s: float, workers: ReadyWorkers) -> None:
        """Requests of so many prompt tokens have their first token while others wait here."""
        self._num_tokens += num_tokens
        elapsed_s = now_s - self._begin_s
        if elapsed_s < _target_s(workers):
            return
        rate = self._num_tokens / elapsed_s
        self._rate += (rate - self._rate) * (_SMOOTHING if self._rate else 1.0)
        self.begin(now_s)

    def room(self, workers: ReadyWorkers) -> Room:
        """The room now."""
        num, target_s = max(workers.num, 1), _target_s(workers)
        least, most = LEAST_TOKENS_PER_WORKER * num, MOST_TOKENS_PER_WORKER * num
        learnt, computed = self._rate * target_s, workers.prefill_tokens_per_s * target_s
        within = [min(max(tokens, least), most) for tokens in (learnt, computed)]
        return Room(within[0], workers.num_places, within[1], most)


class TokensAhead:
    """Prompt tokens of running requests without a first token, by request and by tenant."""

    def __init__(self) -> None:
        self._by_request: dict[int, tuple[str, int]] = {}
        self._by_tenant: dict[str, int] = {}
        """No empty entries."""
        self._total = 0

    def fit(self, tenant: str, num_tokens: int, room: Room, *, finds_place: bool) -> bool:
        """Whether a request of so many tokens may go ahead; the first may, however large it is."""
        total = self._total + num_tokens
        if not self._total or total <= room.num_tokens:
            return True
        if finds_place and total <= room.most_tokens:
            return True
        own = self._by_tenant.get(tenant, 0) + num_tokens
        return own <= room.num_tokens and total <= _MOST_ROOMS * room.num_tokens

    def add(self, number: int, tenant: str, num_tokens: int) -> None:
        """Request `number` goes ahead."""
        self._by_request[number] = tenant, num_tokens
        self._by_tenant[tenant] = self._by_tenant.get(tenant, 0) + num_tokens
        self._total += num_tokens

    def remove(self, number: int) -> bool:
        """It has its first token or ended; False when it was not ahead any more."""
        if number not in self._by_request:
            return False
        tenant, num_tokens = self._by_request.pop(number)
        self._total -= num_tokens
        self._by_tenant[tenant] -= num_tokens
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
        return True


def _target_s(workers: ReadyWorkers) -> float:
    return max(TARGET_S, TARGET_STEPS * workers.step_s)
