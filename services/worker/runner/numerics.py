"""Chooses a worker's device, dtype and number of threads, and computes the fingerprint of its
arithmetic."""

from __future__ import annotations

import hashlib
import os

import torch

from loraplex.errors import InvalidRequest
from loraplex_services.worker.cores import usable_cores
from loraplex_services.worker.native.isa import half_is_fast

FLOAT_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The types by their names in `--dtype` and `--kv-cache-dtype`."""


def require_ieee_float32() -> None:
    """Make torch compute float32 products on CUDA in float32, not in TF32.

    This is torch's default, which TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 changes: some images set it.
    """
    torch.set_float32_matmul_precision("highest")


def resolve_device(name: str) -> torch.device:
    """`auto` = CUDA if it works, else the CPU. From then on, float32 on CUDA is IEEE."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise InvalidRequest.field("device", name, "must be auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest.field("device", name, _no_cuda(torch.version.cuda))
    if name == "cuda":
        require_ieee_float32()
    return torch.device(name)


def _no_cuda(cuda: str | None) -> str:
    """Why there is no device, given the version of CUDA that torch was built for."""
    if cuda is None:
        return "this torch finds no CUDA device; use cpu, or install a CUDA build of torch"
    return (
        f"this torch finds no CUDA device, although it is built for CUDA {cuda}; check that the "
        "machine has NVIDIA's driver and that the container was given a GPU, or use cpu"
    )


def resolve_dtype(name: str, device: torch.device, prefers_half: bool = False) -> torch.dtype:
    """`auto` = bfloat16 on CUDA, and on a CPU where `prefers_half` (see below); else float32."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" or prefers_half else torch.float32
    if name not in FLOAT_DTYPES:
        known = ", ".join(("auto", *FLOAT_DTYPES))
        raise InvalidRequest.field("dtype", name, f"must be one of {known}")
    return FLOAT_DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without the prefix `torch.`."""
    return str(dtype).removeprefix("torch.")


WEIGHT_BYTES_PER_THREAD = 32 * 1024 * 1024
"""Bytes of weights for one thread. With fewer, a thread spends more time at barriers than in
products. Measured on two shared cores: a 1.6M-parameter base with 32 rows of ten adapters took 49
ms a step with one thread, 783 ms with two."""


def choose_threads(weight_bytes: int, num_cores: int) -> int:
    """Number of threads of one operation: one for each 32 MiB of weights, at most one for each
    core."""
    return max(1, min(num_cores, weight_bytes // WEIGHT_BYTES_PER_THREAD))


def prefers_half(weight_bytes: int, is_half: bool, cpu_isa: str) -> bool:
    """Whether whole steps on this CPU are faster in bfloat16, for this base, than in float32.

    They are where the kernels have bfloat16 dot products, or products in fixed point
    (`native/isa.py`). Elsewhere float32 arithmetic on half-precision weights reads the same bytes.
    Below one thread's worth of weights a step is mostly overhead and float32 costs nothing.

    Args:
        weight_bytes: of the base's files.
        is_half: the base is published in half precision; float32 bases are not rounded unasked.
        cpu_isa: the setting.
    """
    return is_half and weight_bytes >= WEIGHT_BYTES_PER_THREAD and half_is_fast(cpu_isa)


def set_threads(weight_bytes: int, num_ranks: int = 1) -> None:
    """Apply `choose_threads` to this process, unless OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(choose_threads(weight_bytes, usable_cores() // num_ranks))


def fingerprint(
    base_fingerprint: str, device: torch.device, dtype: torch.dtype, operators: str
) -> str:
    """Names everything that decides a float32 result. Equal fingerprints give equal tokens.

    `operators` is `Operators.name`.
    """
    chip = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        chip = torch.cuda.get_device_name(device)
    parts = (base_fingerprint, torch.__version__, device.type, chip, dtype_name(dtype), operators)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
