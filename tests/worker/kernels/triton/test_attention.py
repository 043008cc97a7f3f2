"""Paged attention by kernels against one dense softmax over each whole sequence."""

import random

import pytest
import torch

from services.worker.attention.triton import (
    TritonAttention,
    TritonAttentionMetadata,
    choose_splits,
)
from services.worker.memory.buffer import ArenaBuffer, KvBuffer
from services.worker.memory.kv_layout import TOKENS_PER_BLOCK, plan_kv_groups
from services.worker.request import RELEASED_BLOCK
from tests.worker.attention.paged import paged_metadata

NUM_BLOCKS = 32
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def dense(q, k, v, window, softcap):
    """The whole sequence at once, float64: `[n, Hq, D]`, `[n, Hkv, D]`."""
    q, k, v = q.double(), k.double(), v.double()
    num_shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(num_shared, 1), v.repeat_interleave(num_shared, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    at = torch.arange(len(q), device=q.device)
    hidden = at[None] > at[:, None]
    if window is not None:
        hidden |= at[None] <= at[:, None] - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


class Sequence:
    """A sequence with random heads, computed piece by piece."""

    def __init__(self, num_tokens, heads, head_dim, free, dtype, device):
        self.q, self.k, self.v = (
            torch.randn(num_tokens, num, head_dim, device=device).to(dtype)
            for num in (heads[0], heads[1], heads[1])
        )
        self.computed = 0
        self.table = [free.pop() for _ in range(-(-num_tokens // TOKENS_PER_BLOCK))]
        self.outputs = []


def run_step(backend, kv, pieces, num_splits=None):
    """Compute pieces, (sequence, number of tokens), contexts first; append outputs."""
    sequences, lens = zip(*pieces, strict=True)
    starts = [sequence.computed for sequence in sequences]
    tables = [sequence.table for sequence in sequences]
    device = sequences[0].q.device
    metadata = paged_metadata(TritonAttentionMetadata, kv, lens, starts, tables, device)
    metadata.num_splits = num_splits or metadata.num_splits
    rows = [slice(s.computed, s.computed + num) for s, num in pieces]
    q, k, v = (
        torch.cat([getattr(s, name)[row] for (s, _), row in zip(pieces, rows, strict=True)])
        for name in "qkv"
    )
    out = backend.forward(q.flatten(1), k.flatten(1), v.flatten(1), metadata)
    for (sequence, num), part in zip(pieces, out.split(lens), strict=True):
        sequence.outputs.append(part.view(num, *sequence.q.shape[1:]))
        sequence.computed += num


def release_behind(sequence, window, kv):
    """Void dead blocks."""
    for i in range(max(0, sequence.computed - window + 1) // TOKENS_PER_BLOCK):
        if sequence.table[i] != RELEASED_BLOCK:
            for plane in kv.planes(0):
                plane[sequence.table[i]] = float("nan")
            sequence.table[i] = RELEASED_BLOCK


@pytest.mark.parametrize(
    "heads,head_dim,window,softcap,dtype,num_splits",
    [
        ((1, 1), 8, None, None, torch.float32, 1),
        ((4, 2), 16, None, 2.0, torch.float32, 4),
        ((6, 2), 24, 5, None, torch.float32, 2),
        ((3, 3), 8, 33, 30.0, torch.float32, 1),
        ((4, 1), 32, None, None, torch.float16, 2),
        ((8, 2), 16, 16, None, torch.bfloat16, 4),
    ],
    ids=str,
)
def test_chunks_and_decodes_in_pages_equal_dense_attention(
    heads, head_dim, window, softcap, dtype, num_splits, device
):
    rng = random.Random(f"{window}{heads}")
    torch.manual_seed(0)
    groups = plan_kv_groups([window], heads[1], head_dim, itemsize=dtype.itemsize)
    arena = ArenaBuffer(NUM_BLOCKS, groups.block_bytes, device)
    arena.data.fill_(0xFF)  # NaN wherever nothing was written
    kv = KvBuffer(arena, groups, dtype)
    backend = TritonAttention(0, heads[0], head_dim, heads[1], window=window, softcap=softcap)
    free = list(range(NUM_BLOCKS))
    rng.shuffle(free)
    sequences = [Sequence(n, heads, head_dim, free, dtype, device) for n in (1, 17, 40)]
    while active := [s for s in sequences if s.computed < len(s.q)]:
        pieces = [(s, min(rng.choice([1, 7, 20]), len(s.q) - s.computed)) for s in active]
        pieces.sort(key=lambda piece: piece[1] == 1)
        run_step(backend, kv, pieces, num_splits)
        if window is not None:
            for sequence in active:
                release_behind(sequence, window, kv)
    for sequence in sequences:
        expected = dense(sequence.q, sequence.k, sequence.v, window, softcap)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(
            torch.cat(sequence.outputs).double(), expected, rtol=tolerance, atol=tolerance
        )


def test_splits_fill_the_device_but_keep_enough_keys_each():
    assert choose_splits(num_rows=1, num_kv_heads=8, max_keys=100_000) == 16
    assert choose_splits(num_rows=1, num_kv_heads=8, max_keys=300) == 2
    assert choose_splits(num_rows=64, num_kv_heads=8, max_keys=100_000) == 1
