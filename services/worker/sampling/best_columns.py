"""The best token of a row whose scores are divided among ranks by columns.

Each rank finds the best of its own columns, and the best of those is the row's. Scores, noise and
the order among equals are those of whole rows, so the token is the same.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex_services.worker.sampling.drawing import DrawOperators, RowDraws, first_argmax
from loraplex_services.worker.sampling.masks import MINUS_INF
from loraplex_services.worker.sampling.philox import gumbel
from loraplex_services.worker.transfers import Upload

PAIR = 2
"""int32 words of a score and a token."""


class BestRows(NamedTuple):
    """How the tokens of some rows are chosen."""

    drawn: NDArray[np.int64]
    """Which rows have a temperature, ascending; the others take the best logit."""
    draws: RowDraws
    """The draws of those rows."""


def best_columns(logits: Tensor, first_id: int, rows: BestRows, operators: DrawOperators) -> Tensor:
    """The best of some columns.

    Args:
        logits: float32 `[n, columns]`.
        first_id: the token of the first column.

    Returns: int32 `[n, 2]`: bits of the float32 score with its noise, and the token.
    """
    if not logits.shape[1]:  # there are more ranks than shares of tokens
        logits = logits.new_full((len(logits), 1), MINUS_INF)
    columns = operators.argmax(logits)
    scores = logits.gather(1, columns[:, None])[:, 0]
    if len(rows.drawn):
        upload = Upload()
        for name, array in (("drawn", rows.drawn), *rows.draws._asdict().items()):
            upload.add(name, array)
        upload.send(logits.device)
        scaled = logits.index_select(0, upload["drawn"]).div_(upload["temperatures"][:, None])
        drawn = operators.draw(scaled, upload["keys"], first_id)
        seeds, positions, samples = upload["keys"].unbind(dim=-1)
        best = scaled.gather(1, drawn[:, None])[:, 0]
        best += gumbel(seeds, drawn + first_id, positions, samples)
        columns.index_copy_(0, upload["drawn"], drawn)
        scores.index_copy_(0, upload["drawn"], best)
    return torch.stack((scores.view(torch.int32), (columns + first_id).int()), dim=1)


def best_of_ranks(pairs: Tensor) -> Tensor:
    """int64 `[n]`: the tokens of the best pairs, the lowest among equals; `pairs`: int32
    `[n, ranks * 2]`, what `best_columns` has given on each rank, in the order of ranks."""
    scores, token_ids = pairs.view(len(pairs), -1, PAIR).unbind(dim=-1)
    winners = first_argmax(scores.contiguous().view(torch.float32))
    return token_ids.gather(1, winners[:, None])[:, 0].long()
