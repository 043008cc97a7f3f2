"""Computes how many prompt tokens the gateway may send to workers ahead of their first token. Pure.

Workers need slightly more requests than they can start, so that a free slot is filled immediately.
Further requests would wait at a worker, where this gateway can no longer reorder, refuse or move
them. The window is therefore what gets its first token within a fraction of a second, by Little's
law, and never so small that a worker becomes idle. Requests that fit into a batch may exceed it, up
to the prompts that workers compute in the same time: a batch that is filled in one step is blocked
for that step, and its requests end together.

Requests whose adapters are on no worker yet wait for the fetch and not for steps. They have a
separate, larger window, so that other requests can pass them. A copy to the device from a worker's
disk or host memory takes about as long as a step, so requests that wait for one do not.

Each tenant has such a window of its own, so that no tenant waits because others have filled theirs.
A tenant with nothing in flight may always send one request. The workers' fair scheduling lets it
overtake there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from loraplex_services.common.nonzero_counter import NonzeroCounter
from loraplex_services.gateway.workers.view import WorkerView

TARGET_S = 0.05
"""About how long a request waits at a worker while others wait here."""
TARGET_STEPS = 3.0
"""The target is at least this many steps: a window below one step would shrink itself."""
MIN_TOKENS_PER_WORKER, MAX_TOKENS_PER_WORKER = 256.0, 8192.0
_SMOOTHING = 0.1


@dataclass(frozen=True, slots=True)
class ReadyWorkers:
    """The workers that take requests."""

    num: int
    step_s: float = 0.0
    """Step time of the slowest worker, in seconds."""
    batch_capacity: int = 0
    """Requests of this gateway that the workers run without queueing them; 0 = not known."""
    prefill_tokens_per_s: float = math.inf
    """Prompt tokens per second of all workers together."""


def ready_workers(views: Iterable[WorkerView]) -> ReadyWorkers:
    """Summarizes the workers that take requests."""
    ready = [view for view in views if view.takes_requests]
    return ReadyWorkers(
        len(ready),
        max((view.load.step_s for view in ready), default=0.0),
        sum(view.batch_capacity for view in ready),
        sum(view.load.prefill_tokens_per_s or math.inf for view in ready),
    )


@dataclass(frozen=True, slots=True)
class Window:
    """How many prompt tokens may be in flight, that is, sent and without a first token."""

    num_tokens: float = math.inf
    """Limit that holds whether or not a batch has a free slot."""
    batch_capacity: int = 0
    """While no more requests than this run, `max_tokens` is the limit instead."""
    max_tokens: float = math.inf
    fetching_tokens: float = math.inf
    """A separate limit for requests whose adapters are on no worker yet."""


class DispatchWindow:
    """The window of all workers together, measured from how fast first tokens come."""

    def __init__(self) -> None:
        self._rate = 0.0
        """Prompt tokens per second that get their first token; 0 = not known."""
        self._begin_s = 0.0
        self._num_tokens = 0

    def begin(self, now_s: float) -> None:
        """Requests start to wait for the window: from now on the rate is the workers' limit."""
        self._begin_s, self._num_tokens = now_s, 0

    def started(self, num_tokens: int, now_s: float, workers: ReadyWorkers) -> None:
        """Requests with `num_tokens` prompt tokens got their first token while others waited."""
        self._num_tokens += num_tokens
        elapsed_s = now_s - self._begin_s
        if elapsed_s < _target_s(workers):
            return
        rate = self._num_tokens / elapsed_s
        self._rate += (rate - self._rate) * (_SMOOTHING if self._rate else 1.0)
        self.begin(now_s)

    def window(self, workers: ReadyWorkers) -> Window:
        """The window now."""
        num, target_s = max(workers.num, 1), _target_s(workers)
        lower, upper = MIN_TOKENS_PER_WORKER * num, MAX_TOKENS_PER_WORKER * num
        measured, computed = self._rate * target_s, workers.prefill_tokens_per_s * target_s
        num_tokens, max_tokens = (min(max(n, lower), upper) for n in (measured, computed))
        return Window(num_tokens, workers.batch_capacity, max_tokens, upper)


class InFlightTokens:
    """Prompt tokens of running requests without a first token, by request and by tenant."""

    def __init__(self) -> None:
        self._by_request: dict[int, tuple[str, int]] = {}
        self._by_tenant: NonzeroCounter[str] = NonzeroCounter()
        self._total = 0

    def fit(self, tenant: str, num_tokens: int, window: Window, *, fits_batch: bool) -> bool:
        """Whether a request with `num_tokens` may be sent; the first one of a tenant always may."""
        own = self._by_tenant[tenant]
        if not own or own + num_tokens <= window.num_tokens:
            return True
        return fits_batch and self._total + num_tokens <= window.max_tokens

    def add(self, number: int, tenant: str, num_tokens: int) -> None:
        """Request `number` was sent."""
        self._by_request[number] = tenant, num_tokens
        self._by_tenant[tenant] += num_tokens
        self._total += num_tokens

    def remove(self, number: int) -> bool:
        """The request has its first token or ended; False if it was no longer in flight."""
        if number not in self._by_request:
            return False
        tenant, num_tokens = self._by_request.pop(number)
        self._total -= num_tokens
        self._by_tenant.remove(tenant, num_tokens)
        return True


def _target_s(workers: ReadyWorkers) -> float:
    return max(TARGET_S, TARGET_STEPS * workers.step_s)
