"""The near-tie rule: when two correct float32 implementations may disagree about a token.

Judged teacher-forced along the tokens that we produced: at each position our token equals the
reference's argmax, or the float64 gap between the two is below 1e-5 x max(1, std of the logits).
Ties are counted over everything that a test process judges; more than 0.1% of its positions fail.
Where a tie falls depends on the processor's arithmetic, so a single test is too small a sample.

Sensitive positions are counted in the same way: their logprobs differ from the reference's by more
than 1e-4, but by at most 1e-4 more than the reference moves when its weights change by what float32
rounds, and those of routers by 1e-5. Random weights have such positions behind gated norms of
values that nearly vanish, and where two experts are a near tie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

MAX_GAP = 1e-5
MAX_TIE_SHARE = 1e-3


@dataclass(slots=True)
class Verdict:
    """Counts over many sequences."""

    num_positions: int = 0
    num_ties: int = 0
    num_sensitive: int = 0

    def judge(
        self,
        num_prompt: int,
        ours: list[int],
        logits32: Tensor,
        logits64: Callable[[], Tensor],
        name: str,
    ) -> None:
        """Check one sequence.

        Args:
            ours: our output tokens, at least one.
            logits32: `[prompt + output, V]`, the reference's, of prompt and our tokens.
            logits64: computes the same in float64; called only when tokens differ.
        """
        rows = slice(num_prompt - 1, num_prompt - 1 + len(ours))
        theirs = logits32[rows].argmax(dim=-1).tolist()
        self.num_positions += len(ours)
        for place, (our_id, their_id) in enumerate(zip(ours, theirs, strict=True)):
            if our_id == their_id:
                continue
            row = logits64()[rows][place]
            gap = (row[their_id] - row[our_id]).abs().item()
            limit = MAX_GAP * max(1.0, row.std().item())
            assert gap < limit, f"{name}: position {place}: {our_id} != {their_id}, gap {gap:.2e}"
            self.num_ties += 1

    def add(self, other: Verdict) -> None:
        """Count another verdict in."""
        self.num_positions += other.num_positions
        self.num_ties += other.num_ties
        self.num_sensitive += other.num_sensitive

    def finish(self) -> None:
        """Print the counts and fail when ties or sensitive positions are too many.

        One is always allowed: fewer than 1,000 positions cannot measure a share of 0.1%.
        """
        counts = f"{self.num_ties} near ties, {self.num_sensitive} sensitive"
        print(f"{self.num_positions} positions, {counts}")
        assert self.num_positions > 0
        assert self.num_ties <= max(1.0, MAX_TIE_SHARE * self.num_positions), self
        assert self.num_sensitive <= max(1.0, MAX_TIE_SHARE * self.num_positions), self
