"""A request to the sampler for one token."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import PlannedRow


class NextToken(NamedTuple):
    """The next token of a request. It holds its own position, because the request may grow before
    the token is chosen."""

    request: Request
    position: int
    """Position of the token in the request's output."""
    follows: int | None = None
    """The index in `outputs` of the token before it; None = that token is known."""
    outputs: Tensor | None = None
    """int64 `[n]` on the device: the tokens that the step before has chosen."""

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters."""
        return self.request.sampling

    @property
    def num_known(self) -> int:
        """Number of output tokens that are known, without one that only the device knows."""
        return self.position - (self.follows is not None)


def next_tokens(row: PlannedRow, outputs: Tensor | None = None) -> list[NextToken]:
    """The tokens after each draft of `row`, and before them the one after its last known token;
    `outputs` are those of the step before."""
    end = row.start + row.num_tokens - len(row.request.prompt_ids)
    if not row.drafts:
        return [NextToken(row.request, end, row.follows, outputs)]
    return [
        NextToken(row.request, position, row.follows, outputs)
        for position in range(end - len(row.drafts), end + 1)
    ]
