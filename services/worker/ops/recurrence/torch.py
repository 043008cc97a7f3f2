"""The gated delta net in torch, on any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex_services.worker.cache.state_layout import StateLayout
from loraplex_services.worker.ops.recurrence.backend import QK_EPS, DeltaWeights, StateBatch
from loraplex_services.worker.types.model_config import RecurrenceConfig

CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class RecurrenceInputs:
    """Inputs of the recurrence, float32; `...` is a batch and H the value heads."""

    q: Tensor
    """`[..., T, H, Dk]`, of length 1 / sqrt(Dk)."""
    k: Tensor
    """`[..., T, H, Dk]`, of length 1."""
    v: Tensor
    """`[..., T, H, Dv]`."""
    decay: Tensor
    """`[..., T, H]`: logarithms."""
    beta: Tensor
    """`[..., T, H]`."""


class TorchDeltaNet:
    """Implements `DeltaNet`."""

    def __init__(self, config: RecurrenceConfig, state_index: int, weights: DeltaWeights) -> None:
        """`state_index`: of the layer among those with a state."""
        self._config = config
        self._state_index = state_index
        self._weights = weights

    def forward(self, qkv: Tensor, a: Tensor, b: Tensor, states: StateBatch) -> Tensor:
        """See `DeltaNet`."""
        config = self._config
        x = qkv.float()
        decay = self._weights.rates * F.softplus(a.float() + self._weights.step_bias)
        beta = b.float().sigmoid()
        out = torch.empty(len(x), config.num_value_heads, config.value_dim, device=x.device)
        num_single = states.num_single
        num_others = len(states.words) - num_single
        for index, (begin, end) in enumerate(states.words[:num_others].tolist()):
            rows, cells = slice(begin, end), slice(index, index + 1)
            before, state = self._read(states, cells)
            inputs = torch.cat((before[0], x[rows]))
            heads = self._heads(self._convolved(inputs), decay[rows], beta[rows])
            out[rows], state[0] = chunked(heads, state[0])
            self._write(states, cells, inputs[1 - config.kernel_size :][None], state)
        if num_single:
            rows = slice(len(x) - num_single, len(x))
            cells = slice(num_others, None)
            before, state = self._read(states, cells)
            inputs = torch.cat((before, x[rows, None]), dim=1)
            mixed = F.silu((inputs * self._weights.taps.T).sum(dim=1))
            heads = self._heads(mixed, decay[rows], beta[rows])
            out[rows] = single_step(heads, state)
            self._write(states, cells, inputs[:, 1:], state)
        return out.flatten(1).to(qkv.dtype)

    def _convolved(self, inputs: Tensor) -> Tensor:
        """`[K - 1 + T, channels]` -> `[T, channels]`."""
        taps = self._weights.taps[:, None]
        return F.silu(F.conv1d(inputs.T[None], taps, groups=len(taps))[0].T)

    def _heads(self, mixed: Tensor, decay: Tensor, beta: Tensor) -> RecurrenceInputs:
        config = self._config
        sizes = (config.keys_size, config.keys_size, config.values_size)
        q, k, v = mixed.split(sizes, dim=-1)
        shared = config.num_value_heads // config.num_key_heads
        q, k = (
            _unit(x.unflatten(-1, (config.num_key_heads, config.key_dim))).repeat_interleave(
                shared, dim=-2
            )
            for x in (q, k)
        )
        v = v.unflatten(-1, (config.num_value_heads, config.value_dim))
        return RecurrenceInputs(q * config.key_dim**-0.5, k, v, decay, beta)

    def _read(self, states: StateBatch, spans: slice) -> tuple[Tensor, Tensor]:
        """Fresh inputs of the convolution `[n, K - 1, channels]` and matrices `[n, H, Dk, Dv]`."""
        config, layout = self._config, states.layout
        found = states.cells[self._cells(states.sources[spans].clamp(min=0), layout)]
        if (is_zero := states.sources[spans, 0] < 0).any():
            found[is_zero] = 0.0
        matrices, conv = found.split((layout.num_heads, layout.conv_cells), dim=1)
        before = conv.flatten(1)[:, : layout.conv_items]
        shape = config.key_dim, config.value_dim
        taps = config.kernel_size - 1, config.conv_size
        return before.unflatten(1, taps), matrices.unflatten(2, shape).contiguous()

    def _write(self, states: StateBatch, spans: slice, before: Tensor, state: Tensor) -> None:
        layout = states.layout
        num_free = layout.conv_cells * layout.cell_items - layout.conv_items
        conv = F.pad(before.flatten(1), (0, num_free))
        values = torch.cat((state.flatten(2), conv.unflatten(1, (layout.conv_cells, -1))), dim=1)
        states.cells[self._cells(states.targets[spans], layout)] = values

    def _cells(self, blocks: Tensor, layout: StateLayout) -> tuple[Tensor, Tensor]:
        """Block, and cell in the block, of the layer's cells: each `[n, cells]`."""
        first = self._state_index * layout.layer_cells
        cells = torch.arange(first, first + layout.layer_cells, device=blocks.device)
        block = blocks[:, cells // layout.block_cells]
        return block, (cells % layout.block_cells).expand_as(block)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + QK_EPS)


def single_step(heads: RecurrenceInputs, state: Tensor) -> Tensor:
    """One token of each of n sequences; `[n, H, Dv]`.

    Args:
        heads: a batch of n in place of T.
        state: `[n, H, Dk, Dv]`. Mutated.
    """
    state *= heads.decay.exp()[..., None, None]
    known = torch.matmul(heads.k[..., None, :], state)[..., 0, :]
    correction = heads.beta[..., None] * (heads.v - known)
    state += heads.k[..., :, None] * correction[..., None, :]
    return torch.matmul(heads.q[..., None, :], state)[..., 0, :]


def chunked(heads: RecurrenceInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """T tokens of one sequence, a chunk after the other: `[T, H, Dv]` and the state after them.

    Args:
        state: `[H, Dk, Dv]`.
    """
    outputs = []
    for begin in range(0, len(heads.q), CHUNK_TOKENS):
        rows = slice(begin, begin + CHUNK_TOKENS)
        q, k, v = (x[rows].transpose(0, 1) for x in (heads.q, heads.k, heads.v))
        sums = heads.decay[rows].T.cumsum(dim=1)
        beta = heads.beta[rows].T[..., None]
        later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
        left = (sums[:, :, None] - sums[:, None, :]).masked_fill(later, float("-inf")).exp()
        since_begin = sums.exp()[..., None]
        known = since_begin * (k @ state)
        system = (k @ k.mT) * left * beta
        wanted = beta * (v - known)
        correction = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        outputs.append(since_begin * (q @ state) + ((q @ k.mT) * left) @ correction)
        until_end = (sums[:, -1:] - sums).exp()[..., None]
        state = since_begin[:, -1:] * state + (until_end * k).mT @ correction
    return torch.cat(outputs, dim=1).transpose(0, 1), state
