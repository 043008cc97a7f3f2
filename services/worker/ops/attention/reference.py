"""Reference in float64: one dense softmax for each head over a complete sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from loraplex_services.worker.ops.attention.shapes import HeadShape


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shape: HeadShape,
    *,
    causal: bool = True,
    sinks: Tensor | None = None,
) -> Tensor:
    """o[i, h] = sum over visible j of softmax_j(cap(scale * q[i, h] . k[j, g])) v[j, g], where g is
    the KV head of h, and cap(s) = softcap * tanh(s / softcap).

    Args:
        q: `[n, Hq, D]`, the last n positions of a sequence.
        k, v: `[N, Hkv, D]`, all its positions.
        causal: a query sees keys up to its own position, and of those its window.
        sinks: `[Hq]`: one more score of each head, which takes a share and has no value.

    Returns:
        float64 `[n, Hq, D]`.
    """
    q, k, v = q.double(), k.double(), v.double()
    key = torch.arange(len(k), device=q.device)
    position = key[len(k) - len(q) :, None]
    is_visible = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
    if causal:
        is_visible &= key <= position
        if shape.window is not None:
            sliding = position - shape.window + 1
            chunk = position // shape.window * shape.window
            is_visible &= key >= (chunk if shape.is_chunked else sliding)
    out = torch.zeros_like(q)
    for head in range(shape.num_heads):
        group = head // shape.num_shared
        scores = shape.scale * (q[:, head] @ k[:, group].T)
        if shape.softcap is not None:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        scores = scores.masked_fill(~is_visible, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[head].double().expand(len(q), 1)), dim=-1)
        out[:, head] = scores.softmax(dim=-1)[:, : len(k)] @ v[:, group]
    return out
