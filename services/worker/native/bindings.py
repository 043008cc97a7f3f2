"""The compiled kernels as Python functions over tensors.

Every call releases the GIL and returns when the work is done. Shapes and dtypes are asserted here;
the C++ code does not check them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loraplex_services.worker.native.build import BuildFailed, build_library
from loraplex_services.worker.native.check import computes_right
from loraplex_services.worker.native.codes import CodeKind, PackedCodes
from loraplex_services.worker.native.elementwise import Operation, compute
from loraplex_services.worker.native.isa import TORCH, choose_isa
from loraplex_services.worker.native.library import ACTIVATION_DTYPES, DTYPE_CODES, open_library
from loraplex_services.worker.native.pages import WeightMemory
from loraplex_services.worker.native.program import (
    CannotRecord,
    Program,
    ProgramMemory,
    Recorder,
)
from loraplex_services.worker.sampling import fixed_log

logger = logging.getLogger(__name__)

TILE_ROWS, TILE_INPUTS = 16, 32
"""Outputs and inputs of one tile of a packed weight (`native/src/tiles.h`)."""
FIXED_INPUTS, FIXED_STEP = 256, 8
"""The most inputs of a block of a weight in fixed point, and what divides their number
(`native/src/gemm_fixed.cpp`)."""
LINE_BYTES, ROUND_BYTES = 64, 1024
"""Bytes of a cache line, and those of rows that `new_rows` keeps apart."""
Argument = Tensor | torch.dtype | float | None
"""An argument of a kernel."""
INVERSES, LOGS = torch.tensor(fixed_log.INVERSES), torch.tensor(fixed_log.LOGS)


class Native:
    """One loaded library."""

    def __init__(self, isa: str, path: Path) -> None:
        self.isa = isa
        self._library = open_library(path)
        self._kernels: Any = self._library
        """The library that passes call; a recorder while a pass is recorded."""
        self.weights = WeightMemory()
        self.panel: int = self._library.lpx_packed_items(1, 1)
        """Number of outputs in a panel of a packed weight."""
        self.task_queries: int = self._library.lpx_task_queries()
        """Queries of one attention task."""
        self.has_tiles: bool = self._library.lpx_tile_items(1, 1) > 0
        """Whether bfloat16 dot products, and so products of tiles, are compiled in."""
        self.has_fixed: bool = self._library.lpx_fixed_items(1, 1) > 0
        """Whether products in fixed point are compiled in, for levels where these are faster."""
        self.uses_pairs = self.choose_pairs(None)
        """Whether low-rank updates and products of codes in bfloat16 use dot products, at levels
        without AMX."""
        self.prefers_tiles: bool = self._library.lpx_prefers_tiles() > 0
        """Whether `linear_tiles` is faster than `linear` of bfloat16."""

    def choose_pairs(self, wanted: bool | None) -> bool:
        """Whether low-rank updates and products of codes in bfloat16 use dot products from now on:
        as wanted, or, if that is None, where a measurement of 0.1 ms finds them faster than float32
        vectors."""
        choice = -1 if wanted is None else int(wanted)
        return bool(self._library.lpx_choose_pairs(choice))

    def set_threads(self, num_threads: int) -> None:
        """Set the number of threads of every later call; it includes the calling thread."""
        self._library.lpx_set_threads(num_threads)

    def pack(self, weight: Tensor) -> Tensor:
        """`[out, in]` in the order that `linear` reads; a vector of the same dtype."""
        weight = weight.contiguous()
        packed = self.weights.take(self._library.lpx_packed_items(*weight.shape), weight.dtype)
        self.call("pack", weight, weight.dtype, *weight.shape, packed)
        return packed

    def unpack_rows(self, packed: Tensor, num_inputs: int, begin: int, end: int) -> Tensor:
        """Rows [begin, end) of a packed weight, `[end - begin, in]`."""
        first = begin // self.panel
        panels = packed.view(-1, num_inputs, self.panel)[first : -(-end // self.panel)]
        lanes = torch.arange(self.panel)
        if packed.dtype is torch.bfloat16:  # pairs lanes: see gemm.cpp
            lanes = lanes.view(-1, 2).T.flatten()
        rows = panels[:, :, lanes].transpose(1, 2).reshape(-1, num_inputs)
        return rows[begin - first * self.panel : end - first * self.panel]

    def linear(self, x: Tensor, packed: Tensor, num_outputs: int) -> Tensor:
        """`[T, in]` times a packed weight: fresh `[T, out]`."""
        y = torch.empty(len(x), num_outputs, dtype=x.dtype)
        sizes = *x.shape, num_outputs
        self.call("linear", x, row_stride(x), packed, packed.dtype, y, num_outputs, x.dtype, *sizes)
        return y

    def pack_tiles(self, weight: Tensor) -> Tensor:
        """bfloat16 `[out, in]` in the order that `linear_tiles` reads; a vector."""
        assert self.has_tiles and weight.dtype is torch.bfloat16, (self.isa, weight.dtype)
        weight = weight.contiguous()
        packed = self.weights.take(self._library.lpx_tile_items(*weight.shape), torch.bfloat16)
        self.call("pack_tiles", weight, *weight.shape, packed)
        return packed

    def unpack_tile_rows(self, packed: Tensor, num_inputs: int, begin: int, end: int) -> Tensor:
        """Rows [begin, end) of a weight packed in tiles, `[end - begin, in]`."""
        panel = 2 * TILE_ROWS
        first = begin // panel
        tiles = packed.view(-1, -(-num_inputs // TILE_INPUTS), 2, TILE_ROWS, TILE_ROWS, 2)
        tiles = tiles[first : -(-end // panel)]  # [panel, tile, half, pair of inputs, output, 2]
        rows = tiles.permute(0, 2, 4, 1, 3, 5).reshape(len(tiles) * panel, -1)
        return rows[begin - first * panel : end - first * panel, :num_inputs]

    def linear_tiles(
        self, x: Tensor, packed: Tensor, num_outputs: int, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        """bfloat16 `[T, in]` times a weight packed in tiles: fresh `[T, out]` of `dtype`."""
        assert x.dtype is torch.bfloat16, x.dtype
        y = torch.empty(len(x), num_outputs, dtype=dtype)
        sizes = *x.shape, num_outputs
        self.call("linear_tiles", x, row_stride(x), packed, y, num_outputs, dtype, *sizes)
        return y

    def pack_fixed(self, weight: Tensor) -> Tensor:
        """`[out, in]` in fixed point, in the order that `linear_fixed` reads; int16 vector."""
        assert self.has_fixed, self.isa
        weight = weight.contiguous()
        packed = self.weights.take(self._library.lpx_fixed_items(*weight.shape), torch.int16)
        self.call("pack_fixed", weight, weight.dtype, *weight.shape, packed)
        return packed

    def unpack_fixed_rows(self, packed: Tensor, num_inputs: int, begin: int, end: int) -> Tensor:
        """Rows [begin, end) of a weight in fixed point, float32 `[end - begin, in]`."""
        first = begin // self.panel
        panels = packed.view(-1, self._library.lpx_fixed_items(1, num_inputs))
        panels = panels[first : -(-end // self.panel)]
        mean = -(-num_inputs // -(-num_inputs // FIXED_INPUTS))
        num_scales = 2 * self.panel  # in items of 16 bits
        block_items = num_scales + -(-mean // FIXED_STEP) * FIXED_STEP * self.panel
        blocks = []
        for block in panels.split(block_items, dim=1):
            scales = block[:, :num_scales].contiguous().view(torch.float32)
            pairs = block[:, num_scales:].unflatten(1, (-1, self.panel, 2))
            values = pairs.transpose(1, 2).flatten(2)
            blocks.append((values * scales[:, :, None]).flatten(0, 1))
        rows = torch.cat(blocks, dim=1)
        return rows[begin - first * self.panel : end - first * self.panel, :num_inputs]

    def linear_fixed(self, x: Tensor, packed: Tensor, num_outputs: int) -> Tensor:
        """`[T, in]` times a weight in fixed point: fresh `[T, out]`."""
        y = torch.empty(len(x), num_outputs, dtype=x.dtype)
        sizes = *x.shape, num_outputs
        self.call("linear_fixed", x, row_stride(x), packed, y, num_outputs, x.dtype, *sizes)
        return y

    def pack_codes(self, codes: Tensor, kind: CodeKind) -> Tensor:
        """uint8 `[out, in]`, a code in each, in the order that `linear_codes` reads; bytes."""
        codes = codes.contiguous()
        packed = self.weights.take(self._library.lpx_code_bytes(*codes.shape, kind), torch.uint8)
        self.call("pack_codes", codes, *codes.shape, kind, packed)
        return packed

    def linear_codes(self, x: Tensor, weight: PackedCodes) -> Tensor:
        """`[T, in]` times a weight in codes: fresh `[T, out]`."""
        y = torch.empty(len(x), weight.out_features, dtype=x.dtype)
        self._multiply_codes("linear_codes", x, weight, y)
        return y

    def gate_codes(self, operation: Operation, x: Tensor, weight: PackedCodes) -> Tensor:
        """The product with a weight of gates and as many outputs that they multiply, in groups of
        16 gates and their 16 outputs: fresh `[T, out / 2]`, act(gates) * outputs, both rounded as
        `linear_codes` does. COPY returns `[T, out]`, all gates first."""
        num_outputs = weight.out_features // (1 if operation is Operation.COPY else 2)
        y = torch.empty(len(x), num_outputs, dtype=x.dtype)
        self._multiply_codes("gate_codes", x, weight, y, operation)
        return y

    def best_codes(self, x: Tensor, weight: PackedCodes) -> Tensor:
        """The index of each row's first largest output of `linear_codes`; fresh int64 `[T]`."""
        outputs = torch.empty(len(x), dtype=torch.int64)
        self._multiply_codes("best_codes", x, weight, outputs)
        return outputs

    def _multiply_codes(
        self, kernel: str, x: Tensor, weight: PackedCodes, result: Tensor, *operation: Operation
    ) -> None:
        sizes = *x.shape, weight.out_features
        self.call(kernel, *operation, x, row_stride(x), *weight.words, result, x.dtype, *sizes)

    def add_lora(self, y: Tensor, x: Tensor, site_id: int, runs: Tensor) -> None:
        """See `ops/lora`. y `[T, out]` is mutated; `runs` as `pack_runs` makes them."""
        rows = x, row_stride(x), x.shape[1], y, row_stride(y), y.shape[1], y.dtype
        self.call("add_lora", *rows, site_id, runs, len(runs))

    def add_lora_gates(
        self, operation: Operation, y: Tensor, x: Tensor, site_id: int, runs: Tensor
    ) -> Tensor:
        """The gates of bfloat16 outputs y `[T, 2 * width]` with their updates, all gates first:
        fresh `[T, width]`, act(gates) * outputs, with the bits of `add_lora` and `elementwise`. y
        is not mutated."""
        assert x.dtype is torch.bfloat16 and y.dtype is torch.bfloat16, (x.dtype, y.dtype)
        gated = new_rows(len(y), y.shape[1] // 2, y.dtype)
        rows = x, row_stride(x), x.shape[1], y, row_stride(y), y.shape[1]
        to = gated, row_stride(gated), len(y)
        self.call("add_lora_gates", operation, *rows, *to, site_id, runs, len(runs))
        return gated

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        planes: tuple[Tensor, Tensor],
        layout: Tensor,
        sequences: Tensor,
        task_ends: Tensor,
    ) -> Tensor:
        """Write k and v into the planes and attend; fresh `[T, Hq * D]`.

        Args:
            q, k, v: `[T, heads * D]`, any row stride.
            layout: int64 `[18]`, as `attention/cpu.py` makes it.
            sequences, task_ends: int64 `[N, 4]` and `[N]`, likewise.
        """
        y = torch.empty(q.shape, dtype=q.dtype)
        tables = layout, sequences, task_ends, len(task_ends)
        self.call("attend", q, k, v, *planes, y, q.dtype, *tables)
        return y

    def attend_tiles(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        planes: tuple[Tensor, Tensor],
        layout: Tensor,
        sequences: Tensor,
    ) -> Tensor:
        """As `attend`, in bfloat16, for heads of 32 * n dimensions and blocks of 16 tokens.

        Blocks have another layout, so only one of both functions may use a cache.
        """
        assert self.has_tiles and q.dtype is torch.bfloat16, (self.isa, q.dtype)
        y = torch.empty(q.shape, dtype=q.dtype)
        self.call("attend_tiles", q, k, v, *planes, y, layout, sequences, len(sequences))
        return y

    def norm(
        self, x: Tensor, update: Tensor | None, weight: Tensor, eps: float, in_float32: bool
    ) -> Tensor:
        """Root-mean-square norm of each H in `[T, heads * H]`, whose weight is `[H]`: fresh;
        x += update first if one is given."""
        assert weight.dtype is torch.float32, weight.dtype
        num_rows, width = x.shape
        y = new_rows(num_rows, width, x.dtype)
        added = update, 0 if update is None else row_stride(update)
        rows = x, row_stride(x), *added, weight, y, row_stride(y), x.dtype
        sizes = num_rows, width // len(weight), len(weight)
        self.call("norm", *rows, *sizes, eps, in_float32)
        return y

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, head_dim: int) -> None:
        """Rotate every head of `[T, heads * head_dim]` in place; cos, sin `[T, dim / 2]` dense."""
        num_rows, width = x.shape
        sizes = num_rows, width // head_dim, head_dim, cos.shape[-1]
        self.call("rotate", x, row_stride(x), cos, sin, x.dtype, *sizes)

    def elementwise(self, operation: Operation, a: Tensor, b: Tensor) -> Tensor:
        """See `Operation`: fresh, of a's dtype. Both are float32 or bfloat16 of at most three
        dimensions, of which the last is dense or repeated."""
        # Torch takes 6 us for it.
        shape = a.shape if a.shape == b.shape else torch.broadcast_shapes(a.shape, b.shape)
        y = torch.empty(shape, dtype=a.dtype)
        is_done = compute(self._kernels, operation, y, a, b)
        assert is_done, (a.dtype, a.shape, a.stride(), b.dtype, b.shape, b.stride())
        return y

    def call(self, kernel: str, *arguments: Argument) -> None:
        """Call a kernel. It gets the address of a tensor, and the code of a dtype."""
        getattr(self._kernels, f"lpx_{kernel}")(*map(_word, arguments))

    def record(self, compute: Callable[[int], Tensor], memory: ProgramMemory) -> Program | None:
        """Record the kernels that a pass calls, without calling them.

        Args:
            compute: the pass, given the number of rows. What it reads must stay at the same
                addresses for later runs.
            memory: where it computes.

        Returns: the program; None if the pass also computes in torch or with a kernel that programs
        cannot call, or if an argument is neither constant nor proportional to the number of rows.
        """
        recorder = Recorder(self._library, memory)
        self._kernels = recorder
        try:
            return recorder.record(compute)
        except CannotRecord as error:
            logger.debug("no program: %s", error)
            return None
        finally:
            self._kernels = self._library

    def truncate(self, scores: Tensor, limits: Tensor) -> None:
        """See `sampling.masks.truncate`, which this does in place."""
        assert scores.is_contiguous() and limits.is_contiguous(), (scores.stride(), limits.stride())
        num_rows, width = scores.shape
        self.call("truncate", scores, width, limits, num_rows)

    def draw(self, scores: Tensor, keys: Tensor, first_id: int = 0) -> Tensor:
        """See `sampling.drawing.draw`."""
        assert scores.is_contiguous() and keys.is_contiguous(), (scores.stride(), keys.stride())
        num_rows, width = scores.shape
        token_ids = torch.empty(num_rows, dtype=torch.int64)
        tables = INVERSES, LOGS, fixed_log.LN2
        self.call("draw", scores, width, first_id, keys, *tables, token_ids, num_rows)
        return token_ids


def _word(argument: Argument) -> float | None:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return DTYPE_CODES[argument] if isinstance(argument, torch.dtype) else argument


def new_rows(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Fresh `[num_rows, width]`. Rows of a multiple of `ROUND_BYTES` lie one more cache line apart:
    some columns of many rows would share few sets of the caches."""
    num_more = LINE_BYTES // dtype.itemsize if width * dtype.itemsize % ROUND_BYTES == 0 else 0
    return torch.empty(num_rows, width + num_more, dtype=dtype)[:, :width]


def row_stride(x: Tensor) -> int:
    """Items between the rows of a matrix whose columns are dense."""
    assert x.dtype in ACTIVATION_DTYPES and x.stride(1) == 1, (x.dtype, x.stride())
    return x.stride(0)


_loaded: dict[str, Native] = {}


def load_native(wanted: str = "auto") -> Native | None:
    """The library for `wanted` (see `choose_isa`), built if need be; None = use torch.

    Raises:
        InvalidRequest: when this machine lacks the instruction set.
    """
    isa = choose_isa(wanted)
    if isa == TORCH:
        logger.info("cpu kernels: torch")
        return None
    if isa not in _loaded:
        try:
            native = Native(isa, build_library(isa, partial(logger.info, "cpu kernels: %s")))
        except (BuildFailed, OSError) as error:
            logger.warning("cpu kernels: torch, several times slower: %s", error)
            return None
        if not computes_right(native):
            why = "those for %s give wrong results on this machine"
            logger.error(f"cpu kernels: torch, because {why}", isa)
            return None
        _loaded[isa] = native
    logger.info("cpu kernels: %s", isa)
    return _loaded[isa]
