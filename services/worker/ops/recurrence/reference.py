"""Reference in float64: one token and one head at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_conv(x: Tensor, before: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
    """silu of a causal convolution of each channel.

    Args:
        x: `[T, channels]`. before: `[K - 1, channels]`, the inputs before x. taps: `[channels, K]`.

    Returns: `[T, channels]`, and the last K - 1 inputs.
    """
    num_taps = taps.shape[1]
    inputs = torch.cat((before.double(), x.double()))
    out = [(inputs[t : t + num_taps] * taps.double().T).sum(dim=0) for t in range(len(x))]
    y = torch.stack(out)
    return y * torch.sigmoid(y), inputs[len(inputs) - num_taps + 1 :]


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence of one head.

    Args:
        q, k: `[T, Dk]`, as they come from the convolution. v: `[T, Dv]`.
        decay: `[T]`, the logarithm of what is left of the state. beta: `[T]`.
        state: `[Dk, Dv]`.

    Returns: `[T, Dv]`, and the state after the last token.
    """
    q, k, v, decay, beta, state = (x.double() for x in (q, k, v, decay, beta, state))
    out = []
    for t in range(len(q)):
        query = q[t] / (q[t] @ q[t] + 1e-6).sqrt() / q.shape[1] ** 0.5
        key = k[t] / (k[t] @ k[t] + 1e-6).sqrt()
        state = decay[t].exp() * state
        correction = beta[t] * (v[t] - state.T @ key)
        state = state + torch.outer(key, correction)
        out.append(state.T @ query)
    return torch.stack(out), state
