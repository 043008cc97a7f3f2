"""Paged attention in torch against the reference over each whole sequence."""

import random

import pytest
import torch

from loraplex_services.worker.arena_buffer import ArenaBuffer, KvBuffer
from loraplex_services.worker.cache.kv_layout import TOKENS_PER_BLOCK, plan_kv_groups
from loraplex_services.worker.ops.attention.backend import AttentionMask
from loraplex_services.worker.ops.attention.metadata import KvCacheParams
from loraplex_services.worker.ops.attention.reference import attention
from loraplex_services.worker.ops.attention.shapes import HeadShape
from loraplex_services.worker.ops.attention.torch import VanillaAttention, VanillaAttentionMetadata
from loraplex_services.worker.types.model_config import KvHeads
from loraplex_services.worker.types.request import RELEASED_BLOCK
from tests.worker.ops.attention.paged import paged_metadata

HEAD_DIM = 8
NUM_BLOCKS = 64


def heads_of(num_heads, num_kv_heads, window=None, softcap=None, chunked=False):
    return HeadShape(num_heads, num_kv_heads, HEAD_DIM, HEAD_DIM**-0.5, softcap, window, chunked)


class Sequence:
    """A sequence with random heads, computed piece by piece."""

    def __init__(self, num_tokens, num_heads, num_kv_heads, free):
        self.q = torch.randn(num_tokens, num_heads, HEAD_DIM)
        self.k = torch.randn(num_tokens, num_kv_heads, HEAD_DIM)
        self.v = torch.randn(num_tokens, num_kv_heads, HEAD_DIM)
        self.computed = 0
        self.table = [free.pop() for _ in range(-(-num_tokens // TOKENS_PER_BLOCK))]
        self.outputs = []


def metadata_of(chunks, kv):
    """Pieces are (sequence, number of tokens), contexts first."""
    sequences, lens = zip(*chunks, strict=True)
    starts = [sequence.computed for sequence in sequences]
    tables = [sequence.table for sequence in sequences]
    return paged_metadata(VanillaAttentionMetadata, kv, lens, starts, tables)


def run_step(backend, kv, chunks):
    """Compute pieces and append each sequence's outputs."""
    metadata = metadata_of(chunks, kv)
    rows = [slice(sequence.computed, sequence.computed + num) for sequence, num in chunks]
    q, k, v = (
        torch.cat([getattr(s, name)[row] for (s, _), row in zip(chunks, rows, strict=True)])
        for name in "qkv"
    )
    out = backend.forward(q.flatten(1), k.flatten(1), v.flatten(1), metadata)
    for (sequence, num), part in zip(chunks, out.split([num for _, num in chunks]), strict=True):
        sequence.outputs.append(part.view(num, -1, HEAD_DIM))
        sequence.computed += num


def release_behind(sequence, window, kv, free):
    """Give dead blocks back, poisoned."""
    first = max(0, sequence.computed - window + 1) // TOKENS_PER_BLOCK
    for i in range(first):
        if sequence.table[i] != RELEASED_BLOCK:
            for plane in kv.planes(0):
                plane[sequence.table[i]] = float("nan")
            free.append(sequence.table[i])
            sequence.table[i] = RELEASED_BLOCK


@pytest.mark.parametrize("window", [None, 1, 5, 16, 33])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (6, 2), (3, 3)], ids=lambda h: f"H{h[0]}-{h[1]}")
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_chunks_and_decodes_in_pages_equal_dense_attention(window, heads, softcap):
    check_pages(window, heads, softcap)


@pytest.mark.parametrize("window", [None, 5, 33])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2)], ids=lambda h: f"H{h[0]}-{h[1]}")
def test_sinks_take_their_share_of_the_weights(window, heads):
    check_pages(window, heads, None, torch.linspace(3.0, -3.0, heads[0]))


@pytest.mark.parametrize("window", [1, 5, 16, 33])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2)], ids=lambda h: f"H{h[0]}-{h[1]}")
def test_windows_in_chunks_equal_dense_attention(window, heads):
    check_pages(window, heads, None, chunked=True)


def check_pages(window, heads, softcap, sinks=None, chunked=False):
    rng = random.Random(f"{window}{heads}")
    torch.manual_seed(0)
    groups = plan_kv_groups([window], [KvHeads(heads[1], HEAD_DIM)], itemsize=4)
    arena = ArenaBuffer(NUM_BLOCKS, groups.block_bytes, torch.device("cpu"))
    arena.data.fill_(0xFF)  # NaN wherever nothing was written
    kv = KvBuffer(arena, groups, torch.float32)
    shape = heads_of(heads[0], heads[1], window, softcap, chunked)
    backend = VanillaAttention.for_heads(0, shape, sinks)
    free = list(range(NUM_BLOCKS))
    rng.shuffle(free)
    sequences = [Sequence(n, heads[0], heads[1], free) for n in (1, 15, 16, 17, 40, 63)]
    while active := [s for s in sequences if s.computed < len(s.q)]:
        chosen = rng.sample(active, rng.randrange(1, len(active) + 1))
        chunks = [(s, min(rng.choice([1, 1, 7, 20]), len(s.q) - s.computed)) for s in chosen]
        run_step(backend, kv, sorted(chunks, key=lambda chunk: chunk[1] == 1))
        if window is not None:
            for sequence in chosen:
                release_behind(sequence, window, kv, free)
    for sequence in sequences:
        expected = attention(sequence.q, sequence.k, sequence.v, shape, sinks=sinks)
        torch.testing.assert_close(
            torch.cat(sequence.outputs).double(), expected, rtol=1e-5, atol=1e-5
        )


def test_long_contexts_run_in_chunks_of_queries(monkeypatch):
    torch.manual_seed(0)
    groups = plan_kv_groups([None], [KvHeads(2, HEAD_DIM)], itemsize=4)
    arena = ArenaBuffer(NUM_BLOCKS, groups.block_bytes, torch.device("cpu"))
    kv = KvBuffer(arena, groups, torch.float32)
    shape = heads_of(4, 2)
    backend = VanillaAttention.for_heads(0, shape)
    monkeypatch.setattr("loraplex_services.worker.ops.attention.torch.MAX_SCORE_ITEMS", 4 * 50 * 7)
    sequence = Sequence(50, 4, 2, list(range(NUM_BLOCKS)))
    run_step(backend, kv, [(sequence, 50)])
    expected = attention(sequence.q, sequence.k, sequence.v, shape)
    torch.testing.assert_close(sequence.outputs[0].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask", AttentionMask)
def test_without_a_cache_sequences_see_themselves_only(mask):
    torch.manual_seed(0)
    lens = [5, 1, 9]
    q, k, v = (
        torch.randn(15, 4, HEAD_DIM),
        torch.randn(15, 2, HEAD_DIM),
        torch.randn(15, 2, HEAD_DIM),
    )
    metadata = VanillaAttentionMetadata(
        num_contexts=3,
        num_generations=0,
        num_tokens=15,
        num_ctx_tokens=15,
        seq_lens=torch.tensor(lens),
        kv_cache_params=KvCacheParams(use_cache=False),
    )
    metadata.prepare()
    shape = heads_of(4, 2)
    backend = VanillaAttention.for_heads(0, shape)
    out = backend.forward(q.flatten(1), k.flatten(1), v.flatten(1), metadata, mask)
    causal = mask is AttentionMask.CAUSAL
    parts = zip(*(x.split(lens) for x in (out, q, k, v)), strict=True)
    for part, q_part, k_part, v_part in parts:
        expected = attention(q_part, k_part, v_part, shape, causal=causal).flatten(1)
        torch.testing.assert_close(part.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_profiling_run_touches_no_cache():
    metadata = VanillaAttentionMetadata(
        num_contexts=1,
        num_generations=0,
        num_tokens=3,
        num_ctx_tokens=3,
        seq_lens=torch.tensor([3]),
        kv_cache_params=KvCacheParams(use_cache=True),
        is_dummy_attention=True,
    )
    metadata.prepare()
    q = torch.randn(3, 4 * HEAD_DIM)
    out = VanillaAttention.for_heads(0, heads_of(4, 4)).forward(q, q, q, metadata)
    assert out.shape == q.shape
    assert not out.isnan().any()
