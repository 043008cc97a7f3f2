"""Logprobs of chosen or known tokens, and of the most likely ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from loraplex.api.output import Candidate, TokenLogprob
from loraplex_services.worker.transfers import to_device, to_host


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Of `[N]` tokens, on the host once the step is done."""

    token_ids: Tensor
    """int64 `[N]`."""
    values: Tensor
    """float32 `[N]`."""
    top_ids: Tensor
    """int64 `[N, n]`, best first."""
    top_values: Tensor
    """float32 `[N, n]`."""
    tops: Sequence[int]
    """How many of the top ones each row wants."""

    def read(self) -> list[TokenLogprob]:
        """Plain values."""
        columns = (self.token_ids, self.values, self.top_ids, self.top_values)
        rows = zip(*(column.tolist() for column in columns), self.tops, strict=True)
        return [
            TokenLogprob(token_id, value, tuple(map(Candidate, top_ids[:num], top_values[:num])))
            for token_id, value, top_ids, top_values, num in rows
        ]


def logprob_rows(logprobs: Tensor, token_ids: Tensor, tops: Sequence[int]) -> LogprobRows:
    """Pick each row's token and its `tops[i]` most likely tokens from log-softmax rows `[N, V]`.

    Args:
        token_ids: int64 `[N]`, on either side.
    """
    token_ids = token_ids if token_ids.is_cuda else to_device(token_ids, logprobs.device)
    chosen = logprobs.gather(-1, token_ids[:, None])[:, 0]
    values, ids = logprobs.topk(min(max(tops), logprobs.shape[-1]), dim=-1)
    return LogprobRows(to_host(token_ids), to_host(chosen), to_host(ids), to_host(values), tops)
