"""Services end under load, politely or not: whoever was let in is served, and as if undisturbed."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.e2e.stack import ADAPTERS, REPO, Stack, eventually, start
from tests.e2e.test_failover import NUM_CLIENTS, Load, bodies, both_ready, stream, workers
from tests.servers import free_port

pytestmark = [pytest.mark.long, pytest.mark.timeout(0)]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two workers and some adapters."""
    running = start(tmp_path_factory.mktemp("disturbed") / "state", "--workers", "2")
    try:
        running.publish(*ADAPTERS[:4])
        eventually(lambda: both_ready(running))
        yield running
    finally:
        assert running.stop() == 0


@pytest.fixture(scope="module")
def expected(house: Stack) -> list[tuple[str, tuple[int, ...]]]:
    """What every request answers when nothing happens."""
    return [stream(house, body) for body in bodies()]


@contextmanager
def under_load(load: Load) -> Iterator[Load]:
    """Clients run, and have been served a while when the block begins and when it ends."""
    threads = [threading.Thread(target=load.client, args=(n,)) for n in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: load.num_done >= NUM_CLIENTS)
        yield load
        done = load.num_done
        eventually(lambda: load.num_done >= done + 2 * NUM_CLIENTS)
    finally:
        load.stop.set()
        for thread in threads:
            thread.join()


def metadata_server(stack: Stack) -> psutil.Process:
    """The private server that keeps the registry's index."""
    children = psutil.Process(stack.process.pid).children(recursive=True)
    return next(c for c in children if c.name().startswith(("valkey-server", "redis-server")))


VICTIMS: dict[str, Callable[[Stack], psutil.Process]] = {
    "registry": lambda stack: stack.service("loraplex_services.registry"),
    "metadata server": metadata_server,
    "worker": lambda stack: workers(stack)[0],
}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
@pytest.mark.parametrize("name", VICTIMS)
def test_service_behind_the_gateway_ends_under_load(
    house: Stack, expected: list[tuple[str, tuple[int, ...]]], name: str, number: signal.Signals
) -> None:
    with under_load(Load(house, expected)) as load:
        victim = VICTIMS[name](house)
        victim.send_signal(number)
        eventually(lambda: not victim.is_running() or victim.status() == "zombie")
    assert load.failures == []
    eventually(lambda: both_ready(house), timeout_s=600)
    eventually(lambda: house.run_registry("list", check=False).returncode == 0)


@pytest.fixture
def second(house: Stack, tmp_path: Path) -> Iterator[tuple[Stack, subprocess.Popen[bytes]]]:
    """Another gateway alongside that of the stack, on the same workers and registry."""
    env = dict(house.service("loraplex_services.gateway").environ())
    port = free_port()
    env["LORAPLEX_HTTP_LISTEN"] = f"127.0.0.1:{port}"
    env["LORAPLEX_GATEWAY_LISTEN"] = f"unix:{tmp_path}/g.sock"
    env.pop("LORAPLEX_METRICS_LISTEN", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "loraplex_services.gateway"], cwd=REPO, env=env
    )
    other = replace(house, http=f"http://127.0.0.1:{port}")

    def is_ready() -> bool:
        try:
            return other.get("/readyz")[0] == 200
        except OSError:
            return False

    try:
        eventually(is_ready)
        yield other, process
    finally:
        process.kill()
        process.wait()


class TwoGateways(Load):
    """Clients of one gateway that go to another when nobody answers, as behind a load balancer."""

    other: Stack
    may_break: bool
    """A stream that has begun may break and is asked for again."""

    def client(self, offset: int) -> None:
        asked, number = bodies(), offset
        while not self.stop.is_set():
            place = number % len(asked)
            try:
                if self._answered(asked[place]) != self.expected[place]:
                    self.failures.append(f"request {place} came out otherwise")
            except Exception as error:
                self.failures.append(f"request {place}: {type(error).__name__} {error}")
            self.num_done += 1
            number += NUM_CLIENTS

    def _answered(self, body: dict[str, object]) -> tuple[str, tuple[int, ...]]:
        try:
            return stream(self.stack, body)
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
        except urllib.error.URLError as error:
            refused = isinstance(error.reason, ConnectionRefusedError)
            if not refused and not isinstance(error.reason, ConnectionResetError):
                raise
        except (http.client.HTTPException, OSError, AssertionError):
            if not self.may_break:
                raise
        return stream(self.other, body)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
def test_one_of_two_gateways_ends_under_load(
    house: Stack,
    second: tuple[Stack, subprocess.Popen[bytes]],
    expected: list[tuple[str, tuple[int, ...]]],
    number: signal.Signals,
) -> None:
    """Told to end, it breaks no stream; killed, its clients are served by the other, and that one's
    own clients notice nothing."""
    ending, process = second
    there = TwoGateways(ending, expected)
    there.other, there.may_break = house, number is signal.SIGKILL
    with under_load(Load(house, expected)) as here, under_load(there):
        os.kill(process.pid, number)
        assert process.wait(timeout=60) == (0 if number is signal.SIGTERM else -signal.SIGKILL)
    assert (here.failures, there.failures) == ([], [])


def test_ended_stack_serves_what_it_had_taken(tmp_path: Path) -> None:
    """SIGTERM to the whole stack: the streams that run come out whole."""
    stack = start(tmp_path / "state")
    stack.publish(ADAPTERS[0])
    asked = bodies()[:NUM_CLIENTS]
    complete = [stream(stack, body) for body in asked[:4]]
    got: dict[int, object] = {}

    def ask(place: int) -> None:
        try:
            got[place] = stream(stack, asked[place])
        except Exception as error:
            got[place] = error

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    eventually(lambda: "loraplex_gateway_running_requests 4.0" in stack.get("/metrics")[1])
    began_s = time.monotonic()
    assert stack.stop() == 0
    for thread in threads:
        thread.join()
    assert [got[place] for place in range(4)] == complete, time.monotonic() - began_s
