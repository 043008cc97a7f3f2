"""What the sampler is told of one request when it is the request's turn to get a token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.request import PlannedRow, Request, SamplingParams


class Turn(NamedTuple):
    """One token to be chosen. Says which by itself: the request may grow before it is chosen."""

    request: Request
    position: int
    """Of the token in the request's output."""
    before: Tensor | None = None
    """int64 `[]`: the token before it, where only the device knows that one yet."""

    @property
    def params(self) -> SamplingParams:
        """How to choose."""
        return self.request.sampling

    def output_ids(self, device: torch.device) -> Tensor:
        """int64 `[position]`: the output so far."""
        known = self.request.output_ids[: self.position - (self.before is not None)]
        ids = torch.tensor(known, dtype=torch.int64, device=device)
        return ids if self.before is None else torch.cat((ids, self.before[None]))


def next_turn(row: PlannedRow, before: Tensor | None = None) -> Turn:
    """The turn that follows the last position of `row`."""
    request = row.request
    return Turn(request, row.start + row.num_tokens - len(request.prompt_ids), before)
