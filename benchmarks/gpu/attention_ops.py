"""Paged attention of one layer on a GPU: generations against copy bandwidth, contexts in TFLOP/s.

    python -m benchmarks.gpu.attention_ops [--only decode|prefill]
                                           [--device cpu --tiny, with TRITON_INTERPRET=1]

Heads are those of Llama-3-8B. The layers of one cache are captured one after the other in a graph,
so that keys and values come from memory. Uneven cases have one or several long sequences next to
short ones. Some caches hold codes, as with `--kv-cache-dtype int8` and `fp8`. Before a case is
timed, its result is compared with a float32 softmax.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu import common
from benchmarks.gpu.results import Results
from loraplex_services.worker.arena_buffer import SCALE_DTYPE, ArenaBuffer, KvBuffer
from loraplex_services.worker.cache.kv_layout import TOKENS_PER_BLOCK, plan_kv_groups
from loraplex_services.worker.ops.attention import triton as kernels
from loraplex_services.worker.ops.attention import work_items
from loraplex_services.worker.ops.attention.backend import AUTO
from loraplex_services.worker.ops.attention.kv_codes import KV_CODES, NO_SCALES, Scales, encode
from loraplex_services.worker.ops.attention.kv_codes import decode as decoded
from loraplex_services.worker.ops.attention.metadata import KvCacheParams
from loraplex_services.worker.ops.attention.shapes import HeadShape
from loraplex_services.worker.ops.attention.triton_backend import TritonAttentionMetadata
from loraplex_services.worker.ops.launch import INTERPRETING
from loraplex_services.worker.types.model_config import KvHeads

HEADS = HeadShape(32, 8, 128, 128**-0.5, None, None)
TINY_HEADS = HeadShape(4, 2, 16, 0.25, None, None)
MAX_DIFFERENCE = 2e-2
NUM_LAYERS = 32
"""Layers of the cache: enough that none of it stays in the L2 cache of a device."""


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences given as (computed tokens, new tokens)."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    kept: str = AUTO
    """What keys and values are stored as."""

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one new token."""
        return all(num == 1 for _, num in self.sequences)


def decode(name: str, lens: Sequence[int], kept: str = AUTO) -> Case:
    """Generations that see `lens` keys."""
    return Case(name, tuple((num - 1, 1) for num in lens), kept)


CASES = (
    decode("64 x 1k", [1025] * 64),
    decode("64 x 1k, fp8", [1025] * 64, "fp8"),
    decode("64 x 1k, int8", [1025] * 64, "int8"),
    Case("2k, fp8", ((0, 2048),), "fp8"),
    decode("1 x 1k", [1025]),
    decode("1 x 8k", [8192]),
    decode("1 x 32k", [32768]),
    decode("8 x 1k", [1025] * 8),
    decode("63 x 1k, 1 x 32k", [1025] * 32 + [32768] + [1025] * 31),
    decode("64 x 256..8k", [256 + 128 * i for i in range(64)]),
    decode("256 x 1k", [1025] * 256),
    Case("512", ((0, 512),)),
    Case("2k", ((0, 2048),)),
    Case("8 x 512", ((0, 512),) * 8),
    Case("8k", ((0, 8192),)),
    Case("512 after 8k", ((8192, 512),)),
    Case("2k after 30k", ((30720, 2048),)),
)
TINY_CASES = (
    decode("tiny", [700, 5]),
    decode("tiny, fp8", [300, 5], "fp8"),
    Case("tiny prefill", ((40, 70), (0, 5))),
    Case("tiny prefill, int8", ((0, 20),), "int8"),
)


class Bench:
    """One step of a case over every layer of a cache with random keys and values."""

    def __init__(self, shape: HeadShape, case: Case, num_layers: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.shape, self.case, self.num_layers = shape, case, num_layers
        dtype, codes = torch.bfloat16, KV_CODES.get(case.kept)
        heads = [KvHeads(shape.num_kv_heads, shape.head_dim)] * num_layers
        itemsize, scale_bytes = (1, SCALE_DTYPE.itemsize) if codes else (dtype.itemsize, 0)
        groups = plan_kv_groups([None] * num_layers, heads, itemsize, scale_bytes=scale_bytes)
        assert len(groups.groups) == 1, "one block table for all layers"
        counts = [-(-(start + num) // TOKENS_PER_BLOCK) for start, num in case.sequences]
        arena = ArenaBuffer(sum(counts), groups.block_bytes, device)
        self.kv = KvBuffer(arena, groups, dtype, codes)
        for layer in range(num_layers):
            self._fill(layer)
        blocks = iter(torch.randperm(sum(counts)).tolist())
        self.tables = [[next(blocks) for _ in range(count)] for count in counts]
        self.metadata = self._metadata(device)
        num_tokens = sum(num for _, num in case.sequences)
        self.q = torch.randn(num_tokens, shape.num_heads * shape.head_dim, device=device).to(dtype)
        self.out = torch.empty_like(self.q)

    def _fill(self, layer: int) -> None:
        """Write normal numbers to a layer of the cache."""
        for plane, scales in zip(self.kv.planes(layer), self._scales(layer), strict=True):
            items = torch.randn(plane.shape, device=plane.device)
            if scales is None:
                plane.copy_(items)
            else:
                codes, own = encode(items, plane.dtype, scales.dtype)
                plane.copy_(codes)
                scales.copy_(own)

    def _scales(self, layer: int) -> Scales:
        return self.kv.scales(layer) or NO_SCALES

    def _metadata(self, device: torch.device) -> TritonAttentionMetadata:
        lens = [num for _, num in self.case.sequences]
        positions = [start + i for start, num in self.case.sequences for i in range(num)]
        num_generations = len(lens) if self.case.is_decode else 0
        metadata = TritonAttentionMetadata(
            num_contexts=len(lens) - num_generations,
            num_generations=num_generations,
            num_tokens=sum(lens),
            num_ctx_tokens=sum(lens) - num_generations,
            seq_lens=torch.tensor(lens),
            kv_cache_params=KvCacheParams(
                use_cache=True,
                num_cached_tokens_per_seq=tuple(start for start, _ in self.case.sequences),
                block_tables=(self.tables,),
            ),
            kv_cache_manager=self.kv,
            position_ids=torch.tensor(positions, device=device),
        )
        metadata.prepare()
        return metadata

    def run(self) -> Callable[[], None]:
        """Attention of all layers."""
        if not self.case.is_decode:
            return self._contexts()
        metadata, device = self.metadata, self.q.device
        keys = [start + 1 for start, _ in self.case.sequences]
        split = work_items.split_limit(len(keys), self.shape.num_kv_heads, device)
        num_items = sum(work_items.max_splits(num, split) for num in keys)
        items = work_items.empty_items(num_items, device)
        rows, positions = (0, len(keys)), metadata.position_ids
        assert positions is not None
        table_rows = metadata.decode_rows
        assert table_rows is not None
        inputs = positions, metadata.kv_slots[0], table_rows
        work_items.list_items(items, *inputs, rows, None, split)
        partial = work_items.make_partial_sums(num_items, len(keys), self.shape, device)

        def run() -> None:
            for layer in range(self.num_layers):
                kernels.attend_generations(
                    self.out, self.q, self.kv.planes(layer), items, metadata.tables[0],
                    self.shape, partial, scales=self._scales(layer),
                )  # fmt: skip

        return run

    def _contexts(self) -> Callable[[], None]:
        tiling = kernels.tiling_of_contexts(self.shape, self.q, self._scales(0))
        tiles = self.metadata.context_tiles(tiling.block_queries // self.shape.block_shared)

        def run() -> None:
            for layer in range(self.num_layers):
                kernels.attend_contexts(
                    self.out, self.q, self.kv.planes(layer), tiles, self.metadata.tables[0],
                    self.shape, tiling, scales=self._scales(layer),
                )  # fmt: skip

        return run

    def check(self) -> None:
        """Compare the last row of each sequence, which sees the most keys, on the last layer."""
        row = 0
        for table, (start, num) in zip(self.tables, self.case.sequences, strict=True):
            row += num
            last = self.num_layers - 1
            keys, values = (
                (plane[table].float() if scales is None else decoded(plane[table], scales[table]))
                .transpose(0, 1)
                .flatten(1, 2)[:, : start + num]
                for plane, scales in zip(self.kv.planes(last), self._scales(last), strict=True)
            )
            q = self.q[row - 1].float().view(self.shape.num_kv_heads, -1, self.shape.head_dim)
            weights = (q @ keys.mT * self.shape.scale).softmax(-1)
            difference = (self.out[row - 1] - (weights @ values).flatten()).abs().max()
            assert difference < MAX_DIFFERENCE, (self.case.name, start, float(difference))

    def row(self, seconds: float, bytes_per_s: float) -> dict[str, Any]:
        """Figures of a layer that takes so long."""
        shape = self.shape
        facts = {"case": self.case.name, "microseconds": seconds * 1e6}
        if self.case.is_decode:
            num_keys = sum(start + 1 for start, _ in self.case.sequences)
            scale_bytes = 0 if self.case.kept == AUTO else SCALE_DTYPE.itemsize
            head_bytes = self.kv.planes(0)[0].itemsize * shape.head_dim + scale_bytes
            num_bytes = 2 * num_keys * shape.num_kv_heads * head_bytes
            return facts | {"share_of_bandwidth": num_bytes / bytes_per_s / seconds}
        pairs = sum(num * start + num * (num + 1) / 2 for start, num in self.case.sequences)
        return facts | {"tflops": 4 * pairs * shape.num_heads * shape.head_dim / seconds / 1e12}


def main() -> int:
    """Check, time, print, write; returns how many settings failed."""
    args = parse_args()
    device = torch.device(args.device)
    bytes_per_s = common.copy_bytes_per_s(device, is_tiny=args.tiny)
    shape = TINY_HEADS if args.tiny else HEADS
    results = Results("attention_ops", args)
    for case in TINY_CASES if args.tiny else CASES:
        if args.only and (args.only == "decode") != case.is_decode:
            continue
        with results.setting(case.name):
            bench = Bench(shape, case, 2 if args.tiny else NUM_LAYERS, device)
            results.add("rows", measure(bench, bytes_per_s))
            del bench
    return results.end()


def measure(bench: Bench, bytes_per_s: float) -> dict[str, Any]:
    """One row of the table."""
    run = bench.run()
    run()
    bench.check()
    if INTERPRETING:
        seconds = common.median_s(run, bench.q.device, 1)
    else:
        replay = common.captured(run)
        replay()
        seconds = common.device_median_s(replay, 10)
    return bench.row(seconds / bench.num_layers, bytes_per_s)


def parse_args() -> argparse.Namespace:
    """Options."""
    parser = common.options_of(__doc__)
    parser.add_argument("--only", choices=("decode", "prefill"))
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
