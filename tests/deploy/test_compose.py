"""deploy/compose.yaml, run: Compose starts the images, and the demo is asked through them.

`make compose-test` runs this where Docker has the images that `make images` built.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.run import GREEDY, adapter_folders, questions
from loraplex import Credentials, InferenceClient, Publication, RegistryClient

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
FILE = Path(__file__).parents[2] / "deploy" / "compose.yaml"
SERVICES = ["gateway", "registry", "valkey", "worker"]
REGISTRY, GATEWAY = "127.0.0.1:50052", "127.0.0.1:50051"
HTTP = "http://127.0.0.1:8080"
READY_S = 120.0


def compose(*arguments: str) -> str:
    """Output of `docker compose`."""
    command = ["docker", "compose", "-p", "loraplex-test", "-f", str(FILE), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def stack() -> Iterator[None]:
    """All services, with a volume of their own."""
    try:
        compose("up", "--detach", "--pull", "never")
        asyncio.run(_publish())
        yield
    finally:
        print(compose("logs", "--tail", "30"))
        compose("down", "--volumes")


async def _publish() -> None:
    await _until_ready()
    async with RegistryClient(REGISTRY, Credentials()) as registry:
        for folder in adapter_folders():
            await registry.upload(folder, Publication(folder.name))


async def _until_ready() -> None:
    """A gateway is ready once a worker has loaded the base."""
    async with asyncio.timeout(READY_S):
        while True:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(urllib.request.urlopen, f"{HTTP}/readyz", timeout=5)
                return
            await asyncio.sleep(0.5)


async def _answers() -> list[str]:
    asked = questions([folder.name for folder in adapter_folders()])
    async with InferenceClient(GATEWAY, Credentials()) as client:
        completions = [client.complete(each.adapter, each.prompt, GREEDY) for each in asked]
        return [completion.text for completion in await asyncio.gather(*completions)]


def test_every_answer_of_the_demo_is_right() -> None:
    asked = questions([folder.name for folder in adapter_folders()])
    assert len(asked) >= 80
    assert asyncio.run(_answers()) == [each.expected for each in asked]


def test_no_service_ends_or_restarts() -> None:
    lines = compose("ps", "--format", "json").splitlines()
    states = {each["Service"]: each["State"] for each in map(json.loads, lines)}
    assert states == dict.fromkeys(SERVICES, "running")
    for name in compose("ps", "--quiet").split():
        inspected = ["docker", "inspect", "--format", "{{.RestartCount}}", name]
        count = subprocess.run(inspected, capture_output=True, text=True, check=True).stdout
        assert count.strip() == "0"


def test_a_restarted_stack_answers_as_before() -> None:
    compose("restart")
    asyncio.run(_until_ready())
    asked = questions([folder.name for folder in adapter_folders()])
    assert asyncio.run(_answers()) == [each.expected for each in asked]
