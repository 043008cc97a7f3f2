"""Limits the decoding requests of one tenant in a step, so that the steps of others stay short.

A step that decodes n tokens takes about `fixed + n * each` seconds, and every stream waits for the
whole step. While several tenants decode, the tenant with most requests may therefore lengthen a
step to at most 1.5 times what the others' requests take, and its other requests skip the step. The
tokens that its requests draft count among them. Requests of the background priority, such as lines
of batch jobs, do the same together while any others decode, also those of their own tenant. Where
one more token costs almost nothing, as in small batches on a GPU, no request skips a step.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Collection, Sequence

from loraplex.api.request import BACKGROUND_PRIORITY
from loraplex_services.worker.scheduling.running import Member
from loraplex_services.worker.types.step_plan import StepPlan

MAX_STRETCH = 1.5
"""How much longer the requests of one tenant may make a step of the others."""
NUM_RECENT = 15
"""Number of recent steps of each size that count."""


class DecodeLimit:
    """Learns what a decoded token costs from the steps that were measured."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[tuple[int, float]]] = {}
        """(number of tokens, seconds) of steps without prompts, by the bit length of the number."""
        self.most_tokens = math.inf
        """Tokens that one tenant may have, drafts included, in the step that was planned last."""

    def measure(self, plan: StepPlan, elapsed_s: float) -> None:
        """Note that the step of `plan` took `elapsed_s`."""
        if plan.rows and not plan.num_prompt_tokens:
            size = plan.num_tokens
            steps = self._steps.setdefault(size.bit_length(), deque(maxlen=NUM_RECENT))
            steps.append((size, elapsed_s))

    def skipping(
        self, decoding: Sequence[Member], step: int, num_tenants: int
    ) -> Collection[Member]:
        """Requests that do not decode in this step: of the tenant with most requests, and of those
        in the background, the ones that decoded last.

        Args:
            num_tenants: that are present, or expected back soon.
        """
        self.most_tokens = math.inf
        urgent = [m for m in decoding if m.request.priority != BACKGROUND_PRIORITY]
        if not urgent:
            return self._of_largest(decoding, step, num_tenants)
        others = [m for m in decoding if m.request.priority == BACKGROUND_PRIORITY]
        skipped = _beyond(others, max(1, self._most_rows(len(urgent))), step)
        return {*skipped, *self._of_largest(urgent, step, num_tenants)}

    def _of_largest(
        self, decoding: Sequence[Member], step: int, num_tenants: int
    ) -> Collection[Member]:
        if num_tenants < 2 or len(decoding) < 2:
            return ()
        counts = Counter(member.request.tenant for member in decoding)
        (tenant, count), (_, next_count), *_ = (*counts.most_common(2), ("", 0))
        own = [member for member in decoding if member.request.tenant == tenant]
        num_others = max(1, len(decoding) - count)
        most = max(1, next_count, self._most_rows(num_others) * own[0].request.fairness_weight)
        if len(self._steps) > 1:  # without drafts, steps of another size might never come
            self.most_tokens = most
        return _beyond(own, most, step)

    def _most_rows(self, num_others: int) -> float:
        """Number of rows that make a step of `num_others` rows at most `MAX_STRETCH` times as
        long."""
        if not self._steps:
            return math.inf
        sizes, seconds = self._typical(min(self._steps))
        most_sizes, most_seconds = self._typical(max(self._steps))
        if most_sizes > sizes:
            each_s = max(0.0, (most_seconds - seconds) / (most_sizes - sizes))
        else:  # until steps of another size were seen, all of it counts as the cost of tokens
            each_s = seconds / sizes
        fixed_s = max(0.0, seconds - sizes * each_s)
        return (MAX_STRETCH - 1) * (fixed_s / each_s + num_others) if each_s else math.inf

    def _typical(self, bits: int) -> tuple[float, float]:
        """The median number of rows and the median seconds of the recent steps of this size."""
        sizes, seconds = zip(*self._steps[bits], strict=True)
        return statistics.median(sizes), statistics.median(seconds)


def _beyond(members: list[Member], most: float, step: int) -> Collection[Member]:
    """The members that skip a step in which at most `most` decode: those that decoded last."""
    if len(members) <= most:
        return ()
    members.sort(key=lambda member: member.last_decode_step)
    for member in members[: int(most)]:
        member.last_decode_step = step
    return set(members[int(most) :])
