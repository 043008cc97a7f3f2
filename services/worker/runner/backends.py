"""Chooses the operators of a base (Triton, C++ or torch) and their threads."""

from __future__ import annotations

import importlib

import torch

from loraplex.errors import InvalidRequest
from loraplex_services.worker.layers.native_operators import NativeOperators
from loraplex_services.worker.layers.operators import Operators
from loraplex_services.worker.native.bindings import load_native
from loraplex_services.worker.native.library import ACTIVATION_DTYPES
from loraplex_services.worker.ops.attention.backend import AttentionMaker
from loraplex_services.worker.ops.attention.registered import registered_backend
from loraplex_services.worker.ops.launch import INTERPRETING
from loraplex_services.worker.runner.numerics import set_threads

BUILT_IN = ("auto", "vanilla", "cpu", "triton", "flashinfer")
FLASHINFER = "flashinfer"
HALF_DTYPES = (torch.float16, torch.bfloat16)
"""The dtypes in which FlashInfer computes."""
REFUSALS = {
    "triton": "Triton kernels need the device cuda",
    "cpu": "compiled kernels need the device cpu, float32 or bfloat16, and a LORAPLEX_CPU_ISA "
    "other than torch",
}
"""Why a backend that exists cannot compute here."""


def choose_operators(
    device: torch.device, dtype: torch.dtype, cpu_isa: str, attention_backend: str = "auto"
) -> Operators:
    """The operators of a base.

    Args:
        attention_backend: `vanilla` = plain torch on any device, which shares no kernel with the
            others and is what they are compared with; `cpu` = compiled C++; `triton` = Triton, on
            a GPU or under its interpreter; `flashinfer` = FlashInfer's attention, and everything
            else as for `triton`; `auto` = Triton on a GPU (or under its interpreter), C++ on a CPU
            that has kernels for the dtype, else torch; the name of a registered backend = its
            attention, and everything else as for `auto`.

    Raises: InvalidRequest when the backend does not exist or cannot compute here.
    """
    if attention_backend not in BUILT_IN:
        return _with_registered(device, dtype, cpu_isa, attention_backend)
    if attention_backend == FLASHINFER:
        return _with_flashinfer(device, dtype)
    is_gpu = device.type == "cuda"
    is_auto = attention_backend == "auto"
    by_default = is_gpu or (INTERPRETING and cpu_isa == "auto")
    can_be_triton = is_gpu or INTERPRETING
    if (is_auto and by_default) or (attention_backend == "triton" and can_be_triton):
        from loraplex_services.worker.layers.triton_operators import TritonOperators

        return TritonOperators()
    can_be_native = not is_gpu and dtype in ACTIVATION_DTYPES
    if can_be_native and (is_auto or attention_backend == "cpu"):
        native = load_native(cpu_isa)
        if native is not None:
            return NativeOperators(native, dtype)
    if is_auto or attention_backend == "vanilla":
        return Operators()
    raise _refused(attention_backend, REFUSALS[attention_backend])


def _with_registered(
    device: torch.device, dtype: torch.dtype, cpu_isa: str, name: str
) -> Operators:
    backend = registered_backend(name)
    if backend is None:
        why = "must be auto, vanilla, cpu, triton, flashinfer, or a name that a package registers"
        raise _refused(name, why)
    operators = choose_operators(device, dtype, cpu_isa)
    operators.attention_maker = AttentionMaker(backend, name=name)
    return operators


def _with_flashinfer(device: torch.device, dtype: torch.dtype) -> Operators:
    if device.type != "cuda":
        raise _refused(FLASHINFER, "FlashInfer needs the device cuda; use auto")
    if dtype not in HALF_DTYPES:
        raise _refused(FLASHINFER, "FlashInfer computes float16 and bfloat16; use triton")
    try:
        library = importlib.import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as error:
        why = (
            f"the package flashinfer-python cannot be imported ({error}); install it or use triton"
        )
        raise _refused(FLASHINFER, why) from error
    from loraplex_services.worker.layers.triton_operators import TritonOperators
    from loraplex_services.worker.ops.attention.flashinfer import flashinfer_attention

    operators = TritonOperators()
    operators.attention_maker = flashinfer_attention(
        library.BatchPrefillWithPagedKVCacheWrapper, device
    )
    return operators


def _refused(attention_backend: str, why: str) -> InvalidRequest:
    return InvalidRequest.field("attention_backend", attention_backend, why)


def share_threads(weight_bytes: int, operators: Operators, device: torch.device) -> None:
    """Threads for torch and for the kernels; torch keeps one where it does small things only.
    Ranks divide the cores."""
    if device.type != "cpu":
        return
    set_threads(weight_bytes, operators.ranks.num_local)
    if isinstance(operators, NativeOperators):
        operators.native.set_threads(torch.get_num_threads())
        torch.set_num_threads(1)
