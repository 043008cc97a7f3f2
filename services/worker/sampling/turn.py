"""What the sampler is told of one request when it is the request's turn to get a token."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from services.worker.types.request import Request, SamplingParams
from services.worker.types.step_plan import PlannedRow


class Turn(NamedTuple):
    """One token to be chosen. Says which by itself: the request may grow before it is chosen."""

    request: Request
    position: int
    """Of the token in the request's output."""
    follows: int | None = None
    """Which of `outputs` is the token before it; None = that one is known."""
    outputs: Tensor | None = None
    """int64 `[n]` on the device: what the step before chose."""

    @property
    def params(self) -> SamplingParams:
        """How to choose."""
        return self.request.sampling

    @property
    def num_known(self) -> int:
        """Tokens of the output so far, without one that only the device knows."""
        return self.position - (self.follows is not None)


def next_turn(row: PlannedRow, outputs: Tensor | None = None) -> Turn:
    """The turn that follows the last position of `row`; `outputs` = of the step before."""
    position = row.start + row.num_tokens - len(row.request.prompt_ids)
    return Turn(row.request, position, row.follows, outputs)
