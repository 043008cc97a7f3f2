"""Torch's sums, products and copies in a program, as calls of a kernel with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from loraplex_services.worker.native.elementwise import Operation, compute

_ATEN = torch.ops.aten
_COPIES = (_ATEN.clone.default, _ATEN._to_copy.default)
_FRESH = {_ATEN.add.Tensor: Operation.ADD, _ATEN.mul.Tensor: Operation.MULTIPLY}
_IN_PLACE = {
    _ATEN.add_.Tensor: Operation.ADD,
    _ATEN.mul_.Tensor: Operation.MULTIPLY,
    _ATEN.copy_.default: Operation.COPY,
}


class Arithmetic:
    """Records some of torch's operators as calls of kernels."""

    def __init__(
        self, kernels: Any, allocate: Callable[[Sequence[int], torch.dtype], Tensor]
    ) -> None:
        """`kernels`: as `elementwise.compute` takes them; `allocate`: makes results."""
        self._kernels = kernels
        self._allocate = allocate
        self.constants: dict[float, Tensor] = {}
        """Numbers that the calls read, by value."""

    def compute(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor | None:
        """The result of an operator of torch; None if it is none of these, or not of a form that
        the kernel has."""
        if function in _COPIES:
            return self._copy(args[0], kwargs.get("dtype") or args[0].dtype)
        if function is _ATEN.cat.default:
            return self._join(*args)
        if function in _FRESH and not kwargs:
            a, b = map(self._operand, args)
            y = self._allocate(torch.broadcast_shapes(a.shape, b.shape), torch.result_type(*args))
            return y if compute(self._kernels, _FRESH[function], y, a, b) else None
        if function in _IN_PLACE and not kwargs:
            y, operation, b = args[0], _IN_PLACE[function], self._operand(args[1])
            a = b if operation is Operation.COPY else y
            return y if compute(self._kernels, operation, y, a, b) else None
        return None

    def _copy(self, x: Tensor, dtype: torch.dtype) -> Tensor | None:
        y = self._allocate(x.shape, dtype)
        return y if compute(self._kernels, Operation.COPY, y, x, x) else None

    def _join(self, parts: Sequence[Tensor], dim: int = 0) -> Tensor | None:
        size = list(parts[0].shape)
        size[dim] = sum(part.shape[dim] for part in parts)
        y, begin = self._allocate(size, parts[0].dtype), 0
        for part in parts:
            end = begin + part.shape[dim]
            own = y.narrow(dim, begin, end - begin)
            if part.dtype is not y.dtype or not compute(
                self._kernels, Operation.COPY, own, part, part
            ):
                return None
            begin = end
        return y

    def _operand(self, value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return value
        if value not in self.constants:
            self.constants[value] = torch.tensor([value], dtype=torch.float32)
        return self.constants[value]
