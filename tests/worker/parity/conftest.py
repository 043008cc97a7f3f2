"""One thread: test machines are small, and results must not depend on how many there are."""

import peft
import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def no_model_cards():
    """Nobody reads them here, and for each PEFT compiles a template: half the time of a save."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peft.PeftModel, "create_or_update_model_card", lambda *_: None)
        yield
