"""One sequence: the request, and its state while it waits and runs. No torch, no grpc."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from loraplex.api.pooling import Pooling
from loraplex.api.request import BASE_ONLY, AdapterSet, KeptPrefix
from loraplex.api.sampling import SamplingParams

RELEASED_BLOCK = -1
"""Marks a released block behind the group's window in a block table; never read."""


class OwnRope(NamedTuple):
    """The rotary embedding of a request's adapter."""

    key: str
    """Names it: KV of another cannot be used."""
    switch_len: int | None
    """Sequences of more tokens rotate otherwise, from their first token on; None = none does."""


class Constraint(Protocol):
    """A grammar that has followed a request's output so far; a pure function of both."""

    @property
    def is_ready(self) -> bool:
        """True when `bitmask` would not wait."""
        ...

    @property
    def is_quick(self) -> bool:
        """True when masks take so little that a step may be launched before its mask is known."""
        ...

    @property
    def is_finished(self) -> bool:
        """True when nothing but the end may follow."""
        ...

    def bitmask(self) -> bytes:
        """The tokens that may come next: one bit each, lowest bit first; ids beyond it may not."""
        ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """A `WorkerRequest` with its state in the engine; made by `outputs.to_request` on its arrival.

    Fresh, preempted and migrated requests differ only in `output_ids`: everything the sampler
    needs is a pure function of this object.

    Lengths, in tokens: 0 <= num_computed <= num_expected = num_tokens + num_in_flight_tokens, where
    num_tokens = len(prompt_ids) + len(output_ids). KV of positions [0, num_computed) is in the
    request's blocks, or will be when the steps that were launched are done.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    adapters: AdapterSet = BASE_ONLY
    tenant: str = "default"
    priority: int = 0
    fairness_weight: float = 1.0
    cache_salt: str = ""
    sample_index: int = 0
    deadline_s: float | None = None
    """Absolute, on the engine's clock."""
    first_token_due_s: float | None = None
    """Deadline of the first token; None = only `deadline_s` counts."""
    arrival_s: float = 0.0
    output_ids: list[int] = field(default_factory=list)
    pooling: Pooling = Pooling.NONE
    kept: Sequence[KeptPrefix] = ()
    """Tokens from the start whose KV may be what other adapters computed, while it is cached."""
    constraint: Constraint | None = None
    """Set if the request has a grammar, before it is scheduled."""
    rope: OwnRope | None = None
    """Set if its adapter has a rotary embedding; None = the base's."""
    is_long: bool = False
    """Longer than its rotary embedding switches at: its KV is another from token 0 on."""
    own_eos_ids: tuple[int, ...] = ()
    """Tokens that end the output instead of the base's EOS ids; empty = the base's do."""
    adapters_from: int = 0
    """First position at which its adapters act; above 0 with an activated LoRA only."""
    is_held: bool = False
    """Left out of steps while its next tokens are not known to the constraint yet."""

    without_cache: bool = False
    """Computed as a whole by one step that keeps no KV: it holds no blocks. While it waits, what
    the scheduler found at its last look."""
    num_computed: int = 0
    num_in_flight_tokens: int = 0
    """Output tokens that steps in flight choose, whose ids are not known yet."""
    in_flight_output: int = 0
    """The index of the last of these among the outputs of the step launched last."""
    block_tables: list[list[int]] = field(default_factory=list)
    """Blocks per KV group, in position order; RELEASED_BLOCK behind the group's window."""
    state_blocks: list[int] = field(default_factory=list)
    """Blocks of its recurrent state, if the base has one."""
    state_key: bytes = b""
    """Key of the snapshot that holds its state at num_computed; empty = in its own blocks."""
    state_marks: tuple[int, ...] = ()
    """Numbers of tokens after which its state is to be kept, ascending."""
    prefix_hashes: list[bytes] = field(default_factory=list)
    """Hash chain over its full blocks, as far as anyone has asked (see `PrefixCache`)."""
    num_cached: int = 0
    """Tokens that it did not have to compute when it first started."""
    first_scheduled_s: float | None = None
    adapters_ready_s: float | None = None
    """When all its adapters were on the device for the first time."""
    first_token_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_expected(self) -> int:
        """Known tokens and those in flight."""
        return self.num_tokens + self.num_in_flight_tokens

    @property
    def num_pending(self) -> int:
        """Expected tokens whose KV is not computed yet; 1 while decoding."""
        return self.num_expected - self.num_computed

    @property
    def is_ending(self) -> bool:
        """True when no step will have to choose another token for it."""
        return len(self.output_ids) + self.num_in_flight_tokens >= self.sampling.max_tokens

    @property
    def must_wait(self) -> bool:
        """True while no step may compute it: its next mask is not known, and may take long."""
        if self.constraint is None:
            return False
        return self.is_held or (self.num_in_flight_tokens > 0 and not self.constraint.is_quick)

    @property
    def max_num_tokens(self) -> int:
        """The most tokens whose KV this request can ever hold."""
        return len(self.prompt_ids) + self.sampling.max_tokens

    def eos_ids(self, base_eos_ids: Sequence[int]) -> Sequence[int]:
        """Tokens that end its output."""
        return self.own_eos_ids or base_eos_ids

    def take(self, token_id: int) -> None:
        """Append a token that was in flight. Mutates the output."""
        self.num_in_flight_tokens -= 1
        self.output_ids.append(token_id)

    def tokens(self, start: int, end: int) -> list[int]:
        """Known tokens of positions [start, end)."""
        num_prompt = len(self.prompt_ids)
        if start >= num_prompt:
            return self.output_ids[start - num_prompt : end - num_prompt]
        return self.prompt_ids[start:end] + self.output_ids[: max(0, end - num_prompt)]
