"""Seeded sampling from rows of scores: torch here, C++ in `native/src/draw.cpp` and `truncate.cpp`,
Triton in `ops/sampling`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from loraplex_services.worker.sampling.masks import MINUS_INF, truncate
from loraplex_services.worker.sampling.philox import GUMBEL_MAX, GUMBEL_MIN, gumbel

NOISE_TOKENS = 1 << 16
"""Number of tokens whose noise is computed together, so that intermediates stay in the processor's
caches."""


class DrawOperators(NamedTuple):
    """How rows with a temperature are truncated and drawn."""

    truncate: Callable[[Tensor, Tensor], None]
    """(scores, limits): see `masks.truncate`."""
    draw: Callable[[Tensor, Tensor], Tensor]
    """(scores, keys): see `draw`."""


def draw(scores: Tensor, keys: Tensor) -> Tensor:
    """The argmax of scores + noise; int64 `[N]`. Ties go to the lowest id.

    Noise is bounded, so a token further below the row's maximum than the bounds are apart never
    wins; skipping it changes no draw and spares most of a large vocabulary.

    Args:
        scores: float32 `[N, V]`; -inf where a token may not win.
        keys: int64 `[N, 3]`: seed, output position, sample index.
    """
    reach = GUMBEL_MAX - GUMBEL_MIN + 0.5
    floor = scores.amax(dim=-1, keepdim=True) - reach
    rows, ids = torch.nonzero(scores >= floor, as_tuple=True)
    noisy = torch.full_like(scores, MINUS_INF)
    for begin in range(0, len(rows), NOISE_TOKENS):
        row, token = rows[begin : begin + NOISE_TOKENS], ids[begin : begin + NOISE_TOKENS]
        seeds, positions, samples = keys[row].unbind(dim=-1)
        noisy[row, token] = scores[row, token] + gumbel(seeds, token, positions, samples)
    return first_argmax(noisy)


def first_argmax(scores: Tensor) -> Tensor:
    """int64 `[N]`: the lowest id of each row's maximum. On CPUs numpy's is ten times torch's."""
    if scores.device.type == "cpu":
        return torch.from_numpy(scores.numpy().argmax(axis=-1))
    return scores.argmax(dim=-1)


TORCH_DRAWS = DrawOperators(truncate, draw)
