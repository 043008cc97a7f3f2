"""The scheduler's decisions for one step, and the runner's results for each row. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec

from loraplex.api.output import PackedLogprobs, TokenLogprob
from loraplex_services.worker.types.request import Request


class PlannedRow(NamedTuple):
    """One request in a step: compute `num_tokens` positions from `start`."""

    request: Request
    start: int
    """First position to compute; equals the request's num_computed."""
    num_tokens: int
    needs_logits: bool
    """Whether the last of these positions is that of the last known token: a token is sampled."""
    slots: tuple[tuple[int, float], ...]
    """(slot, coefficient) of each adapter; empty = base row."""
    follows: int | None = None
    """Which output of the step before is its one input token, still on the device; None = its
    tokens are known. Outputs of a step count its rows that choose a token, in order."""
    drafts: tuple[int, ...] = ()
    """The tokens of the last positions, which are guesses: the step also chooses a token before
    each of them. Empty if `follows` is set."""
    proposes: bool = False
    """Whether the base's head is to propose a draft for the next step."""

    def num_right(self, chosen: Sequence[int | None]) -> int:
        """How many drafts, from the first on, equal the tokens that were chosen in their places."""
        pairs = zip(self.drafts, chosen, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    @property
    def chooses(self) -> bool:
        """True if the step chooses a token for the row."""
        return self.needs_logits and not self.request.pooling

    @property
    def is_context(self) -> bool:
        """True for rows of the context phase, which compute prompt positions or several positions.
        Generation rows compute exactly one output position."""
        return self.num_tokens > 1 or self.start < len(self.request.prompt_ids)


@dataclass(frozen=True, slots=True)
class StateSpan:
    """A part of a row whose recurrent state comes from some blocks and goes to some, maybe others.
    The parts of a row are computed in order."""

    num_tokens: int
    source: Sequence[int]
    """Blocks with the state before the span; empty = the state before the first token."""
    target: Sequence[int]


@dataclass(frozen=True)
class StepPlan:
    """The rows of one step, in batch order: contexts, then generations; inside each by first
    slot, rows of the base last."""

    step: int
    rows: tuple[PlannedRow, ...]
    states: tuple[tuple[StateSpan, ...], ...] = ()
    """State spans of each row, if the base has recurrent layers."""

    @cached_property
    def uses_cache(self) -> bool:
        """False for a step of prompts whose KV is not kept: none of its requests has blocks."""
        return not self.rows or any(row.request.block_tables for row in self.rows)

    @cached_property
    def num_contexts(self) -> int:
        """Number of rows in the context phase, which come first."""
        return sum(1 for _ in itertools.takewhile(lambda row: row.is_context, self.rows))

    @property
    def contexts(self) -> Sequence[PlannedRow]:
        """Rows in the context phase."""
        return self.rows[: self.num_contexts]

    @property
    def generations(self) -> Sequence[PlannedRow]:
        """The other rows."""
        return self.rows[self.num_contexts :]

    @cached_property
    def num_context_tokens(self) -> int:
        """Number of positions of the rows in the context phase."""
        return sum(row.num_tokens for row in self.contexts)

    @cached_property
    def num_prompt_tokens(self) -> int:
        """Number of positions of the rows in the context phase that verify no drafts."""
        return sum(row.num_tokens for row in self.contexts if not row.drafts)

    @cached_property
    def num_tokens(self) -> int:
        """Number of positions that the step computes."""
        return self.num_context_tokens + len(self.rows) - self.num_contexts

    @cached_property
    def notes_experts(self) -> bool:
        """Whether a request asks which experts compute its tokens."""
        return any(row.request.routed_from is not None for row in self.rows)

    @cached_property
    def awaits_masks(self) -> bool:
        """Whether a row's grammar has not seen the token before the one that the step chooses."""
        return any(
            row.request.constraint is not None and row.follows is not None for row in self.rows
        )

    @cached_property
    def num_distinct_adapters(self) -> int:
        """Number of distinct slots that the step reads."""
        return len({slot for row in self.rows for slot, _ in row.slots})


def batch_order(row: PlannedRow) -> tuple[bool, bool, int]:
    """Sort key of the fixed batch order."""
    first_slot = row.slots[0][0] if row.slots else 0
    return (not row.is_context, not row.slots, first_slot)


class Sampled(NamedTuple):
    """A chosen token, with logprobs when the request asked for them."""

    token_id: int | None
    """None where the request's grammar and masks leave no token."""
    logprobs: TokenLogprob | None


class SampledRow(msgspec.Struct, gc=False):
    """The results of the runner for one planned row."""

    token_id: int | None = None
    """None if the row needed no logits, or the request's grammar and masks leave no token."""
    logprobs: TokenLogprob | None = None
    prompt_logprobs: PackedLogprobs = PackedLogprobs()
    """Those of the prompt positions computed in this step, if the request asked for them."""
    pooled: tuple[float, ...] = ()
    """For a request that pools: its vector, or the sum over this step's tokens for a mean."""
    further: tuple[Sampled, ...] = ()
    """The token that was chosen after each accepted draft."""
    proposal: int | None = None
    """A draft for the token after the last of these; None = the base's head made none."""
    experts: bytes = b""
    """Of all positions that the step computed, if the request asked for them: see
    `RoutedExperts`."""
