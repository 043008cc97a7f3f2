"""One sequence: the request, and its state while it waits and runs. No torch, no grpc."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from loraplex.api.pooling import Pooling
from loraplex.api.request import BASE_ONLY, AdapterSet, KeptPrefix
from loraplex.api.sampling import SamplingParams

RELEASED_BLOCK = -1
"""Marks a block behind the group's window that was released; never read."""


class OwnRope(NamedTuple):
    """The rotary embedding of a request's adapter."""

    key: str
    """Identifies it: KV that was computed under another cannot be used."""
    switch_len: int | None
    """Sequences of more tokens are rotated differently, from their first token on; None = none
    are."""


class Constraint(Protocol):
    """A grammar that has followed a request's output so far; a pure function of both."""

    @property
    def is_ready(self) -> bool:
        """True if `bitmask` would not wait."""
        ...

    @property
    def is_quick(self) -> bool:
        """True if masks take so little time that a step may be launched before its mask is
        known."""
        ...

    @property
    def is_finished(self) -> bool:
        """True if only the end may follow."""
        ...

    def bitmask(self) -> bytes:
        """The tokens that may come next: one bit for each, lowest bit first. Ids beyond its end may
        not."""
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
    """Deadline, on the engine's clock in seconds."""
    first_token_due_s: float | None = None
    """Deadline of the first token; None = only `deadline_s` counts."""
    arrival_s: float = 0.0
    output_ids: list[int] = field(default_factory=list)
    pooling: Pooling = Pooling.NONE
    kept: Sequence[KeptPrefix] = ()
    """Tokens from the start whose cached KV may come from other adapters."""
    constraint: Constraint | None = None
    """Set before the request is scheduled, if it has a grammar."""
    rope: OwnRope | None = None
    """Set if its adapter has a rotary embedding of its own; None = the base's."""
    is_long: bool = False
    """Whether it is longer than `switch_len`: its KV is different from the first token on."""
    own_eos_ids: tuple[int, ...] = ()
    """Token ids that end the output in place of the base's EOS ids; empty = the base's."""
    routed_from: int | None = None
    """First position whose experts have not been returned; None = the request does not ask."""
    adapters_from: int = 0
    """First position at which its adapters act; above 0 only with an activated LoRA."""
    is_held: bool = False
    """Whether it is left out of steps while the constraint does not know its next tokens yet."""

    without_cache: bool = False
    """Computed as a whole by one step that keeps no KV: it holds no blocks. While it waits, what
    the scheduler found at its last look."""
    num_computed: int = 0
    num_in_flight_tokens: int = 0
    """Number of output tokens that steps in flight choose and whose ids are not known yet."""
    in_flight_output: int = 0
    """The index of the last of these among the outputs of the step that was launched last."""
    block_tables: list[list[int]] = field(default_factory=list)
    """Blocks per KV group, in position order; RELEASED_BLOCK behind the group's window."""
    state_blocks: list[int] = field(default_factory=list)
    """Blocks of its recurrent state; empty if the base has none."""
    draft_states: list[list[int]] = field(default_factory=list)
    """Blocks of the state after each draft of the step in flight."""
    state_key: bytes = b""
    """Key of the snapshot that holds its state at num_computed; empty = the state is in its own
    blocks."""
    state_marks: tuple[int, ...] = ()
    """Numbers of tokens after which its state is kept, ascending."""
    prefix_hashes: list[bytes] = field(default_factory=list)
    """Hash chain over its full blocks, as far as anyone has asked (see `PrefixCache`)."""
    num_cached: int = 0
    """Number of tokens that it did not have to compute when it first started."""
    first_scheduled_s: float | None = None
    has_entered: bool = False
    """Whether a step that computes it was launched, or is about to be."""
    adapters_ready_s: float | None = None
    """When all its adapters were on the device for the first time, on the engine's clock."""
    first_token_s: float | None = None
    edits_logits: bool = field(init=False)
    """The property of `sampling`, which steps read for every row."""

    def __post_init__(self) -> None:
        self.edits_logits = self.sampling.edits_logits

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
        """True if no step will have to choose another token for it."""
        return len(self.output_ids) + self.num_in_flight_tokens >= self.sampling.max_tokens

    @property
    def must_wait(self) -> bool:
        """True while no step may compute it: its next mask is not known and may take long."""
        if self.constraint is None:
            return False
        return self.is_held or (self.num_in_flight_tokens > 0 and not self.constraint.is_quick)

    @property
    def max_num_tokens(self) -> int:
        """Most tokens whose KV this request can ever hold."""
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
