"""What the sampler is told of one request when it is the request's turn to get a token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.request import PlannedRow, Request, SamplingParams
from services.worker.transfers import to_device


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

    def output_ids(self, device: torch.device) -> Tensor:
        """int64 `[position]`: the output so far."""
        known = self.request.output_ids[: self.position - (self.follows is not None)]
        ids = to_device(torch.tensor(known, dtype=torch.int64), device)
        if self.follows is None or self.outputs is None:
            return ids
        return torch.cat((ids, self.outputs[self.follows : self.follows + 1]))


def next_turn(row: PlannedRow, outputs: Tensor | None = None) -> Turn:
    """The turn that follows the last position of `row`; `outputs` = of the step before."""
    position = row.start + row.num_tokens - len(row.request.prompt_ids)
    return Turn(row.request, position, row.follows, outputs)
