"""Products with quantised weights on GPUs: codes are decoded in registers, or once for many
rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex_services.worker.ops.launch import INTERPRETING, shared_bytes
from loraplex_services.worker.ops.linear import triton_kernels as kernels
from loraplex_services.worker.ops.linear.coded import FLOAT8, CodedWeight, scaled
from loraplex_services.worker.ops.linear.torch import BaseLinear
from loraplex_services.worker.ops.linear.units import LANES, PAIRS, packed, unpacked

LANE_INPUTS = {"fp8": (64, 32), "int8": (64, 32), "int4": (32,)}
"""Inputs whose codes lie in the same lane of neighbouring units; the first that fits groups."""
MIDDLE = 8
"""The number that is subtracted from each four-bit code."""
MAX_ROWS = 1024
"""Rows up to which products decode codes in registers. For more, decoding the weight once and a
library's product are faster."""
MAX_EXPANDED_BYTES = 256 << 20
"""The most bytes of decoded weights that exist at once, for products of many rows."""
WIDE_OUTPUTS = 16384
"""Outputs from which larger tiles still give every processor one."""
MIN_PROGRAMS, MAX_SPLITS, MIN_SPLIT_BLOCKS = 192, 8, 4
SPLIT_ROWS, SOME_SPLIT_ROWS = 128, 512
"""Rows up to which the inputs of a product are divided into all parts, and into half as many."""


@dataclass(frozen=True, slots=True)
class ProductTiling:
    """Sizes of the tiles of one product."""

    block_rows: int
    block_outputs: int
    stages: int
    num_warps: int


LARGE_SHARED_BYTES = 227 << 10
"""Shared memory that a program of the largest tiles may need."""
FEW, SOME = ProductTiling(16, 64, 4, 4), ProductTiling(32, 64, 4, 4)
NARROW, WIDE = ProductTiling(64, 64, 4, 4), ProductTiling(64, 128, 4, 4)
MANY, MOST = ProductTiling(128, 64, 3, 4), ProductTiling(256, 128, 3, 8)
MANY_NARROW = ProductTiling(128, 128, 3, 8)
TILINGS_SMALL = FEW, ProductTiling(64, 64, 3, 4)
"""The tilings for half precision on GPUs with less shared memory."""
TILINGS_FLOAT32 = ProductTiling(16, 64, 2, 4), ProductTiling(64, 64, 2, 4)
SPLIT_OUTPUTS = 64
"""Outputs of the smallest tile."""
EXPANDED_OUTPUTS = 64
"""Outputs of a tile of `expand_codes`."""


def tilings(
    num_outputs: int, kind: str, dtype: torch.dtype, num_shared_bytes: int, *, is_grouped: bool
) -> tuple[ProductTiling, ...]:
    """All that products with a weight use, by rows. They were chosen on an H200.

    Args:
        kind: of the codes.
        dtype: of the rows.
        num_shared_bytes: that a program may have.
        is_grouped: the scales are those of groups, whose sums take registers.
    """
    if dtype is torch.float32:
        return TILINGS_FLOAT32
    if num_shared_bytes < LARGE_SHARED_BYTES:
        return TILINGS_SMALL
    is_wide = num_outputs >= WIDE_OUTPUTS
    few = FEW, SOME, WIDE if is_wide or kind == "int4" else NARROW
    if is_grouped:
        return *few, MANY
    return *few, MANY, MOST if is_wide else MANY_NARROW


def tiling_for(num_rows: int, choices: Sequence[ProductTiling]) -> ProductTiling:
    """The first whose tiles hold all rows, or the last."""
    return next((tiling for tiling in choices if tiling.block_rows >= num_rows), choices[-1])


def warm_up_sizes() -> tuple[int, ...]:
    """Numbers of rows for which every kernel is launched: one for each tiling, and many."""
    return (*(tiling.block_rows for tiling in (FEW, SOME, WIDE, MANY, MOST)), MAX_ROWS + 1)


def num_splits(num_outputs: int, num_blocks: int) -> int:
    """Parts into which the inputs of a product are divided, so that there are enough programs. It
    depends on the weight alone, so that a row's sums are the same in every batch of SPLIT_ROWS or
    fewer."""
    splits, tiles = 1, -(-num_outputs // SPLIT_OUTPUTS)
    while (
        splits < MAX_SPLITS
        and tiles * splits < MIN_PROGRAMS
        and num_blocks >= 2 * splits * MIN_SPLIT_BLOCKS
    ):
        splits *= 2
    return splits


def is_readable(weight: CodedWeight) -> bool:
    """Whether the kernel reads the codes."""
    if _lane_inputs(weight) is None:
        return False
    zeros = weight.zeros
    return zeros is None or (zeros.round().equal(zeros) and bool((zeros.abs() <= 128).all()))


class TritonCodedLinear(BaseLinear):
    """A weight that stays in codes."""

    def __init__(self, weight: CodedWeight) -> None:
        kind, lane_inputs = weight.kind, _lane_inputs(weight)
        assert kind is not None and lane_inputs is not None, weight.scheme
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self._kind, self._lane_inputs = kind, lane_inputs
        self._block_inputs = lane_inputs * LANES[kind]
        self._num_blocks = -(-weight.in_features // self._block_inputs)
        device = weight.codes.device
        self._order = None if weight.order is None else weight.order.to(device)
        self._units = packed(weight.codes.view(torch.uint8), kind, lane_inputs)
        self._group = 0 if weight.scales.shape[1] == 1 else weight.group_size
        self._scales = self._by_groups(weight.scales)
        zeros = _zeros_of(weight, kind)
        self._zeros = None if zeros is None else self._by_groups(zeros.bfloat16())
        self._num_splits = num_splits(self.out_features, self._num_blocks)
        num_tiles = -(-self.out_features // SPLIT_OUTPUTS)
        row_tiles = -(-SOME_SPLIT_ROWS // FEW.block_rows)
        num_tickets = num_tiles * row_tiles if self._num_splits > 1 else 1
        self._tickets = torch.zeros(num_tickets, dtype=torch.int32, device=device)

    def apply(self, x: Tensor) -> Tensor:
        """`[T, in]` -> `[T, out]`."""
        return self._product(x, x.dtype)

    def apply_float32(self, x: Tensor) -> Tensor:
        """`[T, in]` -> float32 `[T, out]`, not rounded to x's dtype up to MAX_ROWS rows."""
        if len(x) > MAX_ROWS:
            return self.apply(x).float()
        return self._product(x, torch.float32)

    def weight_rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end), float32."""
        codes = unpacked(self._units[begin:end], self._kind, self._lane_inputs)
        if self._kind == "fp8":
            values = codes.view(FLOAT8).float()
        elif self._kind == "int8":
            values = codes.view(torch.int8).float()
        else:
            values = codes.float() - MIDDLE
        values = values[:, : self.in_features]
        zeros = None if self._zeros is None else self._zeros[:, begin:end].T
        scales = self._scales[:, begin:end].T
        return scaled(values, zeros, scales, self._group or self.in_features, self._order)

    def _by_groups(self, values: Tensor) -> Tensor:
        """`[out, groups]` -> `[groups, out]`, with zeros for groups in the last block that no
        input is in."""
        padding = 0
        if self._group:
            num_groups = -(-self._num_blocks * self._block_inputs // self._group)
            padding = num_groups - values.shape[1]
        return F.pad(values, (0, padding)).T.contiguous()

    def _product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if self._order is not None:
            x = x[:, self._order]
        if len(x) > MAX_ROWS:
            return self._product_of_many(x)
        assert x.stride(1) == 1 and x.shape[1] == self.in_features, (x.shape, x.stride())
        num_rows, splits = len(x), self._num_splits_of(len(x))
        tiling = tiling_for(num_rows, self._tilings(x.dtype, x.device))
        y = torch.empty(num_rows, self.out_features, dtype=dtype, device=x.device)
        size = splits * y.numel() if splits > 1 else 1
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        grid = (
            -(-self.out_features // tiling.block_outputs),
            splits,
            -(-num_rows // tiling.block_rows),
        )
        kernels.multiply_codes[grid](
            y,
            x,
            *self._arrays,
            partial,
            self._tickets,
            num_rows,
            self.out_features,
            self.in_features,
            x.stride(0),
            splits,
            -(-self._num_blocks // splits),
            **self._constants(x.dtype),
            BLOCK_ROWS=tiling.block_rows,
            BLOCK_OUTPUTS=tiling.block_outputs,
            STAGES=tiling.stages,
            num_warps=tiling.num_warps,
        )
        return y

    def _num_splits_of(self, num_rows: int) -> int:
        """The parts of a product of `num_rows` rows, whose partial sums are written and read."""
        if num_rows <= SPLIT_ROWS:
            return self._num_splits
        return max(1, self._num_splits // 2) if num_rows <= SOME_SPLIT_ROWS else 1

    def _tilings(self, dtype: torch.dtype, device: torch.device) -> tuple[ProductTiling, ...]:
        return tilings(
            self.out_features,
            self._kind,
            dtype,
            shared_bytes(device),
            is_grouped=self._group > 0,
        )

    def _product_of_many(self, x: Tensor) -> Tensor:
        """Decode outputs by outputs, and let a library multiply."""
        num_rows, num_outputs = len(x), self.out_features
        at_once = MAX_EXPANDED_BYTES // (self.in_features * x.itemsize)
        at_once -= at_once % EXPANDED_OUTPUTS
        if num_outputs <= at_once:
            return F.linear(x, self._expanded(0, num_outputs, x.dtype))
        y = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
        for begin in range(0, num_outputs, at_once):
            end = min(begin + at_once, num_outputs)
            torch.mm(x, self._expanded(begin, end, x.dtype).T, out=y[:, begin:end])
        return y

    def _expanded(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """Rows [begin, end) of the weight, rounded to a dtype."""
        units, scales, zeros = self._arrays
        w = torch.empty(end - begin, self.in_features, dtype=dtype, device=units.device)
        kernels.expand_codes[-(-len(w) // EXPANDED_OUTPUTS), self._num_blocks](
            w,
            units[begin:end],
            scales[:, begin:],
            zeros[:, begin:],
            len(w),
            self.in_features,
            self.out_features,
            **self._constants(dtype),
            BLOCK_OUTPUTS=EXPANDED_OUTPUTS,
        )
        return w

    @property
    def _arrays(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._units, self._scales, self._scales if self._zeros is None else self._zeros

    def _constants(self, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "KIND": self._kind,
            "GROUP": self._group,
            "HAS_ZEROS": self._zeros is not None,
            "HAS_EDGE": self.in_features % self._block_inputs != 0,
            "LANE_INPUTS": self._lane_inputs,
            "WIDEN": dtype is torch.float32 or INTERPRETING,
            "PAIRS": PAIRS[self._kind] if dtype is torch.bfloat16 and not INTERPRETING else None,
        }


def _lane_inputs(weight: CodedWeight) -> int | None:
    """Inputs of a lane, so that groups end where lanes end; None = the kernel does not read the
    codes, or there is no such number."""
    kind, group_size = weight.kind, weight.group_size
    if kind is None:
        return None
    if group_size >= weight.in_features:
        return LANE_INPUTS[kind][0]
    for inputs in LANE_INPUTS[kind]:
        block = inputs * LANES[kind]
        if group_size % inputs == 0 and (group_size % block == 0 or block % group_size == 0):
            return inputs
    return None


def _zeros_of(weight: CodedWeight, kind: str) -> Tensor | None:
    """float32 `[out, groups]`: what remains to be subtracted from decoded codes."""
    offset = 0.0
    if kind == "int4" and weight.table is not None:
        offset = MIDDLE + float(weight.table[0])
    if weight.zeros is not None:
        return weight.zeros - offset
    return torch.full_like(weight.scales, -offset, dtype=torch.float32) if offset else None
