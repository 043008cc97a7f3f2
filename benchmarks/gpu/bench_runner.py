"""A runner with random weights, its free blocks, and adapters with bytes of their own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu import common
from benchmarks.llama import Shape, write_adapter, write_base_config
from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.adapters.device.loader import CopiedImage
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.runner.runner import TorchRunner
from loraplex_services.worker.runner.steps import InlineExecutor
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import PlannedRow, StepPlan
from tests.worker.loading import blocks_of, in_blocks

GPU_RESERVE_BYTES = 7 << 30
"""Bytes that are left to activations, graphs and libraries when the arena takes the rest."""
HOST_CACHE_BYTES = 1 << 30
"""Bytes of pinned host memory. To pin a quarter of the memory, as workers do, takes seconds."""


class DoesNotFit(Exception):
    """A case needs more memory than there is, such as blocks of the arena."""


class BenchRunner:
    """Loads adapters and makes plans for one case at a time."""

    def __init__(
        self,
        shape: Shape,
        root: Path,
        args: argparse.Namespace,
        max_num_tokens: int,
        *,
        max_resident: int = 512,
        max_model_len: int = 0,
        quantization: str = "none",
    ):
        """`args`: device, dtype, arena_bytes (0 = what a GPU has left), context. `max_model_len`:
        at least; 0 = what the context and the largest step need. `quantization`: of the base."""
        self.shape, self._root = shape, root
        longest = max(2 * args.context, max_num_tokens, max_model_len)
        base = write_base_config(shape, root / "base", longest)
        self.runner: TorchRunner = build_runner(
            base,
            device=args.device,
            dtype=args.dtype,
            arena_bytes=args.arena_bytes or free_arena_bytes(shape),
            max_lora_rank=128,
            max_resident=max_resident,
            max_num_batched_tokens=max_num_tokens,
            host_cache_bytes=HOST_CACHE_BYTES,
            load_format="dummy",
            quantization=quantization,
            executors=(InlineExecutor(), InlineExecutor()),
        )
        self.runner.arena.data.zero_()
        self.device = self.runner.arena.data.device
        self.itemsize = 4 if self.runner.model_info().dtype == "float32" else 2
        self._slots: list[int] = []
        self._first_cache_block = 0
        self._free: Iterator[int] = iter(())
        self.clear()

    def clear(self) -> None:
        """Unload all adapters; all blocks are free again."""
        for slot in self._slots:
            self.runner.unload_adapter(slot)
        self._slots, self._first_cache_block = [], 0
        self.clear_caches()

    def clear_caches(self) -> None:
        """Free the blocks after those of the adapters."""
        self._free = iter(range(self._first_cache_block, self.runner.arena_blocks))

    def blocks(self, count: int) -> list[int]:
        """The next free blocks, ascending. Raises DoesNotFit."""
        blocks = [block for block, _ in zip(self._free, range(count), strict=False)]
        if len(blocks) < count:
            raise DoesNotFit
        return blocks

    def load(self, ranks: Sequence[int], targets: tuple[str, ...]) -> None:
        """Slot i gets an adapter of ranks[i]: one of each rank from a file, the others copies of
        it on the device, since files would take minutes. Raises DoesNotFit."""
        first: dict[int, CopiedImage] = {}
        for slot, rank in enumerate(ranks):
            if rank not in first:
                folder = self._folder(rank, targets)
                num_pages = self.runner.pack_adapter(folder).result()
                blocks = self.blocks(blocks_of(self.runner, num_pages))
                extents = in_blocks(self.runner, num_pages, blocks)
                first[rank] = copied = self.runner.copy_adapter(folder, extents).result()
            else:
                source, num_pages = first[rank], first[rank].index.num_pages
                blocks = self.blocks(blocks_of(self.runner, num_pages))
                size, data = self.runner.arena.pages_per_block, self.runner.arena.data
                data[blocks] = data[
                    list(dict.fromkeys(page // size for page in source.first_pages))
                ]
                copied = replace(
                    source, first_pages=in_blocks(self.runner, num_pages, blocks).first_pages
                )
            self.runner.enter_adapter(slot, copied)
            self._slots.append(slot)
            self._first_cache_block = blocks[-1] + 1

    def _folder(self, rank: int, targets: tuple[str, ...]) -> Path:
        folder = self._root / f"r{rank}-{len(targets)}"
        if not folder.exists():
            dtype = torch.bfloat16 if self.itemsize == 2 else torch.float32
            write_adapter(self.shape, folder, rank, dtype, seed=rank, targets=targets)
        return folder

    def decode_plan(self, slots: Sequence[int | None], context: int | Sequence[int]) -> StepPlan:
        """One token for each slot's row, every sequence with a full context."""
        contexts = [context] * len(slots) if isinstance(context, int) else context
        rows = []
        for i, (slot, num_cached) in enumerate(zip(slots, contexts, strict=True)):
            request = self.request(i, num_cached + 1)
            request.prompt_ids, request.output_ids = request.prompt_ids[:num_cached], [3]
            request.num_computed = num_cached
            rows.append(PlannedRow(request, num_cached, 1, True, _adapters(slot)))
        return StepPlan(0, tuple(rows))

    def chunk_plans(self, num_tokens: int, chunk_tokens: int, slot: int | None) -> list[StepPlan]:
        """The steps of one prompt that is computed in chunks. Raises DoesNotFit."""
        request, plans = self.request(0, num_tokens), []
        for begin in range(0, num_tokens, chunk_tokens):
            num = min(chunk_tokens, num_tokens - begin)
            is_last = begin + num == num_tokens
            row = PlannedRow(request, begin, num, is_last, _adapters(slot))
            plans.append(StepPlan(0, (row,)))
        return plans

    def verify_plan(self, slots: Sequence[int | None], context: int, num_tokens: int) -> StepPlan:
        """`num_tokens` tokens for each slot's row after a context, as speculation verifies."""
        rows = []
        for i, slot in enumerate(slots):
            request = self.request(i, context + num_tokens)
            request.num_computed = context
            rows.append(PlannedRow(request, context, num_tokens, True, _adapters(slot)))
        return StepPlan(0, tuple(rows))

    def prefill_plan(self, lens: Sequence[int], slots: Sequence[int | None]) -> StepPlan:
        """Whole prompts of the given lengths."""
        rows = [
            PlannedRow(self.request(i, num), 0, num, True, _adapters(slot))
            for i, (num, slot) in enumerate(zip(lens, slots, strict=True))
        ]
        return StepPlan(0, tuple(rows))

    def request(self, number: int, num_tokens: int) -> Request:
        """A prompt with blocks of its own. Raises DoesNotFit."""
        params = SamplingParams(max_tokens=1 << 20, seed=number, ignore_eos=True)
        request = Request(f"r{number}", [3] * num_tokens, params)
        num_blocks = -(-num_tokens // self.runner.tokens_per_block)
        groups = self.runner.kv_group_windows
        request.block_tables = [self.blocks(num_blocks) for _ in groups]
        return request

    def step_s(self, plan: StepPlan, repetitions: int) -> float:
        """Median seconds of a step with sampling, host included."""
        run = self._run(plan)
        for _ in range(3):
            run()
        return common.median_s(run, self.device, repetitions)

    def graph_s(self, plan: StepPlan, repetitions: int) -> float | None:
        """Median seconds of the captured part of a step on the GPU; None without graphs."""
        gpu, step = self.runner._batches.gpu, self.runner._batches.read(plan)
        graph = None if gpu is None else gpu.graph_of(step)
        if gpu is None or graph is None:
            return None
        before = torch.zeros(0, dtype=torch.int64, device=self.device)
        with torch.inference_mode():
            return common.device_median_s(lambda: gpu.replay(graph, step, before), repetitions)

    def _run(self, plan: StepPlan) -> Callable[[], object]:
        return lambda: self.runner.launch(plan).result()


def _adapters(slot: int | None) -> tuple[tuple[int, float], ...]:
    return () if slot is None else ((slot, 1.0),)


def spread(num_rows: int, num_adapters: int) -> list[int | None]:
    """The slot of each row, dealt evenly and in order; None = base."""
    return [i * num_adapters // num_rows if num_adapters else None for i in range(num_rows)]


def free_arena_bytes(shape: Shape) -> int:
    """Bytes that the GPU has left besides weights in half precision."""
    free_bytes, _ = torch.cuda.mem_get_info()
    embedding_bytes = 2 * shape.vocab_size * shape.hidden_size
    return free_bytes - 2 * shape.num_weights - embedding_bytes - GPU_RESERVE_BYTES


def runner_parser(doc: str | None) -> argparse.ArgumentParser:
    """The options of a benchmark with a `BenchRunner`."""
    parser = common.options_of(doc)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context", type=int, default=1024, help="cached tokens of each sequence")
    parser.add_argument("--arena-bytes", type=int, default=0, help="0 = what the GPU has left")
    return parser


def parse(parser: argparse.ArgumentParser, **tiny: object) -> argparse.Namespace:
    """The options of the command line; with --tiny, those in `tiny` take precedence."""
    args = parser.parse_args()
    if args.tiny:
        vars(args).update(tiny, shape="tiny")
    return args
