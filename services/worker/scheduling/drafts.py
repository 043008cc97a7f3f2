"""Drafts: tokens that a request may generate next, which one step verifies together.

While a step must read all weights anyway, computing several tokens of a request takes little longer
than computing one. A draft is a token that followed the request's last tokens earlier on:
in its own prompt or output, or else in outputs of its adapters. Where there is none, it is what
the base's own head proposed at the end of the step before, if the base has one. The sampler chooses
a token at each position as always, and a draft is accepted if it equals the token that was chosen.
The output is therefore the same with and without drafts.

Drafts are left out when they would not pay. In a step of n rows, one more row adds
`1 / (n + FIXED_ROWS)` to its time, and one more token adds `1 / n` to its tokens. The i-th draft
therefore pays while its probability, `rate ** i`, is above `n / (n + FIXED_ROWS)`. A head that
proposes one draft for each of n rows adds n rows, and `proposal_cost` of the fixed part. In a
mixture of experts, a row also adds the experts that only it needs (`Drafts._time`), so that drafts
pay less the fewer rows there are.

Source: Saxena, Prompt Lookup Decoding, 2023; Yang et al., Inference with Reference, 2023.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from loraplex.api.request import AdapterSet
from loraplex_services.worker.scheduling.limits import SchedulerLimits
from loraplex_services.worker.scheduling.running import in_batch_order
from loraplex_services.worker.scheduling.state_planner import StatePlanner
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import PlannedRow, SampledRow

FIXED_ROWS = 16
"""The fixed part of a step's time, in rows; measured by `benchmarks/cpu/speculation.py`."""
NUM_MATCHED = 3
"""Number of tokens that must match for the tokens after them to become drafts."""
MAX_DRAFTS = 7
"""Most drafts of one request in one step."""
MAX_STRETCH = 1.5
"""Largest factor by which drafts may lengthen a step that several tenants share."""
MAX_SEARCHED = 1 << 14
"""Number of a request's last tokens that are searched."""
FIRST_RATE = 0.5
"""Expected share of accepted drafts before any was verified."""
FIRST_HEAD_RATE = 0.8
"""The same share of the drafts of the base's head, which was trained to propose them."""
NEWEST_SHARE = 0.2
"""Weight of the newest draft in the rate of a request; in that of its adapters, a fourth of it."""
MAX_KEPT_TOKENS = 1 << 12
"""Number of the newest output tokens that are kept for one combination."""
MAX_KEPT_OUTPUTS = 1 << 10
"""Combinations of tenant, cache salt and adapters whose outputs and rate are kept."""
WIDTH = array("I").itemsize
"""Bytes of a token."""
PROBE_STEPS = 32
"""Number of steps without a draft that would pay after which one is tried."""


class Drafts:
    """Finds drafts for running requests, and learns how many are accepted."""

    def __init__(
        self, limits: SchedulerLimits, tokens_per_block: int, states: StatePlanner
    ) -> None:
        self._limits = limits
        self._tokens_per_block = tokens_per_block
        self._states = states
        self._histories: WeakKeyDictionary[Request, KnownTokens] = WeakKeyDictionary()
        self._kept: OrderedDict[tuple[str, str, AdapterSet], KeptOutputs] = OrderedDict()
        """By tenant, cache salt and adapters, least recently used first. Callers choose the salt,
        so without the tenant in the key, one tenant could learn from the speed of drafts what
        another generated."""
        self._num_drafted = 0
        self._num_accepted = 0
        self.are_on = limits.drafts

    def added(
        self, rows: list[PlannedRow], now: float, most_of_tenant: float = math.inf
    ) -> list[PlannedRow]:
        """The rows of a step, some with drafts, in batch order. Drafts only use free positions in
        the blocks that requests have and, for recurrent states, free or idle blocks.

        Args:
            most_of_tenant: tokens of one tenant beyond which its requests draft none.
        """
        if not self.are_on:
            return rows
        num_rows = sum(row.num_tokens for row in rows)
        head_least = self._least_of_head(num_rows)
        left = self._limits.max_step_tokens - num_rows
        time = self._time(num_rows)
        added_time = self._time(num_rows + 1) - time
        least = num_rows * added_time / time
        each = MAX_DRAFTS
        own = Counter(row.request.tenant for row in rows if not row.is_context)
        if len({row.request.tenant for row in rows}) > 1:
            each = min(each, int((MAX_STRETCH - 1) * time / added_time / len(rows)))
        out: list[PlannedRow] = []
        num_drafts = 0
        for row in rows:
            tenant = row.request.tenant
            most = int(min(each, left - num_drafts, self._most(row), most_of_tenant - own[tenant]))
            if self._may_propose(row) and self._history(row.request).wants_proposal(head_least):
                row = row._replace(proposes=True)
            if most > 0 and (ids := self._history(row.request).drafts(most, least)):
                ids = ids[: self._states.free_for_drafts(num_drafts + len(ids), now) - num_drafts]
                num_drafts += len(ids)
                own[tenant] += len(ids)
                row = row._replace(num_tokens=row.num_tokens + len(ids), drafts=ids)
            out.append(row)
        return in_batch_order([], out) if num_drafts else out

    def verified(self, row: PlannedRow, sampled: SampledRow, now: float) -> None:
        """Learn how many drafts of a row the sampler chose, and what the head proposes next."""
        if not (row.drafts or self._limits.proposal_cost):
            return
        num_accepted, history = len(sampled.further), self._history(row.request)
        history.verified(len(row.drafts), num_accepted)
        history.proposal = sampled.proposal
        self._states.verified(row.request, num_accepted, now)
        self._num_drafted += len(row.drafts)
        self._num_accepted += num_accepted

    def ended(self, request: Request) -> None:
        """Keep the output for other requests of the same tenant, cache salt and adapters."""
        if self.are_on and request.output_ids:
            outputs = self._kept_outputs(request).tokens
            outputs.add(request.prompt_ids[-NUM_MATCHED:] + request.output_ids)
            outputs.keep_last(MAX_KEPT_TOKENS)

    def take_counts(self) -> tuple[int, int]:
        """Numbers of verified and of accepted drafts since the last call."""
        counts = self._num_drafted, self._num_accepted
        self._num_drafted = self._num_accepted = 0
        return counts

    def _most(self, row: PlannedRow) -> int:
        """Most drafts that a row may have."""
        request = row.request
        if row.is_context or not row.chooses or not _may_draft(request):
            return 0
        num_allocated = len(request.block_tables[0]) * self._tokens_per_block
        num_wanted = request.sampling.max_tokens - len(request.output_ids) - 1
        return min(num_wanted, num_allocated - row.start - 1)

    def _may_propose(self, row: PlannedRow) -> bool:
        """Whether the request may have drafts in the step after this one."""
        request = row.request
        num_left = request.sampling.max_tokens - len(request.output_ids) - len(row.drafts)
        return bool(self._limits.proposal_cost and row.chooses and num_left > 2) and _may_draft(
            request
        )

    def _least_of_head(self, num_rows: int) -> float:
        """The share of accepted drafts from which proposals for all rows pay."""
        time, proposing = self._time(num_rows), num_rows + FIXED_ROWS * self._limits.proposal_cost
        return (self._time(2 * num_rows) - time + proposing) / time

    def _time(self, num_rows: int) -> float:
        """The time of a step, in units of what one more token takes once all weights are read. If
        tokens choose their experts independently, `1 - (1 - active) ** n` of them are read."""
        share, active = self._limits.expert_share, self._limits.active_experts
        num_read = (1 - (1 - active) ** num_rows) / active
        return FIXED_ROWS * (1 - share + share * num_read) + num_rows

    def _history(self, request: Request) -> KnownTokens:
        history = self._histories.get(request)
        if history is None:
            history = KnownTokens(request, self._kept_outputs(request))
            self._histories[request] = history
        return history

    def _kept_outputs(self, request: Request) -> KeptOutputs:
        key = request.tenant, request.cache_salt, request.adapters
        kept = self._kept.setdefault(key, KeptOutputs())
        self._kept.move_to_end(key)
        if len(self._kept) > MAX_KEPT_OUTPUTS:
            self._kept.popitem(last=False)
        return kept


def _may_draft(request: Request) -> bool:
    """Whether the sampler chooses for a request by its parameters alone, not by its output."""
    params = request.sampling
    is_neutral = params.repetition_penalty == 1.0 and not params.bad_sequences
    has_penalty = params.presence_penalty or params.frequency_penalty
    return is_neutral and not has_penalty and request.constraint is None and request.rope is None


class TokenRun:
    """Tokens in order, as bytes that can be searched."""

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self._bytes = bytearray()
        self.add(ids)

    def add(self, ids: Sequence[int]) -> None:
        """Append tokens."""
        self._bytes += array("I", ids).tobytes()

    def keep_last(self, num_tokens: int) -> None:
        """Drop all but the last tokens."""
        del self._bytes[: -num_tokens * WIDTH]

    def last(self, num_tokens: int) -> bytes:
        """The last tokens, as bytes."""
        return bytes(self._bytes[-num_tokens * WIDTH :])

    def after(self, pattern: bytes, most: int) -> array[int]:
        """Up to `most` tokens after the last occurrence of `pattern` that has tokens after it."""
        end = len(self._bytes) - WIDTH
        begin = max(0, end - MAX_SEARCHED * WIDTH)
        index = self._bytes.rfind(pattern, begin, end)
        while index > 0 and index % WIDTH:
            index = self._bytes.rfind(pattern, begin, index + len(pattern) - 1)
        if index < 0:
            return array("I")
        first = index + len(pattern)
        return array("I", bytes(self._bytes[first : first + most * WIDTH]))


@dataclass(slots=True)
class Rates:
    """Shares of recent drafts that were accepted."""

    found: float = FIRST_RATE
    """The share of drafts that followed the same tokens before."""
    proposed: float = FIRST_HEAD_RATE
    """The share of drafts that the base's head proposed."""

    def learn(self, is_right: bool, weight: float, *, was_proposed: bool) -> None:
        """Count one draft with a weight."""
        if was_proposed:
            self.proposed += weight * (is_right - self.proposed)
        else:
            self.found += weight * (is_right - self.found)


@dataclass(slots=True)
class KeptOutputs:
    """Outputs and rate of one combination of tenant, cache salt and adapters."""

    tokens: TokenRun = field(default_factory=TokenRun)
    """Ended outputs, each after the last tokens of its prompt."""
    rates: Rates = field(default_factory=Rates)


class KnownTokens:
    """The tokens of a request, in which its drafts are searched."""

    def __init__(self, request: Request, kept: KeptOutputs) -> None:
        self.kept = kept
        self.rates = replace(kept.rates)
        self.proposal: int | None = None
        """The draft that the base's head proposed at the end of the last step."""
        self._was_proposed = False
        """Whether the latest drafts came from that head."""
        self._output_ids = request.output_ids
        self._num_outputs = len(request.output_ids)
        self._tokens = TokenRun(request.tokens(0, request.num_tokens)[-MAX_SEARCHED:])
        self._num_steps_without = 0
        self._num_steps_unproposed = 0

    def drafts(self, most: int, least: float) -> tuple[int, ...]:
        """Up to `most` drafts whose probability is above `least`."""
        self._tokens.add(self._output_ids[self._num_outputs :])
        self._num_outputs = len(self._output_ids)
        num, chance = 0, self.rates.found
        while num < most and chance > least:
            num, chance = num + 1, chance * self.rates.found
        if num == 0:
            self._num_steps_without += 1
            if self._num_steps_without >= PROBE_STEPS:
                num = 1
        found = self._found(num) if num else ()
        if found:
            self._num_steps_without = 0
        self._was_proposed = not found and self.proposal is not None
        return (self.proposal,) if not found and self.proposal is not None else found

    def wants_proposal(self, least: float) -> bool:
        """Whether the probability of a draft by the base's head is above `least`, or still has to
        be measured."""
        self._num_steps_unproposed += 1
        if self.rates.proposed <= least and self._num_steps_unproposed < PROBE_STEPS:
            return False
        self._num_steps_unproposed = 0
        return True

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Learn that the sampler chose the first `num_accepted` of the latest drafts."""
        for index in range(min(num_accepted + 1, num_drafts)):
            is_right, was_proposed = index < num_accepted, self._was_proposed
            self.rates.learn(is_right, NEWEST_SHARE, was_proposed=was_proposed)
            self.kept.rates.learn(is_right, NEWEST_SHARE / 4, was_proposed=was_proposed)

    def _found(self, num: int) -> tuple[int, ...]:
        """Up to `num` tokens. A match near the end of the request is continued periodically."""
        pattern = self._tokens.last(NUM_MATCHED)
        if own := self._tokens.after(pattern, num):
            return tuple(own[i % len(own)] for i in range(num))
        return tuple(self.kept.tokens.after(pattern, num))
