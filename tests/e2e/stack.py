"""A real stack for end-to-end tests: `loraplex up` as a user runs it, on free ports."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from loraplex import BlockingRegistry, Credentials, Publication
from tests.cli.nursery import Nursery
from tests.processes import processes_running

REPO = Path(__file__).parents[2]
DEMO = REPO / "demo"
BASE = DEMO / "base"
BASE_ID = "loraplex-demo"
ADAPTERS = sorted(path for path in (DEMO / "adapters").glob("*") if path.is_dir())
TELLING = (
    "loraplex_services.gateway",
    "loraplex_services.worker",
    "loraplex_services.worker.engine.process",
)
"""Modules whose processes print their stacks on SIGUSR2."""
READY = re.compile(r"^loraplex ready (http://\S+) grpc (\S+) registry (\S+)$")


def clean_environment() -> dict[str, str]:
    """The caller's environment without settings of ours."""
    return {key: value for key, value in os.environ.items() if not key.startswith("LORAPLEX_")}


@dataclass(slots=True)
class Stack:
    """A running `loraplex up` and the addresses it printed."""

    process: subprocess.Popen[str]
    http: str
    grpc: str
    registry: str
    state_dir: Path
    nurseries: dict[str, Nursery] = field(default_factory=dict)
    """Run the commands; each starts with the first one of its kind."""

    def run_registry(self, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the `registry` command against this stack."""
        done = self._run("registry", *args, "--registry", self.registry)
        assert not check or done.returncode == 0, done.stderr
        return done

    def run_loraplex(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run the `loraplex` command against this stack."""
        return self._run("loraplex", *args, "--gateway", self.grpc)

    def _run(self, command: str, *args: str) -> subprocess.CompletedProcess[str]:
        if command not in self.nurseries:
            self.nurseries[command] = Nursery(f"loraplex.cli.{command}")
        return self.nurseries[command].run(list(args), clean_environment(), "")

    def publish(self, *folders: Path, name: str = "", latest: bool = True) -> None:
        """Upload adapter folders under their names, or versions of `name`."""
        with BlockingRegistry(self.registry, Credentials()) as registry:
            for folder in folders:
                registry.upload(folder, Publication(name or folder.name, latest=latest))

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """POST JSON; returns the status and the parsed body, errors too."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        all_headers = {"content-type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.http + path, data=data, headers=all_headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def get(self, path: str) -> tuple[int, str]:
        """GET; returns the status and the text."""
        try:
            with urllib.request.urlopen(self.http + path, timeout=30) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def complete(self, model: str, prompt: Any, **fields: Any) -> dict[str, Any]:
        """One greedy completion that must succeed."""
        body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 32, **fields}
        status, answer = self.post("/v1/completions", body)
        assert status == 200, answer
        result: dict[str, Any] = answer
        return result

    def service(self, module: str) -> psutil.Process:
        """The process that runs `python -m MODULE` under this stack."""
        for child in processes_running(self.process.pid, module):
            return child
        raise LookupError(f"no process runs {module}")

    def evidence(self) -> str:
        """Where all services are, and what the gateway counts: for a request that hangs."""
        log = Path(f"{self.state_dir}.log")
        begin = log.stat().st_size
        for module in TELLING:
            for child in processes_running(self.process.pid, module):
                child.send_signal(signal.SIGUSR2)
        time.sleep(2.0)
        with log.open() as file:
            file.seek(begin)
            return f"{file.read()}\n{self.get('/metrics')[1]}"

    def stop(self) -> int:
        """SIGTERM and the exit code."""
        for nursery in self.nurseries.values():
            nursery.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def start(
    state_dir: Path,
    *flags: str,
    model: Path = BASE,
    environment: Mapping[str, str] | None = None,
) -> Stack:
    """Start a stack and wait until it says it is ready."""
    log = (state_dir.parent / f"{state_dir.name}.log").open("a")
    command = [sys.executable, "-m", "loraplex.cli.loraplex", "up", "--model", str(model)]
    command += ["--served-model-name", BASE_ID, "--state-dir", str(state_dir)]
    command += ["--http-port", "0", "--grpc-port", "0", "--registry-port", "0"]
    command += ["--kv-memory", "64MiB", *flags]
    env = clean_environment() | dict(environment or {})
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log, text=True, env=env, cwd=REPO
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if match := READY.match(line.strip()):
                return Stack(process, *match.groups(), state_dir=state_dir)
    except BaseException:  # such as the time limit of the test
        process.terminate()
        raise
    raise RuntimeError(f"the stack ended with {process.wait()}: see {log.name}")


def eventually(what: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until `what` holds; fails with its name after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if what():
            return
        time.sleep(0.1)
    raise AssertionError(f"{getattr(what, '__name__', what)} never became true")
