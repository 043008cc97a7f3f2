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
    """Most of the interpreter's time goes into what changes nothing here: it puts its functions
    into `triton.language` anew for each call of a device function, computes, for each sum and
    product, whether it overflows, to drop the answer unless kernels run with `debug`, and works out
    the facts of a type for each value of that type."""
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
    keep_facts_of_types(interpreter)


def keep_facts_of_types(interpreter):
    """Let equal types share what their constructor computes, and tensors what they take from it."""
    from triton.language import core

    of_numpy, unwrap = interpreter._get_np_dtype, core._unwrap_if_constexpr
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    numpy_types, types = {}, {}
    plain = {int, core.tensor, core.dtype}

    def numpy_type(dtype):
        if dtype.name not in numpy_types:
            numpy_types[dtype.name] = of_numpy(dtype)
        return numpy_types[dtype.name]

    def init_type(self, element_ty, shape):
        sizes = (size.value if isinstance(size, core.constexpr) else size for size in shape)
        key = str(element_ty), getattr(element_ty, "address_space", None), *sizes
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = self.__dict__
        self.__dict__ = types[key]

    def init_tensor(self, handle, dtype):
        facts = dtype.__dict__.get("facts_of_tensors")
        if facts is None:
            make_tensor(self, handle, dtype)
            own = {name: value for name, value in self.__dict__.items() if name != "handle"}
            dtype.__dict__["facts_of_tensors"] = own
        else:
            self.__dict__.update(facts, handle=handle)

    def unwrapped(value):
        return value if type(value) in plain else unwrap(value)

    interpreter._get_np_dtype = numpy_type
    core._unwrap_if_constexpr = unwrapped
    core.block_type.__init__ = init_type
    core.tensor.__init__ = init_tensor


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
