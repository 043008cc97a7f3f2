"""Kernels run here under Triton's interpreter or on a CUDA device, whichever the process has.

Triton decides when it is imported, so a plain CPU run of the suite leaves these files alone and
`tests/worker/kernels/test_triton.py` runs them in a process of their own.
"""

import os

import pytest
import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if INTERPRETING or torch.cuda.is_available() else ["test_*.py"]


def pytest_collection_modifyitems(items):
    if not INTERPRETING:
        for item in items:
            if "worker/kernels/triton/" in str(item.path):
                item.add_marker(pytest.mark.gpu)


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
