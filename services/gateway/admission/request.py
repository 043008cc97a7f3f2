"""A request as admission sees it."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass, field

from loraplex.api.request import BACKGROUND_PRIORITY

MIN_IN_FLIGHT_TOKENS = 128
"""A shorter prompt counts as this many tokens, because it also takes a slot of the batch."""


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """The facts by which a request is admitted; made by `PreparedRequest` and the simulator.

    Its cost is its number of choices, each of which is a sequence.
    """

    tenant: str
    cost: int = 1
    priority: int = 0
    """Order among the requests of its tenant; lower numbers run first."""
    deadline_s: float = float("inf")
    """Seconds on the caller's clock."""
    num_prompt_tokens: int = 1
    run_s: float = 0.0
    """Estimated duration once started, in seconds; 0 = unknown."""
    weight: float = 1.0
    """A tenant with weight 2 gets twice the service of one with weight 1."""
    first_token_due_s: float | None = None
    """Deadline of its first token, on the same clock; None = only `deadline_s` counts."""
    adapters: Hashable = ()
    """A key that is equal for requests for the same adapters."""
    awaits_fetch: bool = False
    """True if no worker has all its adapters yet."""
    number: int = field(default_factory=itertools.count().__next__)

    @property
    def start_by_s(self) -> float:
        """The latest start that meets both deadlines."""
        finish_s = self.deadline_s - self.run_s
        due_s = self.first_token_due_s
        return finish_s if due_s is None else min(due_s, finish_s)

    @property
    def is_background(self) -> bool:
        """True if it gives way to the requests of all tenants."""
        return self.priority == BACKGROUND_PRIORITY

    @property
    def in_flight_tokens(self) -> int:
        """Tokens that it counts as in flight until its first token."""
        return max(self.num_prompt_tokens, MIN_IN_FLIGHT_TOKENS)
