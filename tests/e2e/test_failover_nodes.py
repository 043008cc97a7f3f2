"""kill -9 of a rank on another machine under load: no stream fails while a second worker serves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.e2e.stack import ADAPTERS, BASE, BASE_ID, REPO, Stack, clean_environment, eventually
from tests.e2e.test_failover import (
    RANK_MODULE,
    Load,
    both_ready,
    kill_under_load,
    undisturbed,
)
from tests.processes import processes_running
from tests.servers import free_address

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@contextmanager
def service(name: str, log: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    with log.open("a") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", f"loraplex_services.{name}"],
            env=clean_environment() | variables,
            stderr=file,
            text=True,
            cwd=REPO,
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[tuple[Stack, subprocess.Popen[str]]]:
    """A gateway before two workers, and the second machine of one of them."""
    token, state = tmp_path / "token", tmp_path / "state"
    token.write_text("secret-of-the-services")
    log = tmp_path / "state.log"
    registry, http, grpc, *workers = (free_address() for _ in range(5))
    shared = {
        "LORAPLEX_OBJECTS": f"file://{tmp_path}/objects",
        "LORAPLEX_SERVICE_TOKEN_FILE": str(token),
    }
    worker = {
        **shared,
        "LORAPLEX_MODEL": str(BASE),
        "LORAPLEX_SERVED_MODEL_NAME": BASE_ID,
        "LORAPLEX_KV_MEMORY": "64MiB",
        "LORAPLEX_TENSOR_PARALLEL": "2",
    }
    nodes = {**worker, "LORAPLEX_NNODES": "2", "LORAPLEX_MASTER_ADDR": free_address()}
    with ExitStack() as services:
        start = services.enter_context
        start(
            service(
                *("registry", log),
                **shared,
                LORAPLEX_REGISTRY_LISTEN=registry,
                LORAPLEX_STATE_DIR=str(state),
            )
        )
        start(service("worker", log, **nodes, LORAPLEX_WORKER_LISTEN=workers[0]))
        start(service("worker", log, **worker, LORAPLEX_WORKER_LISTEN=workers[1]))
        other = start(service("worker", log, **nodes, LORAPLEX_NODE_RANK="1"))
        gateway = start(
            service(
                *("gateway", log),
                LORAPLEX_SERVICE_TOKEN_FILE=str(token),
                LORAPLEX_REGISTRY_ADDRESS=registry,
                LORAPLEX_WORKERS=",".join(workers),
                LORAPLEX_GATEWAY_LISTEN=grpc,
                LORAPLEX_HTTP_LISTEN=http,
            )
        )
        stack = Stack(gateway, f"http://{http}", grpc, registry, state)
        eventually(lambda: is_up(stack))
        stack.publish(*ADAPTERS[:4])
        yield stack, other


def is_up(stack: Stack) -> bool:
    try:
        return both_ready(stack)
    except OSError:
        return False


@pytest.mark.timeout(400)
def test_a_killed_rank_of_another_machine_is_hidden(stack) -> None:
    served, other = stack

    def kill_rank(*_: object) -> None:
        [rank] = processes_running(other.pid, RANK_MODULE)
        rank.kill()

    kill_under_load(Load(served, undisturbed(served)), 1, kill_rank)
