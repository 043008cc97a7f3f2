"""What every attention backend must do: masks, caches, heads, windows and chunks, against the slow
reference. Whatever nobody wrote is NaN."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from loraplex.errors import InvalidRequest, Unsupported
from loraplex_services.worker.arena_buffer import ArenaBuffer, KvBuffer
from loraplex_services.worker.cache.kv_layout import TOKENS_PER_BLOCK, plan_kv_groups
from loraplex_services.worker.ops.attention.backend import (
    AttentionBackend,
    AttentionMaker,
    AttentionMask,
    PositionalEmbeddingParams,
    QuantConfig,
)
from loraplex_services.worker.ops.attention.kv_codes import KV_CODES, encode
from loraplex_services.worker.ops.attention.metadata import AttentionMetadata, KvCacheParams
from loraplex_services.worker.ops.attention.reference import attention
from loraplex_services.worker.ops.attention.shapes import HeadShape
from loraplex_services.worker.types.model_config import KvHeads
from tests.worker.ops.attention.paged import row_of

LENGTHS = (1, 16, 17, 37)
HEADS = ((2, 2), (4, 1), (6, 2))
"""Multi-head, multi-query and group-query."""
WINDOWS = (None, 5, 20)
CHUNKS = ((64,), (9, 1, 64), (16, 17, 1, 1, 1))
"""New tokens of each step; the last number is repeated."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """One way to compute the same sequences."""

    heads: tuple[int, int]
    window: int | None
    chunks: tuple[int, ...]
    mask: AttentionMask | None = None
    use_cache: bool = True

    def __str__(self) -> str:
        mask = "default" if self.mask is None else self.mask.value
        cache = "cache" if self.use_cache else "pass"
        chunks = "-".join(map(str, self.chunks))
        return f"{mask}-{cache}-{self.heads[0]}x{self.heads[1]}-w{self.window}-{chunks}"


def cases() -> list[Case]:
    """Every combination that has a meaning."""
    paged = itertools.product(HEADS, WINDOWS, CHUNKS, (None, AttentionMask.CAUSAL))
    full = itertools.product(HEADS, CHUNKS)
    passes = itertools.product(HEADS, WINDOWS, AttentionMask)
    return [
        *(Case(heads, window, chunks, mask) for heads, window, chunks, mask in paged),
        *(Case(heads, None, chunks, AttentionMask.FULL) for heads, chunks in full),
        *(Case(heads, window, (64,), mask, use_cache=False) for heads, window, mask in passes),
    ]


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Fill what is allocated with NaN, so that reading what nobody wrote is seen."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like"):
            make = getattr(torch, name)

            def poisoned(*args, make=make, **others):
                made = make(*args, **others)
                return made.fill_(float("nan")) if made.is_floating_point() else made

            patch.setattr(torch, name, poisoned)
        yield


class Bench:
    """A backend with a small cache of its own, all NaN."""

    def __init__(
        self,
        maker: AttentionMaker,
        heads: tuple[int, int],
        window: int | None = None,
        head_dim: int = 32,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self.maker, self.dtype, self.device = maker, dtype, torch.device(device)
        self.shape = HeadShape(*heads, head_dim, head_dim**-0.5, None, window)
        codes = KV_CODES.get(maker.kv_cache_dtype)
        sizes = (dtype.itemsize, 0) if codes is None else (1, 2)
        groups = plan_kv_groups(
            [window], [KvHeads(heads[1], head_dim)], sizes[0], scale_bytes=sizes[1]
        )
        self.arena = ArenaBuffer(16, groups.block_bytes, self.device)
        self.arena.data.fill_(0xFF)
        self.kv = KvBuffer(self.arena, groups, dtype, codes)
        self.config = SimpleNamespace(
            num_heads=heads[0],
            kv_heads=(KvHeads(heads[1], head_dim),),
            attention_scale=head_dim**-0.5,
            attention_softcap=None,
            windows=(window,),
            chunked=(),
            ropes=(None,),
        )
        self.layer: AttentionBackend = maker.layer(self.config, 0, rotated=True)

    def metadata(
        self,
        lens: Sequence[int],
        starts: Sequence[int],
        tables: Sequence[Sequence[int]],
        *,
        use_cache: bool = True,
    ) -> AttentionMetadata:
        """Prepared; contexts come first."""
        contexts = [num for num, start in zip(lens, starts, strict=True) if num > 1 or not start]
        positions = [s + i for s, num in zip(starts, lens, strict=True) for i in range(num)]
        params = KvCacheParams(use_cache=False)
        if use_cache:
            params = KvCacheParams(True, tuple(starts), (tables,))
        metadata = self.maker.metadata(
            num_contexts=len(contexts),
            num_generations=len(lens) - len(contexts),
            num_tokens=sum(lens),
            num_ctx_tokens=sum(contexts),
            seq_lens=torch.tensor(lens),
            kv_cache_params=params,
            kv_cache_manager=self.kv if use_cache else None,
            position_ids=torch.tensor(positions, device=self.device),
            max_num_requests=8,
            max_num_tokens=256,
            rows=[row_of(f"r{i}", [0] * 40) for i in range(len(lens))],
        )
        metadata.prepare()
        metadata.begin_forward()
        return metadata

    def random(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values `[num_tokens, heads, D]`."""
        q, k, v = (
            torch.randn(num_tokens, num, self.shape.head_dim).to(self.dtype).to(self.device)
            for num in (self.shape.num_heads, self.shape.num_kv_heads, self.shape.num_kv_heads)
        )
        return q, k, v


def check_case(
    maker: AttentionMaker,
    case: Case,
    dtype: torch.dtype,
    device: str = "cpu",
    head_dim: int = 32,
) -> None:
    """Every sequence, computed chunk by chunk in one batch, equals the reference."""
    torch.manual_seed(0)
    bench = Bench(maker, case.heads, case.window, head_dim, dtype, device)
    free = random.Random(str(case)).sample(range(16), 16)
    inputs = [bench.random(num) for num in LENGTHS]
    tables = [[free.pop() for _ in range(-(-num // TOKENS_PER_BLOCK))] for num in LENGTHS]
    done = [0] * len(LENGTHS)
    is_full = case.mask is AttentionMask.FULL
    for step in itertools.count():
        chunk = case.chunks[min(step, len(case.chunks) - 1)]
        active = [i for i, num in enumerate(LENGTHS) if done[i] < num]
        if not active:
            break
        news = {i: min(chunk, LENGTHS[i] - done[i]) for i in active}
        active.sort(key=lambda i: news[i] == 1 and done[i] > 0)
        lens, starts = [news[i] for i in active], [done[i] for i in active]
        metadata = bench.metadata(
            lens, starts, [tables[i] for i in active], use_cache=case.use_cache
        )
        q, k, v = (
            torch.cat([inputs[i][part][done[i] : done[i] + news[i]] for i in active]).flatten(1)
            for part in range(3)
        )
        with poisoned_outputs():
            if step % 2:
                out = bench.layer.forward(q.clone(), k, v, metadata, case.mask)
            else:  # fused
                qkv = torch.cat((q, k, v), dim=1)
                out = bench.layer.forward(qkv, None, None, metadata, case.mask)
        for i, found in zip(active, out.split(lens), strict=True):
            end = done[i] + news[i]
            q, k, v = inputs[i]
            if case.use_cache and maker.kv_cache_dtype != "auto":
                k, v = (meaning(x, maker.kv_cache_dtype) for x in (k, v))
            expected = attention(
                q[done[i] : end], k[:end], v[:end], bench.shape, causal=not is_full
            )
            tolerance = TOLERANCE[dtype]
            torch.testing.assert_close(
                found.view(expected.shape).double(), expected, rtol=tolerance, atol=tolerance
            )
            done[i] = end
    if not case.use_cache:
        assert (bench.arena.data == 0xFF).all(), "a pass without a cache wrote to it"


def check_codes(maker: AttentionMaker, dtype: torch.dtype, device: str = "cpu") -> None:
    """Codes and scales are the nearest ones: of magnitudes from the largest code to far below the
    smallest one, halfway between codes, and of nothing but zeros."""
    torch.manual_seed(0)
    bench = Bench(maker, (2, 2), None, 40, dtype, device)
    shape, num_blocks = (2, 64, 2, 40), 4
    items = torch.randint(-(2**11), 2**11, shape) * torch.exp2(torch.randint(-14, 1, shape))
    items[:, 3], items[0, 4, 0], items[1, 5, 1] = 0, 0, 0
    k, v = items.to(dtype).to(device)
    metadata = bench.metadata([64], [0], [list(range(num_blocks))])
    bench.layer.forward(k.flatten(1), k.flatten(1), v.flatten(1), metadata)
    scales = bench.kv.scales(0)
    assert scales is not None
    for plane, own_scales, new in zip(bench.kv.planes(0), scales, (k, v), strict=True):
        codes, expected = encode(new, plane.dtype, own_scales.dtype)
        found = plane[:num_blocks].transpose(1, 2).flatten(0, 1)
        assert found.view(torch.uint8).equal(codes.view(torch.uint8))
        assert own_scales[:num_blocks].transpose(1, 2).flatten(0, 1).equal(expected)


def meaning(items: torch.Tensor, kept: str) -> torch.Tensor:
    """What `[tokens, heads, D]` become in a cache of codes: the largest of each head is code 127,
    or 448."""
    largest = {"int8": 127, "fp8": 448}[kept]
    scales = (items.float().abs().amax(-1, keepdim=True) / largest).bfloat16().float()
    codes = (items.float() / scales).clamp(-largest, largest)
    if kept == "int8":
        return codes.round() * scales
    exponents = codes.abs().clamp(min=2**-6).log2().floor()
    steps = torch.exp2(exponents - 3)  # three bits after the leading one
    return (codes / steps).round() * steps * scales


def check_refusals(maker: AttentionMaker, head_dim: int = 32) -> None:
    """What a backend cannot do is refused by name."""
    bench = Bench(maker, (2, 2), 5, head_dim)
    metadata = bench.metadata([3], [0], [[0]])
    q, k, v = (part.flatten(1) for part in bench.random(3))
    with pytest.raises(Unsupported, match="attention_mask"):
        bench.layer.forward(q, k, v, metadata, AttentionMask.FULL)
    fields = maker._layer_fields
    with pytest.raises(InvalidRequest, match="kv_cache_dtype"):
        maker.backend(0, 2, head_dim, quant_config=QuantConfig("int3"), **fields)
    if not maker.backend.rotates:
        params = PositionalEmbeddingParams(bench.config.ropes[0])
        with pytest.raises(InvalidRequest, match="pos_embd_params"):
            maker.backend(0, 2, head_dim, pos_embd_params=params, **fields)


def check_profiling(
    maker: AttentionMaker,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    head_dim: int = 32,
) -> None:
    """A step for memory or warm-up leaves the cache as it is."""
    bench = Bench(maker, (4, 2), None, head_dim, dtype, device)
    bench.arena.data.zero_()
    metadata = maker.idle_metadata(bench.kv, torch.arange(9, device=device))
    metadata.begin_forward()
    q, k, v = (part.flatten(1) for part in bench.random(9))
    with poisoned_outputs():
        out = bench.layer.forward(q, k, v, metadata)
    assert out.shape == q.shape and out.isfinite().all()
    assert (bench.arena.data == 0).all()


def check_fields(maker: AttentionMaker, head_dim: int = 16, device: str = "cpu") -> None:
    """The metadata says what the page says."""
    bench = Bench(maker, (2, 1), head_dim=max(head_dim, 32), device=device)
    metadata = bench.metadata([5, 17, 1], [0, 3, 30], [[1], [2, 3], [4, 5]])
    assert (metadata.num_contexts, metadata.num_generations) == (2, 1)
    assert (metadata.num_tokens, metadata.num_ctx_tokens) == (23, 22)
    assert (metadata.max_num_requests, metadata.max_num_tokens) == (8, 256)
    assert metadata.seq_lens.tolist() == metadata.seq_lens_cuda.tolist() == [5, 17, 1]
    assert metadata.context_lens.tolist() == [5, 17]
    assert metadata.request_ids == ["r0", "r1", "r2"]
    assert metadata.prompt_lens == [40, 40, 40]
    assert metadata.position_ids is not None and metadata.position_ids[-1] == 30
    assert not metadata.is_cuda_graph and not metadata.is_dummy_attention
    layer = maker.backend(3, 4, head_dim, **maker._layer_fields)
    assert layer.shape == HeadShape(4, 4, head_dim, head_dim**-0.5, None, None)
    assert layer.layer_idx == 3
