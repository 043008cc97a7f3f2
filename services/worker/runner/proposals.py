"""Runs the draft head after the tokens of a step are chosen."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.model.decoder import Decoder
from loraplex_services.worker.types.step_plan import PlannedRow


def propose(
    rows: Sequence[PlannedRow],
    chosen: Sequence[int],
    hidden: Tensor,
    batch: ForwardBatch,
    model: Decoder,
) -> dict[int, int]:
    """The proposals of the draft head, by index of the planned row, for rows that need one.

    The head computes every position, so that its keys and values are complete. Where a draft is
    rejected, what it computed for later positions is overwritten by the next step.

    Args:
        chosen: the tokens that the step chose, in the order of rows that choose.
        hidden: of the base, `[T, H]`.
        batch: that of the base's forward pass.
    """
    next_ids: list[int] = []
    last_rows: dict[int, int] = {}
    for index, row in enumerate(rows):
        num_chosen = 1 + len(row.drafts) if row.chooses else 0
        own, chosen = list(chosen[:num_chosen]), chosen[num_chosen:]
        if row.proposes:
            last_rows[index] = len(next_ids) + row.num_tokens - num_chosen + row.num_right(own)
        begin = row.start + 1
        known = row.request.tokens(begin, begin + row.num_tokens - num_chosen)
        ids = known + own
        next_ids += ids + [0] * (row.num_tokens - len(ids))  # what a pooled prompt would go on with
    states = model.draft_hidden(hidden, torch.tensor(next_ids), batch)
    if not last_rows:
        return {}
    proposals = model.proposals(states[list(last_rows.values())])
    return dict(zip(last_rows, proposals.tolist(), strict=True))
