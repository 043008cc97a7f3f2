"""A quantised weight in one form, whatever its file format.

W[o, order[i]] = (value(codes[o, i]) - zeros[o, g]) * scales[o, g]        g = i // group_size
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from loraplex_services.worker.ops.linear.torch import WeightRows
from loraplex_services.worker.types.sharding import Span

Kind = Literal["int4", "int8", "fp8"]
FLOAT8 = torch.float8_e4m3fn
CHUNK_ROWS = 4096
INTEGERS = torch.arange(16, dtype=torch.float32)
"""The table of four-bit codes that are their own values."""


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """`[out, in]`; made when a base is loaded, and then packed for a kernel or dequantised."""

    scheme: str
    """Names the format and its parameters."""
    codes: Tensor
    """`[out, in]`: int8 and float8 are values; uint8 are indices of `table`."""
    scales: Tensor
    """`[out, groups]`, of the floating-point type in the files."""
    group_size: int
    """Inputs that share a scale; the last group may have fewer."""
    zeros: Tensor | None = None
    """float32 `[out, groups]`; integral, except in the K types of GGUF."""
    table: Tensor | None = None
    """float32 `[16]`, of uint8 codes."""
    order: Tensor | None = None
    """int64 `[in]`: which input each column belongs to; None = its own."""
    published: WeightRows | None = None
    """The weight before it was quantised here, where an adapter may store a copy of it."""

    @property
    def out_features(self) -> int:
        """Rows."""
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        """Columns."""
        return self.codes.shape[1]

    @property
    def kind(self) -> Kind | None:
        """The kind of codes for kernels; None = no kernel reads them."""
        if self.table is not None:
            known = (INTEGERS, INTEGERS - 8)
            return "int4" if any(self.table.cpu().equal(table) for table in known) else None
        if self.codes.dtype is torch.int8:
            return "int8"
        return "fp8" if self.codes.dtype is FLOAT8 and self.zeros is None else None

    def outputs(self, spans: Sequence[Span], num_rows: int = 0) -> CodedWeight:
        """Some rows, joined, and zeros after them up to `num_rows`."""

        def cut(x: Tensor) -> Tensor:
            own = torch.cat([x[begin:end] for begin, end in spans])
            missing = num_rows - len(own)
            return torch.cat((own, own.new_zeros(missing, x.shape[1]))) if missing > 0 else own

        zeros = None if self.zeros is None else cut(self.zeros)
        return replace(
            self, codes=cut(self.codes), scales=cut(self.scales), zeros=zeros, published=None
        )

    def rows(self, numbers: Tensor) -> CodedWeight:
        """The rows of these numbers, int64 `[n]`."""
        zeros = None if self.zeros is None else self.zeros[numbers]
        codes, scales = self.codes[numbers], self.scales[numbers]
        return replace(self, codes=codes, scales=scales, zeros=zeros, published=None)

    def inputs(self, begin: int, end: int) -> CodedWeight:
        """Some columns. If they divide groups, or are not in order, each has a scale of its own,
        which no kernel reads."""
        size, order = self.group_size, self.order
        columns: slice | Tensor = slice(begin, end)
        groups: slice | Tensor = slice(begin // size, -(-end // size))
        if order is None and (begin % size == 0 or begin // size == (end - 1) // size):
            size = min(size, end - begin)
        else:
            inputs = torch.arange(self.in_features, device=self.codes.device)
            if order is None:
                columns = inputs[begin:end]
            else:
                columns = inputs[(order >= begin) & (order < end)]
                order = order[columns] - begin
            groups, size = columns // size, 1
        return replace(
            self,
            codes=self.codes[:, columns].contiguous(),
            scales=self.scales[:, groups].contiguous(),
            zeros=None if self.zeros is None else self.zeros[:, groups].contiguous(),
            group_size=size,
            order=order,
        )

    def dequantised(self) -> Tensor:
        """float32 `[out, in]`: exactly what the codes say, rounded once."""
        values = torch.empty(self.codes.shape, device=self.codes.device)
        for begin in range(0, self.out_features, CHUNK_ROWS):  # some arrays of this size at once
            values[begin : begin + CHUNK_ROWS] = self._rows(slice(begin, begin + CHUNK_ROWS))
        return values

    def _rows(self, rows: slice) -> Tensor:
        codes = self.codes[rows]
        if self.table is not None:
            values = self.table.to(codes.device)[codes.int()]
        else:
            values = codes.float()
        zeros = None if self.zeros is None else self.zeros[rows]
        return scaled(values, zeros, self.scales[rows], self.group_size, self.order)


def scaled(
    values: Tensor, zeros: Tensor | None, scales: Tensor, group_size: int, order: Tensor | None
) -> Tensor:
    """Rows of a weight, float32 `[n, in]`, from the values of their codes."""
    groups = torch.arange(values.shape[1], device=values.device) // group_size
    if zeros is not None:
        values = values - zeros.float()[:, groups]
    values = values * scales.float()[:, groups]
    if order is None:
        return values
    return torch.empty_like(values).index_copy_(1, order.to(values.device), values)


def joined(parts: list[CodedWeight]) -> CodedWeight | None:
    """The weights stacked by outputs, each with its own scales; None if they differ in what a
    kernel reads once for all rows."""
    first = parts[0]
    if not all(_are_alike(part, first) for part in parts[1:]):
        return None
    scales = [part.scales for part in parts]
    if len({part.scales.dtype for part in parts}) > 1:
        scales = [part.float() for part in scales]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return replace(
        first,
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat(scales),
        zeros=torch.cat(zeros) if zeros else None,
    )


def _are_alike(a: CodedWeight, b: CodedWeight) -> bool:
    return (
        a.codes.dtype is b.codes.dtype
        and a.group_size == b.group_size
        and (a.zeros is None) == (b.zeros is None)
        and a.scales.shape[1] == b.scales.shape[1]
        and _equal(a.table, b.table)
        and _equal(a.order, b.order)
    )


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.equal(b)
