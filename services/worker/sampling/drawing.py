"""Seeded sampling from rows of scores: torch here, C++ in `native/src/draw.cpp` and `truncate.cpp`,
Triton in `ops/sampling`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex_services.worker.sampling.masks import MINUS_INF, truncate
from loraplex_services.worker.sampling.next_token import NextToken
from loraplex_services.worker.sampling.philox import GUMBEL_MAX, GUMBEL_MIN, gumbel

MIN_TEMPERATURE = 1e-5
"""Lower temperatures choose the argmax: dividing by them would overflow."""
SEED_BITS = (1 << 64) - 1
NOISE_TOKENS = 1 << 16
"""Number of tokens whose noise is computed together, so that intermediates stay in the processor's
caches."""


class RowDraws(NamedTuple):
    """How each of n rows with a temperature is drawn."""

    temperatures: NDArray[np.float32]
    """`[n]`."""
    keys: NDArray[np.int64]
    """`[n, 3]`: see `draw`."""


def is_drawn(token: NextToken) -> bool:
    """Whether a token has a temperature."""
    return token.params.temperature >= MIN_TEMPERATURE


def draws_of(tokens: Sequence[NextToken]) -> RowDraws:
    """The draws of tokens with a temperature."""
    params = [token.request.sampling for token in tokens]
    temperatures = np.array([each.temperature for each in params], dtype=np.float32)
    keys = np.empty((len(tokens), 3), dtype=np.uint64)
    keys[:, 0] = np.array([each.seed & SEED_BITS for each in params], dtype=np.uint64)
    keys[:, 1] = [token.position for token in tokens]
    keys[:, 2] = [token.request.sample_index for token in tokens]
    return RowDraws(temperatures, keys.view(np.int64))


class DrawOperators(NamedTuple):
    """How tokens are chosen, and rows with a temperature truncated."""

    truncate: Callable[[Tensor, Tensor], None]
    """(scores, limits): see `masks.truncate`."""
    draw: Callable[[Tensor, Tensor, int], Tensor]
    """(scores, keys, first id): see `draw`."""
    argmax: Callable[[Tensor], Tensor]
    """(scores): see `first_argmax`."""


def draw(scores: Tensor, keys: Tensor, first_id: int = 0) -> Tensor:
    """The column of the argmax of scores + noise; int64 `[N]`. Ties go to the lowest.

    Noise is bounded, so a token further below the row's maximum than the bounds are apart never
    wins; skipping it changes no draw and spares most of a large vocabulary.

    Args:
        scores: float32 `[N, V]`; -inf where a token may not win.
        keys: int64 `[N, 3]`: seed, output position, sample index.
        first_id: the token of the first column.
    """
    reach = GUMBEL_MAX - GUMBEL_MIN + 0.5
    floor = scores.amax(dim=-1, keepdim=True) - reach
    rows, ids = torch.nonzero(scores >= floor, as_tuple=True)
    noisy = torch.full_like(scores, MINUS_INF)
    for begin in range(0, len(rows), NOISE_TOKENS):
        row, token = rows[begin : begin + NOISE_TOKENS], ids[begin : begin + NOISE_TOKENS]
        seeds, positions, samples = keys[row].unbind(dim=-1)
        noisy[row, token] = scores[row, token] + gumbel(seeds, token + first_id, positions, samples)
    return first_argmax(noisy)


def first_argmax(scores: Tensor) -> Tensor:
    """int64 `[N]`: the lowest id of each row's maximum. On CPUs numpy's is ten times torch's."""
    if scores.device.type == "cpu":
        return torch.from_numpy(scores.numpy().argmax(axis=-1))
    return scores.argmax(dim=-1)


TORCH_DRAWS = DrawOperators(truncate, draw, first_argmax)
