"""Drafts: tokens that a request may generate next, which one step verifies together.

While a step must read all weights anyway, computing several tokens of a request takes little longer
than computing one. A draft is a token that followed the request's last tokens earlier on:
in its own prompt or output, or else in outputs of its adapters. The sampler chooses a token at each
position as always, and a draft is accepted if it equals the token that was chosen. The output is
therefore the same with and without drafts.

Drafts are left out when they would not pay. In a step of n rows, one more row adds
`1 / (n + FIXED_ROWS)` to its time, and one more token adds `1 / n` to its tokens. The i-th draft
therefore pays while its probability, `rate ** i`, is above `n / (n + FIXED_ROWS)`.

Source: Saxena, Prompt Lookup Decoding, 2023; Yang et al., Inference with Reference, 2023.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from loraplex.api.request import AdapterSet
from loraplex_services.worker.scheduling.limits import SchedulerLimits
from loraplex_services.worker.scheduling.running import in_batch_order
from loraplex_services.worker.scheduling.state_planner import StatePlanner
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import PlannedRow

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

    def added(
        self, rows: list[PlannedRow], now: float, most_of_tenant: float = math.inf
    ) -> list[PlannedRow]:
        """The rows of a step, some with drafts, in batch order. Drafts only use free positions in
        the blocks that requests have and, for recurrent states, free or idle blocks.

        Args:
            most_of_tenant: tokens of one tenant beyond which its requests draft none.
        """
        if not self._limits.drafts:
            return rows
        num_rows = sum(row.num_tokens for row in rows)
        left = self._limits.max_step_tokens - num_rows
        least = num_rows / (num_rows + FIXED_ROWS)
        each = MAX_DRAFTS
        own = Counter(row.request.tenant for row in rows if not row.is_context)
        if len({row.request.tenant for row in rows}) > 1:
            each = min(each, int((MAX_STRETCH - 1) * (num_rows + FIXED_ROWS) / len(rows)))
        out, num_drafts = [], 0
        for row in rows:
            tenant = row.request.tenant
            most = int(min(each, left - num_drafts, self._most(row), most_of_tenant - own[tenant]))
            if most > 0 and (ids := self._history(row.request).drafts(most, least)):
                ids = ids[: self._states.make_room(num_drafts + len(ids), now) - num_drafts]
                num_drafts += len(ids)
                own[tenant] += len(ids)
                row = row._replace(num_tokens=row.num_tokens + len(ids), drafts=ids)
            out.append(row)
        return in_batch_order([], out) if any(row.drafts for row in out) else rows

    def verified(self, row: PlannedRow, num_accepted: int, now: float) -> None:
        """Learn that the sampler chose the first `num_accepted` drafts of a row."""
        if not row.drafts:
            return
        self._states.verified(row.request, num_accepted, now)
        self._num_drafted += len(row.drafts)
        self._num_accepted += num_accepted
        history = self._history(row.request)
        for index in range(min(num_accepted + 1, len(row.drafts))):
            is_right = index < num_accepted
            history.rate += NEWEST_SHARE * (is_right - history.rate)
            history.kept.rate += NEWEST_SHARE / 4 * (is_right - history.kept.rate)

    def ended(self, request: Request) -> None:
        """Keep the output for other requests of the same tenant, cache salt and adapters."""
        if self._limits.drafts and request.output_ids:
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
class KeptOutputs:
    """Outputs and rate of one combination of tenant, cache salt and adapters."""

    tokens: TokenRun = field(default_factory=TokenRun)
    """Ended outputs, each after the last tokens of its prompt."""
    rate: float = FIRST_RATE
    """Share of recent drafts that were accepted."""


class KnownTokens:
    """The tokens of a request, in which its drafts are searched."""

    def __init__(self, request: Request, kept: KeptOutputs) -> None:
        self.kept = kept
        self.rate = kept.rate
        """Share of recent drafts that were accepted."""
        self._output_ids = request.output_ids
        self._num_outputs = len(request.output_ids)
        self._tokens = TokenRun(request.tokens(0, request.num_tokens)[-MAX_SEARCHED:])
        self._num_steps_without = 0

    def drafts(self, most: int, least: float) -> tuple[int, ...]:
        """Up to `most` drafts whose probability is above `least`."""
        self._tokens.add(self._output_ids[self._num_outputs :])
        self._num_outputs = len(self._output_ids)
        num, chance = 0, self.rate
        while num < most and chance > least:
            num, chance = num + 1, chance * self.rate
        if num == 0:
            self._num_steps_without += 1
            if self._num_steps_without < PROBE_STEPS:
                return ()
            num = 1
        if found := self._found(num):
            self._num_steps_without = 0
        return found

    def _found(self, num: int) -> tuple[int, ...]:
        """Up to `num` tokens. A match near the end of the request is continued periodically."""
        pattern = self._tokens.last(NUM_MATCHED)
        if own := self._tokens.after(pattern, num):
            return tuple(own[i % len(own)] for i in range(num))
        return tuple(self.kept.tokens.after(pattern, num))
