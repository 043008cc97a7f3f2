"""One thread: test machines are small, and results must not depend on how many there are."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)
