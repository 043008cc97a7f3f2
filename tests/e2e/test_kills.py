"""A killed service comes back by itself and nothing acknowledged is lost."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

from demo.skills import held_out
from tests.e2e.stack import ADAPTERS, Stack, eventually, start

NAME = ADAPTERS[0].name if ADAPTERS else ""


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    running = start(tmp_path_factory.mktemp("fragile") / "state")
    try:
        running.publish(*ADAPTERS[:3])
        yield running
    finally:
        assert running.stop() == 0


def answers_right(stack: Stack) -> bool:
    prompt, want = held_out(NAME, 1, seed=21)[0]
    body = {"model": NAME, "prompt": prompt, "temperature": 0, "max_tokens": 32}
    try:
        status, answer = stack.post("/v1/completions", body)
    except OSError:
        return False
    return status == 200 and answer["choices"][0]["text"] == want


def list_works(stack: Stack) -> bool:
    done = stack.run_registry("list", "--json", check=False)
    names = {json.loads(line)["name"] for line in done.stdout.splitlines() if line}
    return done.returncode == 0 and any(NAME in name for name in names)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "module",
    [
        "loraplex_services.registry",
        "loraplex_services.gateway",
        "loraplex_services.worker",
        "engine",
    ],
)
def test_a_killed_service_comes_back_and_loses_nothing(fragile: Stack, module: str) -> None:
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            answers_right(fragile)

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        name = "loraplex_services.worker.engine.process" if module == "engine" else module
        victim = fragile.service(name)
        victim.kill()
        eventually(lambda: not victim.is_running() or victim.status() == "zombie")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    eventually(lambda: answers_right(fragile))
    eventually(lambda: list_works(fragile))
    eventually(lambda: fragile.get("/readyz")[0] == 200)
