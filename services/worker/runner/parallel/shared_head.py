"""Chooses tokens from logits whose columns are divided among ranks.

A token that follows from the best score of its row costs a score and an id of each rank. The logits
of other rows are gathered on rank 0: of requests that truncate, edit or ask for them, and of
adapters with a head of their own, which only rank 0 has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loraplex_services.worker.layers.ranks import Ranks
from loraplex_services.worker.model.decoder import Decoder
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.runner.parallel.messages import BestTokens, LogitRows
from loraplex_services.worker.sampling.best_columns import (
    PAIR,
    BestRows,
    best_columns,
    best_of_ranks,
)
from loraplex_services.worker.sampling.drawing import DrawOperators, draws_of, is_drawn
from loraplex_services.worker.sampling.next_token import NextToken
from loraplex_services.worker.sampling.sampler import (
    MAX_LOGIT_ROWS,
    Choices,
    ChosenChunk,
    LogitsOf,
    needs_best_only,
    sample,
)
from loraplex_services.worker.transfers import to_device, to_host


@dataclass(frozen=True, slots=True, eq=False)
class SharedHead:
    """The head of a base whose tokens are divided among ranks."""

    model: Decoder
    ranks: Ranks
    draws: DrawOperators

    def best(self, hidden: Tensor, rows: BestRows) -> Tensor:
        """int64 `[n]` on rank 0: the best token after each hidden row `[n, H]`. All ranks call this
        with the same rows."""
        first_id, _ = self.ranks.shard.vocabulary(self.model.config.vocab_size)
        pairs = best_columns(self.model.own_logits(hidden), first_id, rows, self.draws)
        return best_of_ranks(self.ranks.gather(pairs, PAIR * self.ranks.shard.size))


@dataclass(frozen=True, slots=True, eq=False)
class LeadingHead:
    """Rank 0's end, which tells the other ranks what to compute."""

    head: SharedHead
    send: Callable[[LogitRows | BestTokens], None]

    def announce(self, token_rows: Tensor) -> None:
        """Have the other ranks compute their part of the logits that come next."""
        self.send(LogitRows(token_rows.numpy().tobytes()))

    def choose(
        self,
        token_rows: Tensor,
        tokens: Sequence[NextToken],
        hidden: Tensor,
        lora: LoraBatch,
        logits_of: LogitsOf,
        eos_ids: Sequence[int],
    ) -> Choices:
        """See `sampler.sample`.

        Args:
            hidden: of all token rows, `[T, H]`.
            lora: their adapters.
            logits_of: gathers logits, which `announce` goes before.
        """
        model, draws = self.head.model, self.head.draws
        with_heads = model.rows_with_heads(lora)
        best: list[int] = []
        gathered: list[int] = []
        for i, (row, token) in enumerate(zip(token_rows.tolist(), tokens, strict=True)):
            has_head = any(begin <= row < end for begin, end in with_heads)
            is_best = needs_best_only(token, model.config.vocab_size) and not has_head
            (best if is_best else gathered).append(i)
        if not best:
            return sample(token_rows, tokens, logits_of, eos_ids, draws)
        parts: list[Tensor] = []
        chunks: list[ChosenChunk] = []
        if gathered:
            chosen = [tokens[i] for i in gathered]
            choices = sample(token_rows[gathered], chosen, logits_of, eos_ids, draws)
            parts.append(choices.token_ids)
            chunks += choices.chunks
        for begin in range(0, len(best), MAX_LOGIT_ROWS):
            part = best[begin : begin + MAX_LOGIT_ROWS]
            token_ids = self._best(token_rows[part], [tokens[i] for i in part], hidden)
            parts.append(token_ids)
            chunks.append(ChosenChunk(to_host(token_ids), (), None, (), None))
        order = np.argsort(gathered + best)
        token_ids = torch.cat(parts)
        token_ids = token_ids.index_select(0, to_device(torch.from_numpy(order), hidden.device))
        return Choices(token_ids, chunks, order.tolist())

    def _best(self, token_rows: Tensor, tokens: Sequence[NextToken], hidden: Tensor) -> Tensor:
        drawn = [i for i, token in enumerate(tokens) if is_drawn(token)]
        rows = BestRows(np.array(drawn, dtype=np.int64), draws_of([tokens[i] for i in drawn]))
        draws = rows.draws.temperatures.tobytes(), rows.draws.keys.tobytes()
        self.send(BestTokens(token_rows.numpy().tobytes(), rows.drawn.tobytes(), *draws))
        return self.head.best(hidden.index_select(0, to_device(token_rows, hidden.device)), rows)
