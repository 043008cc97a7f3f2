"""What a base is computed with: Triton, C++ or torch, and by how many threads."""

from __future__ import annotations

import torch

from services.worker.kernels.launch import INTERPRETING
from services.worker.layers.native_operators import NativeOperators
from services.worker.layers.operators import Operators, TorchOperators
from services.worker.native.bindings import ACTIVATION_DTYPES, load_native
from services.worker.numerics import set_threads


def choose_operators(device: torch.device, dtype: torch.dtype, cpu_isa: str) -> Operators:
    """Triton on a GPU (or under its interpreter), C++ on a CPU that has kernels for the dtype,
    else torch."""
    if device.type == "cuda" or (INTERPRETING and cpu_isa == "auto"):
        from services.worker.layers.triton_operators import TritonOperators

        return TritonOperators()
    native = None
    if device.type == "cpu" and dtype in ACTIVATION_DTYPES:
        native = load_native(cpu_isa)
    if native is not None:
        return NativeOperators(native, dtype)
    return TorchOperators()


def share_threads(weight_bytes: int, operators: Operators, device: torch.device) -> None:
    """Threads for torch and for the kernels; torch keeps one where it does small things only."""
    if device.type != "cpu":
        return
    set_threads(weight_bytes)
    if isinstance(operators, NativeOperators):
        operators.native.set_threads(torch.get_num_threads())
        torch.set_num_threads(1)
