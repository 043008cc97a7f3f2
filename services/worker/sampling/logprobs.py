"""Logprobs of chosen or known tokens, and of the most likely ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from loraplex.api.output import Candidate, PackedLogprobs, TokenLogprob
from loraplex_services.worker.sampling.masks import MINUS_INF
from loraplex_services.worker.transfers import to_device, to_host


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Logprobs of `[N]` tokens, which are on the host when the step is done."""

    token_ids: Tensor
    """int64 `[N]`."""
    values: Tensor
    """float32 `[N]`."""
    top_ids: Tensor
    """int64 `[N, n]`, best first."""
    top_values: Tensor
    """float32 `[N, n]`."""
    tops: Sequence[int]
    """Number of top tokens that each row requests."""
    listed: ListedTokens | None = None
    """Tokens that rows request in place of the top ones."""
    ranks: Tensor | None = None
    """float32 `[N]`: see `TokenLogprob`; None = not known."""

    def read(self) -> list[TokenLogprob]:
        """Plain values."""
        columns = (self.token_ids, self.values, self.top_ids, self.top_values)
        rows = zip(*(column.tolist() for column in columns), self.tops, strict=True)
        entries = [
            TokenLogprob(token_id, value, tuple(map(Candidate, top_ids[:n], top_values[:n])))
            for token_id, value, top_ids, top_values, n in rows
        ]
        return entries if self.listed is None else self.listed.put_into(entries)

    def packed(self) -> PackedLogprobs:
        """The same of rows that all request as many top tokens and know their ranks, without an
        object for each."""
        assert self.ranks is not None and self.listed is None
        ids = torch.cat((self.token_ids[:, None], self.top_ids), dim=1)
        values = torch.cat((self.values[:, None], self.top_values), dim=1)
        return PackedLogprobs(
            self.top_ids.shape[1],
            ids.int().numpy().tobytes(),
            values.numpy().tobytes(),
            self.ranks.int().numpy().tobytes(),
        )


@dataclass(frozen=True, slots=True)
class ListedTokens:
    """Logprobs of the tokens that some of `[N]` rows request."""

    ids: Sequence[Sequence[int]]
    """Listed ids by row; empty if a row requests the most likely tokens."""
    values: Tensor
    """float32 `[N, n]`, in the order of `ids` and padded."""

    def put_into(self, entries: Sequence[TokenLogprob]) -> list[TokenLogprob]:
        """The entries. Rows that list tokens have these as their alternatives."""
        rows = zip(entries, self.ids, self.values.tolist(), strict=True)
        return [
            replace(entry, top=tuple(map(Candidate, ids, values))) if ids else entry
            for entry, ids, values in rows
        ]


def padded_ids(ids: Sequence[Sequence[int]]) -> np.ndarray:
    """int64 `[N, n]`: the ids of each row, padded with 0."""
    padded = np.zeros((len(ids), max(map(len, ids))), dtype=np.int64)
    for row, listed in zip(padded, ids, strict=True):
        row[: len(listed)] = listed
    return padded


def logprobs_of(logprobs: Tensor, padded: Tensor) -> Tensor:
    """Pick from log-softmax rows `[N, V]`; float32 `[N, n]`, on the host once the step is done.

    Args:
        padded: int64 `[N, n]`, on the device of `logprobs`. An id of a vocabulary wider than V has
            no probability.
    """
    values = logprobs.gather(1, padded.clamp(max=logprobs.shape[1] - 1))
    return to_host(values.masked_fill_(padded >= logprobs.shape[1], MINUS_INF))


def _most_likely(logprobs: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The largest values of each row and their ids, `[N, n]`; lower ids first among equal values,
    as tokens are chosen. The host does not wait for the device."""
    if num_tokens == 0:
        return logprobs.topk(0, dim=-1)
    values, ids = logprobs.topk(min(num_tokens + 1, logprobs.shape[-1]), dim=-1)
    ids, by_id = ids.sort(dim=-1)
    values, by_value = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, by_value)[:, :num_tokens]
    values, others = values[:, :num_tokens], values[:, num_tokens:]
    least = values[:, -1:]
    if not logprobs.is_cuda and bool((others < least).all()):
        return values, ids
    # More tokens than were found may have the least value.
    differs = (logprobs < least).logical_or_(logprobs > least)
    numbers = torch.arange(logprobs.shape[1], dtype=torch.float32, device=logprobs.device)
    lowest = (-numbers).masked_fill(differs, MINUS_INF).topk(num_tokens, dim=-1).values
    index = torch.arange(num_tokens, device=ids.device) - (values > least).sum(-1, keepdim=True)
    return values, torch.where(index < 0, ids, lowest.gather(1, index.clamp(min=0)).neg().long())


def ranks_of(logprobs: Tensor, token_ids: Tensor) -> Tensor:
    """How many tokens are at least as likely as each row's token; float32 `[N]`, on the host once
    the step is done. Works in place, because comparing into booleans and counting these takes
    longer.

    Args:
        logprobs: float32 `[N, V]`. Mutated.
        token_ids: int64 `[N]`, on either side.
    """
    own = logprobs.gather(-1, to_device(token_ids, logprobs.device)[:, None])
    return to_host(logprobs.ge_(own).sum(-1, dtype=torch.float32))


def logprob_rows(logprobs: Tensor, token_ids: Tensor, tops: Sequence[int]) -> LogprobRows:
    """Pick each row's token and its `tops[i]` most likely tokens from log-softmax rows `[N, V]`.

    Args:
        token_ids: int64 `[N]`, on either side.
    """
    token_ids = token_ids if token_ids.is_cuda else to_device(token_ids, logprobs.device)
    chosen = logprobs.gather(-1, token_ids[:, None])[:, 0]
    values, ids = _most_likely(logprobs, min(max(tops), logprobs.shape[-1]))
    return LogprobRows(to_host(token_ids), to_host(chosen), to_host(ids), to_host(values), tops)
