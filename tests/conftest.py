"""What every test shares, and nothing of any one area: areas have a conftest.py of their own."""

from __future__ import annotations

import sys

import hypothesis
import pytest

# The same examples on every run: a failure must be the change's, never the draw's.
hypothesis.settings.register_profile("seeded", derandomize=True, database=None)
hypothesis.settings.load_profile("seeded")


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """Keep torch to one thread, so that tests share small machines and add in one order.

    Torch is not imported for this: the tests of its torch-free neighbours must run without it.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)
