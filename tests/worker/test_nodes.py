"""A worker whose ranks are on two machines, which are two processes here and share no files."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from safetensors.numpy import load_file, save_file

from tests.processes import processes_running
from tests.servers import free_address
from tests.worker import tiny
from tests.worker.test_rank_processes import RANK_MODULE, tokens_of
from tests.worker.worker_process import (
    PATIENCE_S,
    WorkerProcess,
    publish_adapters,
    worker_folder,
)

pytestmark = pytest.mark.e2e


@contextmanager
def two_nodes() -> Iterator[tuple[WorkerProcess, WorkerProcess, dict[str, str]]]:
    """The first machine, the second one, and the settings that both need."""
    with worker_folder() as first, worker_folder() as second:
        token = first.root / "token"
        token.write_text("secret-of-the-services")
        first.token = "secret-of-the-services"
        shared = {
            "LORAPLEX_SERVICE_TOKEN_FILE": str(token),
            "LORAPLEX_TENSOR_PARALLEL": "2",
            "LORAPLEX_NNODES": "2",
            "LORAPLEX_MASTER_ADDR": free_address(),
        }
        yield first, second, shared


async def test_a_killed_rank_of_another_machine_is_replaced() -> None:
    with two_nodes() as (first, second, shared):
        await publish_adapters(first, ["one", "two", "three"])
        second.start(**shared, LORAPLEX_NODE_RANK="1", LORAPLEX_OBJECTS="file:///nowhere")
        first.start(**shared)
        found = await tokens_of(first)
        engine = first.engine()
        assert second.process is not None
        [rank] = processes_running(second.process.pid, RANK_MODULE)
        rank.kill()
        engine.wait(PATIENCE_S)
        assert await tokens_of(first) == found
        assert first.engine().pid != engine.pid
        code, _ = second.stop(signal.SIGTERM)
        assert code == 0


@pytest.mark.long
@pytest.mark.parametrize("what", ["weights", "config", "ranks", "token", "tensor"])
def test_nodes_that_differ_say_what_differs(what: str) -> None:
    with two_nodes() as (first, second, shared):
        theirs = {**shared, "LORAPLEX_NODE_RANK": "1"}
        if what == "weights":
            shutil.rmtree(second.root / "base")
            tiny.write_base(second.root / "base", seed=5)
        elif what == "config":
            config = second.root / "base" / "config.json"
            config.write_text(config.read_text() + "\n")
        elif what == "tensor":
            tensors = load_file(second.root / "base" / "model.safetensors")
            del tensors["model.norm.weight"]
            save_file(tensors, second.root / "base" / "model.safetensors")
        elif what == "ranks":
            theirs["LORAPLEX_TENSOR_PARALLEL"] = "4"
        else:
            other = second.root / "token"
            other.write_text("another-secret")
            theirs["LORAPLEX_SERVICE_TOKEN_FILE"] = str(other)
        first.start(**shared)
        second.start(**theirs)
        code, log = second.wait()
        assert code != 0
        if what == "token":
            assert "LORAPLEX_SERVICE_TOKEN_FILE" in log
            return
        fields = {"ranks": "tensor_parallel:tensor_parallel", "tensor": "model.norm.weight"}
        field = fields.get(what, f"tensor_parallel:{what}")
        code, own_log = first.wait()
        assert code not in (0, -signal.SIGKILL)
        assert field in log and field in own_log
