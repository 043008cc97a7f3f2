"""Kernels run here under Triton's interpreter or on a CUDA device, whichever the process has.

Triton decides when it is imported, so a plain CPU run of the suite leaves these files alone and
`tests/worker/ops/test_triton.py` runs them in a process of their own.
"""

import os
from types import SimpleNamespace

import pytest
import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if INTERPRETING or torch.cuda.is_available() else ["test_*.py"]


def pytest_collection_modifyitems(items):
    if not INTERPRETING:
        for item in items:
            if "worker/ops/triton/" in str(item.path):
                item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter():
    """Half of the interpreter's time goes into what changes nothing here: it puts its functions
    into `triton.language` anew for each call of a device function, and computes, for each sum and
    product, whether it overflows, to drop the answer unless kernels run with `debug`."""
    if not INTERPRETING:
        return
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_once(kernel):
        if id(kernel.__globals__) not in patched:
            patch(kernel)
            patched.add(id(kernel.__globals__))
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_once
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETING else "cuda")


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fill torch.empty with NaN, so that reading what nobody wrote is seen."""
    empty, empty_like = torch.empty, torch.empty_like

    def poisoned(tensor):
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poisoned(empty_like(*a, **k)))
