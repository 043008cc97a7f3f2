"""Which operators a base is computed with."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from loraplex.errors import InvalidRequest
from loraplex_services.worker.native.isa import TORCH
from loraplex_services.worker.runner.backends import choose_operators

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_vanilla_is_plain_torch_on_every_device(device, dtype):
    operators = choose_operators(device, dtype, "auto", "vanilla")
    assert operators.name == "torch"
    assert operators.draws is not choose_operators(CUDA, dtype, "auto").draws


def test_a_gpu_computes_with_triton_by_default_and_by_name():
    for name in ("auto", "triton"):
        assert choose_operators(CUDA, torch.bfloat16, "auto", name).name == "triton"


@pytest.mark.parametrize(
    ("device", "dtype", "isa", "backend", "reason"),
    [
        (CPU, torch.float32, TORCH, "cpu", "LORAPLEX_CPU_ISA"),
        (CPU, torch.float16, "auto", "cpu", "float32 or bfloat16"),
        (CUDA, torch.float32, "auto", "cpu", "device cpu"),
        (CPU, torch.bfloat16, "auto", "flashinfer", "device cuda; use auto"),
        (CUDA, torch.float32, "auto", "flashinfer", "float16 and bfloat16; use triton"),
        (CUDA, torch.float32, "auto", "flashinfr", "flashinfer, or a name"),
        pytest.param(
            *(CUDA, torch.bfloat16, "auto", "flashinfer", "flashinfer-python.*use triton"),
            marks=pytest.mark.skipif(
                importlib.util.find_spec("flashinfer") is not None, reason="it is installed"
            ),
        ),
        pytest.param(
            *(CPU, torch.float32, "auto", "triton", "device cuda"),
            marks=pytest.mark.skipif(INTERPRETING, reason="the interpreter runs Triton on a CPU"),
        ),
    ],
)
def test_a_backend_that_cannot_compute_is_refused_with_the_reason(
    device, dtype, isa, backend, reason
):
    with pytest.raises(InvalidRequest, match=f"attention_backend.*{reason}"):
        choose_operators(device, dtype, isa, backend)


def test_float32_on_cuda_is_ieee_even_where_the_image_allows_tf32():
    script = (
        "import torch\n"
        "from loraplex_services.worker.runner.numerics import require_ieee_float32\n"
        "before = torch.backends.cuda.matmul.allow_tf32\n"
        "require_ieee_float32()\n"
        "print(before, torch.backends.cuda.matmul.allow_tf32)\n"
    )
    environ = {**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False"]
