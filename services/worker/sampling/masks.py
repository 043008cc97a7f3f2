"""Masks unlikely tokens before one is drawn: top_k, top_p and min_p."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.sampling.fixed_exp import MASS_BITS, masses

MINUS_INF = float("-inf")


def limits_of(params: Sequence[SamplingParams], num_tokens: int) -> np.ndarray | None:
    """float32 `[n, 3]` for `truncate`: top_k (`num_tokens` = all), top_p (1 = all) and min_p
    (0 = all) of each row; None if no row has a limit."""
    limits = np.empty((len(params), 3), dtype=np.float32)
    limits[:, 0] = [p.top_k if 0 < p.top_k < num_tokens else num_tokens for p in params]
    limits[:, 1] = [p.top_p for p in params]
    limits[:, 2] = [p.min_p for p in params]
    return None if (limits == (num_tokens, 1.0, 0.0)).all() else limits


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
