"""A real registry process with the demo base, and the commands as real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cli.nursery import Nursery
from tests.servers import free_address

REPO = Path(__file__).parents[2]
DEMO = REPO / "demo"
MODULE = "loraplex.cli.registry"
START_TIMEOUT_S = 30.0


def environment(**extra: str) -> dict[str, str]:
    """The caller's environment without settings of ours."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("LORAPLEX_")}
    return {**kept, **extra}


@dataclass(frozen=True, slots=True)
class Command:
    """One of our console scripts."""

    module: str
    variables: Mapping[str, str] = field(default_factory=dict)
    nursery: Nursery | None = None

    def argv(self, *args: str) -> list[str]:
        """For a process that is not forked."""
        return [sys.executable, "-m", self.module, *args]

    def __call__(self, *args: str, input: str = "") -> subprocess.CompletedProcess[str]:
        assert self.nursery is not None
        return self.nursery.run(list(args), environment(**self.variables), input)

    def json(self, *args: str) -> Any:
        """The one object that a command which must succeed prints."""
        [value] = self.lines(*args)
        return value

    def lines(self, *args: str) -> list[Any]:
        """The objects that a command which must succeed prints, one a line."""
        done = self(*args, "--json")
        assert done.returncode == 0, done.stderr
        values = [json.loads(line) for line in done.stdout.splitlines()]
        assert all({"name", "version", "digest"} <= value.keys() for value in values)
        return values

    def error(self, *args: str) -> tuple[int, dict[str, Any]]:
        """Exit code and error object of a command which must fail."""
        done = self(*args, "--json")
        assert done.stdout == ""
        error: dict[str, Any] = json.loads(done.stderr)["error"]
        return done.returncode, error


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Of `registry` commands."""
    made = Nursery(MODULE)
    yield made
    made.close()


@pytest.fixture(scope="session")
def offline(nursery: Nursery) -> Command:
    """`registry` with nobody to talk to."""
    address = free_address()
    return Command(MODULE, {"LORAPLEX_REGISTRY_ADDRESS": address}, nursery)


@pytest.fixture(scope="session")
def registry(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """`registry` against a running registry that knows the demo base."""
    state = tmp_path_factory.mktemp("registry")
    address = free_address()
    variables = {"LORAPLEX_REGISTRY_LISTEN": address, "LORAPLEX_STATE_DIR": str(state)}
    with (state / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "loraplex_services.registry"],
            env=environment(**variables),
            stderr=log,
            cwd=REPO,
        )
    command = Command(MODULE, {"LORAPLEX_REGISTRY_ADDRESS": address}, nursery)
    base = ("base", "add", str(DEMO / "base"), "--id", "loraplex-demo")
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while command(*base).returncode != 0:
        assert server.poll() is None and time.monotonic() < deadline_s, (state / "log").read_text()
        time.sleep(0.2)
    yield command
    server.terminate()
    assert server.wait(30) == 0


@pytest.fixture
def adapter() -> Path:
    """The smallest demo adapter."""
    return DEMO / "adapters" / "mask"
