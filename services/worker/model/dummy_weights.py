"""Random weights instead of those of a base, for benchmarks and tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from loraplex.errors import Unsupported
from loraplex_services.worker.model.load import StackedRows, TensorWindow
from loraplex_services.worker.ops.linear.coded import CodedWeight
from loraplex_services.worker.ops.linear.torch import WeightRows


class DummyWeights:
    """Random weights of any geometry: seeded, scaled so that activations keep their size."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)

    def has(self, name: str) -> bool:
        """False: there are no optional tensors."""
        return False

    def take(
        self,
        name: str,
        shape: Sequence[int],
        window: TensorWindow | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Ones for norms, zeros for biases, normal numbers for the rest. A window is cut from the
        complete tensor, so that all ranks have parts of the same numbers."""
        tensor = self._make(name, shape, dtype)
        return tensor if window is None else window.cut(tensor)

    def _make(self, name: str, shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
        if len(shape) == 1:
            fill = 0.0 if name.endswith("bias") else 1.0
            return torch.full(tuple(shape), fill, dtype=dtype or self.dtype, device=self._device)
        tensor = torch.empty(tuple(shape), dtype=self.dtype, device=self._device)
        return tensor.normal_(0.0, 1 / math.sqrt(shape[-1]), generator=self._generator)

    def half_dtype(self, name: str) -> torch.dtype | None:
        """None: there are no files."""
        return None

    def take_codes(self, name: str, shape: Sequence[int]) -> CodedWeight | None:
        """None: there are no codes."""
        return None

    def rows_in_files(self, parts: Sequence[tuple[str, int]], num_inputs: int) -> WeightRows:
        """There are no files, so adapters that depend on the base's weights are refused."""
        return StackedRows(parts, num_inputs, _refuse_to_read)

    def finish(self) -> None:
        """Does nothing: no tensor can be left over."""


def _refuse_to_read(name: str, num_rows: int, window: TensorWindow) -> NoReturn:
    why = (
        "this adapter depends on the base's weights (DoRA, trained biases or replaced weights), "
        "which tensor-parallel ranks read from files; take load-format out of LORAPLEX_DEBUG"
    )
    raise Unsupported.field("load_format", "dummy", why)
