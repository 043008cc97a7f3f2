"""Products in the C++ library: `native/src/gemm.cpp`, and `gemm_codes.cpp` for weights in codes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex_services.worker.native.bindings import (
    TILE_INPUTS,
    TILE_ROWS,
    Native,
    new_rows,
    row_stride,
)
from loraplex_services.worker.native.codes import CodeKind, PackedCodes
from loraplex_services.worker.native.elementwise import Operation
from loraplex_services.worker.native.library import DTYPE_CODES
from loraplex_services.worker.ops.linear.coded import FLOAT8, CodedWeight, scaled
from loraplex_services.worker.ops.linear.torch import BaseLinear

HALF_DTYPES = (torch.bfloat16, torch.float16)
IN_TILES, IN_CODES, IN_FIXED = -1, -2, -3
"""Stand for the type of a weight in tiles, in codes or in fixed point
(`native/src/experts.cpp`)."""
KINDS = {"int4": CodeKind.INT4, "int8": CodeKind.INT8, "fp8": CodeKind.FLOAT8}
PANEL, QUAD = 32, 4
MAX_PLAIN_OUTPUTS = 1 << 24
"""The most outputs of a plain weight: the kernel numbers them in float32."""
BLOCK_SIZES = (128, 64, 32, 16)
"""Numbers of inputs that the kernel may sum before it scales the sum. For int8, also 256."""


def as_published(weight: Tensor) -> Tensor:
    """The weight in a half-precision type when that holds it exactly: half the bytes to read.

    Checkpoints are mostly published in half precision; widened to float32 they lose it again here,
    and the kernels widen in registers.
    """
    if weight.dtype in HALF_DTYPES:
        return weight
    for dtype in HALF_DTYPES:
        narrow = weight.to(dtype)
        if narrow.to(weight.dtype).equal(weight):
            return narrow
    return weight


class PackedLinear(BaseLinear):
    """A base weight in the order that the kernel reads."""

    def __init__(self, native: Native, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self._native = native
        self._packed = native.pack(weight)

    @property
    def words(self) -> tuple[int, int]:
        """Address of the packed weight, and the code of its type, for kernels over many weights."""
        return self._packed.data_ptr(), DTYPE_CODES[self._packed.dtype]

    def apply(self, x: Tensor) -> Tensor:
        """`[T, in]` -> `[T, out]`."""
        return self._native.linear(x, self._packed, self.out_features)

    def weight_rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end), float32."""
        return self._native.unpack_rows(self._packed, self.in_features, begin, end).float()


class TiledLinear(BaseLinear):
    """A bfloat16 base weight in tiles, as bfloat16 dot products read it."""

    def __init__(self, native: Native, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self._native = native
        self._packed = native.pack_tiles(weight)

    @property
    def words(self) -> tuple[int, int]:
        """See PackedLinear."""
        return self._packed.data_ptr(), IN_TILES

    def apply(self, x: Tensor) -> Tensor:
        """`[T, in]` -> `[T, out]`."""
        return self._native.linear_tiles(x, self._packed, self.out_features)

    def weight_rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end), float32."""
        return self._native.unpack_tile_rows(self._packed, self.in_features, begin, end).float()


class FixedLinear(BaseLinear):
    """A base weight in fixed point: integers, and a power of two for each block of at most 256
    inputs of an output."""

    def __init__(self, native: Native, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self._native = native
        self._packed = native.pack_fixed(weight)

    @property
    def words(self) -> tuple[int, int]:
        """See PackedLinear."""
        return self._packed.data_ptr(), IN_FIXED

    def apply(self, x: Tensor) -> Tensor:
        """`[T, in]` -> `[T, out]`."""
        return self._native.linear_fixed(x, self._packed, self.out_features)

    def weight_rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end), float32."""
        return self._native.unpack_fixed_rows(self._packed, self.in_features, begin, end)


GATES = frozenset({Operation.SILU, Operation.GELU_TANH})
"""Activations that kernels can apply to gates."""


def are_joined(num_outputs: int, operation: Operation | None) -> bool:
    """Whether a kernel can multiply gates and other outputs, `num_outputs` in all: the gates fill
    whole groups of 16."""
    return operation in GATES and num_outputs % (2 * TILE_ROWS) == 0


def _places_of_gates(num_outputs: int) -> Tensor:
    """int64 `[num_outputs]`: where each of the gates and of the outputs that they multiply is
    packed, in groups of 16 gates and their 16 outputs."""
    return torch.arange(num_outputs).view(-1, 2, TILE_ROWS).transpose(0, 1).flatten()


def _rows_of_gates(
    unpack: Callable[[int, int], Tensor], num_outputs: int, begin: int, end: int
) -> Tensor:
    """Rows [begin, end) of a weight of gates, float32. `unpack` gives packed rows: about twice as
    many at a time as are wanted, since gates alternate with the outputs that they multiply."""
    if begin == end:
        return unpack(0, 1)[:0].float()
    middle = num_outputs // 2
    if begin < middle < end:  # the last gates lie far from the first of the other outputs
        halves = (begin, middle), (middle, end)
        return torch.cat([_rows_of_gates(unpack, num_outputs, *half) for half in halves])
    places = _places_of_gates(num_outputs)[begin:end]
    first, last = int(places.min()), int(places.max())
    return unpack(first, last + 1)[places - first].float()


class GateLinear(BaseLinear):
    """Gates and as many outputs that they multiply, `[2 * width, in]`, packed in tiles of 16 gates
    and their 16 outputs, so that one pass makes the products of both."""

    def __init__(self, native: Native, weight: Tensor, operation: Operation) -> None:
        assert are_joined(len(weight), operation), (weight.shape, operation)
        self.out_features, self.in_features = weight.shape
        self._native = native
        self.operation = operation
        groups = weight.view(2, -1, TILE_ROWS, self.in_features).transpose(0, 1)
        self._packed = native.pack_tiles(groups.reshape(weight.shape))

    def apply(self, x: Tensor) -> Tensor:
        """`[T, in]` -> `[T, 2 * width]`, all gates first."""
        return self._product(Operation.COPY, x, self.out_features)

    def gated(self, x: Tensor) -> Tensor:
        """See `JoinedGate`."""
        return self._product(self.operation, x, self.out_features // 2)

    def _product(self, operation: Operation, x: Tensor, num_outputs: int) -> Tensor:
        y = new_rows(len(x), num_outputs, x.dtype)
        rows = x, row_stride(x), self._packed, y, row_stride(y)
        self._native.call("linear_gates", operation, *rows, *x.shape, self.out_features // 2)
        return y

    def weight_rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end), float32."""
        unpack = partial(self._native.unpack_tile_rows, self._packed, self.in_features)
        return _rows_of_gates(unpack, self.out_features, begin, end)


class PlainLinear(BaseLinear):
    """A bfloat16 weight in the order of its rows, for products of few rows on AMX. A head that is
    tied to the embedding needs no copy of it."""

    def __init__(self, native: Native, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        assert self.fits(weight), (weight.dtype, weight.shape)
        self._native = native
        self._weight = weight.contiguous()
        native.weights.add(self._weight)

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Whether the kernel reads a weight of this dtype and shape."""
        is_whole = weight.shape[1] % TILE_INPUTS == 0 and len(weight) < MAX_PLAIN_OUTPUTS
        return weight.dtype is torch.bfloat16 and is_whole

    def apply(self, x: Tensor) -> Tensor:
        """`[T, in]` -> `[T, out]`."""
        return self._product(x, x.dtype)

    def apply_float32(self, x: Tensor) -> Tensor:
        """`[T, in]` -> float32 `[T, out]`, rounded to bfloat16."""
        return self._product(x, torch.float32)

    def _product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        y = torch.empty(len(x), self.out_features, dtype=dtype)
        self._call("linear_plain", x, y, dtype)
        return y

    def best(self, x: Tensor) -> Tensor:
        """See `ChoosesBest`."""
        outputs = torch.empty(len(x), dtype=torch.int64)
        self._call("best_plain", x, outputs)
        return outputs

    def _call(self, kernel: str, x: Tensor, result: Tensor, *dtype: torch.dtype) -> None:
        assert x.dtype is torch.bfloat16, x.dtype
        sizes = *x.shape, self.out_features
        self._native.call(kernel, x.contiguous(), self._weight, result, *dtype, *sizes)

    def weight_rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end), float32."""
        return self._weight[begin:end].float()


def is_readable(weight: CodedWeight) -> bool:
    """Whether the kernel reads the codes: integers or float8, in groups that end where blocks
    end."""
    return weight.kind is not None and _block_size(weight) is not None


class CodedLinear(BaseLinear):
    """A weight that stays in codes."""

    def __init__(self, native: Native, weight: CodedWeight) -> None:
        block_size = _block_size(weight)
        assert block_size is not None and weight.kind is not None, weight.scheme
        kind = KINDS[weight.kind]
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self._native = native
        self._order = weight.order
        codes, zeros, zero = weight.codes.view(torch.uint8), weight.zeros, 0
        if kind is CodeKind.INT8:
            codes, zero = codes ^ 0x80, 128
            zeros = None if zeros is None else zeros + zero
        elif kind is CodeKind.INT4 and weight.table is not None:
            zero = -int(weight.table[0])
        if zeros is not None and zeros.bfloat16().float().equal(zeros):
            zeros = zeros.bfloat16()
        self._weight = PackedCodes(
            self.out_features,
            self.in_features,
            kind,
            native.pack_codes(codes, kind),
            _in_panels(weight.scales),
            None if zeros is None else _in_panels(zeros),
            zero,
            min(weight.group_size, self.in_features),
            block_size,
        )
        self._words = torch.tensor(self._weight.words)

    @property
    def words(self) -> tuple[int, int] | None:
        """See PackedLinear; None if inputs must be put into another order first."""
        return None if self._order is not None else (self._words.data_ptr(), IN_CODES)

    def apply(self, x: Tensor) -> Tensor:
        """`[T, in]` -> `[T, out]`."""
        return self._native.linear_codes(self._ordered(x), self._weight)

    def apply_gates(self, operation: Operation, x: Tensor) -> Tensor:
        """See `Native.gate_codes`."""
        return self._native.gate_codes(operation, self._ordered(x), self._weight)

    def best(self, x: Tensor) -> Tensor:
        """See `ChoosesBest`."""
        return self._native.best_codes(self._ordered(x), self._weight)

    def _ordered(self, x: Tensor) -> Tensor:
        return x if self._order is None else x[:, self._order]

    def weight_rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end), float32."""
        own = self._weight
        first, last = begin // PANEL, -(-end // PANEL)
        codes = _unpacked(own, first, last)
        zeros = None if own.zeros is None else _out_of_panels(own.zeros[first:last])
        if own.kind is CodeKind.FLOAT8:
            values = codes.contiguous().view(FLOAT8).float()
        else:
            values = codes.float() - (own.zero if zeros is None else 0)
        scales = _out_of_panels(own.scales[first:last])
        rows = scaled(values, zeros, scales, own.group_size, self._order)
        return rows[begin - first * PANEL : end - first * PANEL]


class CodedGate(BaseLinear):
    """Gates and as many outputs that they multiply, `[2 * width, in]`, which stay in codes."""

    def __init__(self, native: Native, weight: CodedWeight, operation: Operation) -> None:
        assert are_joined(weight.out_features, operation), (weight.out_features, operation)
        self.out_features, self.in_features = weight.out_features, weight.in_features
        order = _places_of_gates(self.out_features).argsort()
        self._packed = CodedLinear(native, weight.rows(order))
        self._operation = operation

    def apply(self, x: Tensor) -> Tensor:
        """`[T, in]` -> `[T, 2 * width]`, all gates first."""
        return self._packed.apply_gates(Operation.COPY, x)

    def gated(self, x: Tensor) -> Tensor:
        """See `JoinedGate`."""
        return self._packed.apply_gates(self._operation, x)

    def weight_rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end), float32."""
        return _rows_of_gates(self._packed.weight_rows, self.out_features, begin, end)


def _block_size(weight: CodedWeight) -> int | None:
    """Number of inputs that are summed before they are scaled; None = none divides the groups."""
    sizes = (256, *BLOCK_SIZES) if weight.kind == "int8" else BLOCK_SIZES
    if weight.group_size >= weight.in_features:
        return sizes[0]
    return next((size for size in sizes if weight.group_size % size == 0), None)


def _in_panels(values: Tensor) -> Tensor:
    """`[out, groups]` -> `[panels, groups, 32]`, with zeros after the last output."""
    padded = F.pad(values, (0, 0, 0, -len(values) % PANEL))
    return padded.view(-1, PANEL, values.shape[1]).transpose(1, 2).contiguous()


def _out_of_panels(values: Tensor) -> Tensor:
    """float32 `[out, groups]`, including the padding after the last output."""
    return values.transpose(1, 2).reshape(-1, values.shape[1]).float()


def _unpacked(weight: PackedCodes, first: int, last: int) -> Tensor:
    """uint8 `[outputs of panels first to last - 1, in]`."""
    num_quads = -(-weight.in_features // QUAD)
    if weight.kind is CodeKind.FLOAT8:
        pairs = weight.codes.view(-1, num_quads, 2, 2, PANEL // 2, QUAD // 2)[first:last]
        codes = pairs.permute(0, 2, 4, 1, 3, 5)
        return codes.reshape(-1, num_quads * QUAD)[:, : weight.in_features]
    if weight.kind is CodeKind.INT8:
        codes = weight.codes.view(-1, num_quads, PANEL, QUAD)[first:last]
    else:
        halves = weight.codes.view(-1, num_quads, PANEL // 2, QUAD)[first:last]
        codes = torch.cat((halves & 0x0F, halves >> 4), dim=2)
    codes = codes[..., [0, 2, 1, 3]]  # `byte_of` of native/src/codes.h
    return codes.transpose(1, 2).reshape(-1, num_quads * QUAD)[:, : weight.in_features]
