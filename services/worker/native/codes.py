"""A quantised weight in the form that the compiled kernels read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

from loraplex_services.worker.native.library import DTYPE_CODES


class CodeKind(IntEnum):
    """The kind of a code: an unsigned integer less its zero point, or float8 (e4m3)."""

    INT4 = 0
    INT8 = 1
    FLOAT8 = 2


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """A weight `[out, in]` as `native/src/gemm_codes.cpp` reads it."""

    out_features: int
    in_features: int
    kind: CodeKind
    codes: Tensor
    """uint8, as `Native.pack_codes` returns it."""
    scales: Tensor
    """Scales of a floating-point type, `[panels, groups, 32]`."""
    zeros: Tensor | None
    """Zero points in bfloat16 or float32, in the same shape; None = all are `zero`."""
    zero: int
    """The zero point of all codes if `zeros` is None; not used with float8."""
    group_size: int
    block_size: int
    """Inputs that are summed before they are scaled; divides `group_size`."""

    @property
    def words(self) -> tuple[int, ...]:
        """Arguments of the kernel."""
        zeros = self.zeros
        return (
            self.codes.data_ptr(),
            self.kind,
            self.scales.data_ptr(),
            DTYPE_CODES[self.scales.dtype],
            0 if zeros is None else zeros.data_ptr(),
            0 if zeros is None else DTYPE_CODES[zeros.dtype],
            self.zero,
            self.group_size,
            self.block_size,
        )
