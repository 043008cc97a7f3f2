"""A request to the sampler for one token."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from torch import Tensor

from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import PlannedRow


class NextToken(msgspec.Struct, frozen=True, gc=False):
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


def next_tokens(rows: Sequence[PlannedRow], outputs: Tensor) -> list[NextToken]:
    """The tokens that `rows` choose: of each, the one after its last known token, and those after
    its drafts. `outputs` are those of the step before."""
    tokens: list[NextToken] = []
    for request, start, num_tokens, needs_logits, _, follows, drafts, _ in rows:
        if not needs_logits or request.pooling:
            continue
        end = start + num_tokens - len(request.prompt_ids)
        if drafts:
            before = range(end - len(drafts), end)
            tokens += [NextToken(request, each, follows, outputs) for each in before]
        tokens.append(NextToken(request, end, follows, outputs))
    return tokens
