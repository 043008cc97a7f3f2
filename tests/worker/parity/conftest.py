"""What the parity tests share.

Torch uses one thread, because results must not depend on how many threads a machine has.
"""

from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch

from tests.worker.parity import runners
from tests.worker.parity.near_tie import Verdict


def pytest_addoption(parser: pytest.Parser) -> None:
    """Known where this folder is named on the command line; elsewhere runners are on the CPU."""
    parser.addoption("--device", choices=runners.DEVICES, default="cpu", help="of our runners")


def pytest_configure(config: pytest.Config) -> None:
    runners.use_device(config.getoption("--device", "cpu"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadscope`, the tests of one base run in one process, which makes it once."""
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            test, _, base = nodeid.partition("[")
            return f"{test.partition('::')[0]}[{base}"

    return Scheduling(config, log)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def no_model_cards():
    """Nobody reads them here, and for each PEFT compiles a template: half the time of a save."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peft.PeftModel, "create_or_update_model_card", lambda *_: None)
        yield


@pytest.fixture(scope="session")
def near_ties() -> Iterator[Verdict]:
    """The positions and near ties of all parity tests of this process, judged after the last."""
    total = Verdict()
    yield total
    if total.num_positions:
        total.finish()
