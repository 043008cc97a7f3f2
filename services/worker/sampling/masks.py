"""What changes or removes logits before a token is chosen.

Everything here is a function of the request alone: penalties look at the output tokens, never at
the prompt, so a request that was preempted or moved continues as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.worker.request import SamplingParams
from services.worker.sampling.fixed_exp import MASS_BITS, masses
from services.worker.sampling.turn import Turn
from services.worker.transfers import to_device

MINUS_INF = float("-inf")


def edit_logits(logits: Tensor, turns: Sequence[Turn], eos_ids: Sequence[int]) -> None:
    """Apply grammar, bias, penalties and token masks, in this order, row by row where asked.

    Args:
        logits: `[N, V]` float32. Mutated.
    """
    for row, turn in zip(logits, turns, strict=True):
        params = turn.params
        if turn.request.constraint is not None:
            _constrain(row, turn.request.constraint.bitmask())
        if params.logit_bias:
            _add_bias(row, params.logit_bias)
        if turn.position and _has_penalties(params):
            _penalise(row, params, turn.output_ids(row.device))
        _mask_tokens(row, turn, eos_ids)


def _constrain(row: Tensor, bitmask: bytes) -> None:
    """Forbid every token whose bit is not set, and those that the mask does not reach."""
    words = torch.frombuffer(bytearray(bitmask), dtype=torch.uint8)
    bits = (words[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    allowed = to_device(bits.flatten()[: row.shape[0]].bool(), row.device)
    row[: allowed.shape[0]].masked_fill_(~allowed, MINUS_INF)
    row[allowed.shape[0] :] = MINUS_INF


def _add_bias(row: Tensor, bias: Sequence[tuple[int, float]]) -> None:
    ids = to_device(torch.tensor([token_id for token_id, _ in bias]), row.device)
    values = torch.tensor([value for _, value in bias], dtype=row.dtype)
    row.index_add_(0, ids, to_device(values, row.device))


def _has_penalties(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def _penalise(row: Tensor, params: SamplingParams, output_ids: Tensor) -> None:
    """Repetition scales a seen token's logit towards less likely; the others subtract."""
    seen = row[output_ids]
    counts = torch.zeros_like(row).index_add_(0, output_ids, torch.ones_like(seen))[output_ids]
    factor = params.repetition_penalty
    seen = torch.where(seen > 0, seen / factor, seen * factor)
    row[output_ids] = seen - params.frequency_penalty * counts - params.presence_penalty


def _mask_tokens(row: Tensor, turn: Turn, eos_ids: Sequence[int]) -> None:
    params = turn.params
    if params.allowed_token_ids:
        allowed = _ids(params.allowed_token_ids, row)
        kept = row[allowed]
        row.fill_(MINUS_INF)
        row[allowed] = kept
    masked = list(params.bad_token_ids)
    if turn.position < params.min_tokens:
        masked += [*params.stop_token_ids, *turn.request.eos_ids(eos_ids)]
    if masked:
        row.index_fill_(0, _ids(masked, row), MINUS_INF)


def _ids(token_ids: Sequence[int], row: Tensor) -> Tensor:
    return to_device(torch.tensor(token_ids), row.device)


def limits_of(params: Sequence[SamplingParams], num_tokens: int) -> Tensor | None:
    """float32 `[n, 3]` for `truncate`: top_k (`num_tokens` = all), top_p (1 = all) and min_p
    (0 = all) of each row; None where no row has a limit."""
    limits = [
        (p.top_k if 0 < p.top_k < num_tokens else num_tokens, p.top_p, p.min_p) for p in params
    ]
    if all(limit == (num_tokens, 1.0, 0.0) for limit in limits):
        return None
    return torch.tensor(limits, dtype=torch.float32)


def truncate(scaled: Tensor, limits: Tensor) -> None:
    """Apply top_k, then top_p, then min_p to logits already divided by the temperature.

    Tokens are ordered by (logit descending, id ascending). top_k keeps the first k. top_p keeps
    the shortest prefix whose probability, among what top_k kept, reaches p. min_p keeps tokens at
    least min_p times as likely as the first. The first token always stays. Probabilities are the
    integer masses of `fixed_exp`, whose sums are the same in any order.

    This is the reference, which sorts whole rows and waits for the device.

    Args:
        scaled: `[N, V]` float32. Mutated: removed tokens become -inf.
        limits: `[N, 3]`, see `limits_of`.
    """
    unlimited = limits.new_tensor([scaled.shape[-1], 1.0, 0.0])
    rows = (limits != unlimited).any(dim=-1).nonzero()[:, 0]
    ordered, ids = scaled[rows].sort(dim=-1, descending=True, stable=True)
    top_k, top_p, min_p = limits[rows].double().split(1, dim=-1)
    ordered.masked_fill_(torch.arange(scaled.shape[-1], device=scaled.device) >= top_k, MINUS_INF)
    mass = masses(ordered[:, :1] - ordered)
    before = mass.cumsum(dim=-1) - mass
    drop = (before >= top_p * mass.sum(dim=-1, keepdim=True)) & (top_p < 1.0)
    drop |= mass < min_p * (1 << MASS_BITS)
    drop[:, 0] = False
    ordered.masked_fill_(drop, MINUS_INF)
    scaled[rows] = torch.empty_like(ordered).scatter_(-1, ids, ordered)
