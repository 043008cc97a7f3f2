"""`loraplex up` as a user runs it: ready line, refusals, signals. It heals in test_kills.py."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

REPO = Path(__file__).parents[2]
READY = re.compile(r"loraplex ready (http://127\.0\.0\.1:\d+) grpc (\S+:\d+) registry (\S+:\d+)\n")
UP = [
    *(sys.executable, "-m", "loraplex.cli.loraplex", "up"),
    *("--model", str(REPO / "demo" / "base"), "--served-model-name", "loraplex-demo"),
    *("--http-port", "0", "--grpc-port", "0", "--registry-port", "0", "--kv-memory", "16MiB"),
]
ENVIRON = {key: value for key, value in os.environ.items() if not key.startswith("LORAPLEX_")}

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


@dataclass(frozen=True, slots=True)
class Up:
    """A ready stack."""

    process: subprocess.Popen[str]
    http: str
    grpc: str
    registry: str
    state: Path

    def loraplex(self, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run the `loraplex` command against this stack."""
        return subprocess.run(
            [sys.executable, "-m", "loraplex.cli.loraplex", *args, "--gateway", self.grpc],
            capture_output=True,
            text=True,
            env=ENVIRON,
            cwd=REPO,
            input=stdin,
        )

    def generate(self) -> subprocess.CompletedProcess[str]:
        return self.loraplex("generate", "loraplex-demo", "abc 12=", "--temperature", "0")


@contextmanager
def _up(state: Path, *flags: str, folder: Path = REPO) -> Iterator[Up]:
    log = state.with_suffix(".log")
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*UP, "--state-dir", str(state), *flags],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=ENVIRON,
            cwd=folder,
        )
    try:
        assert process.stdout is not None
        match = READY.fullmatch(process.stdout.readline())
        assert match, log.read_text()
        yield Up(process, match[1], match[2], match[3], state)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def test_ready_stack_answers_refuses_a_second_owner_and_drains(tmp_path: Path) -> None:
    project = tmp_path / "project"
    for name in ("registry", "gateway", "worker"):
        (project / "services" / name).mkdir(parents=True)
        (project / "services" / name / "__init__.py").write_text("raise SystemExit('user code')")
    with _up(tmp_path / "s", folder=project) as up:
        assert urllib.request.urlopen(f"{up.http}/readyz").status == 200
        assert up.generate().stdout.strip() == "abc 12"

        command = [*UP, "--state-dir", str(up.state)]
        second = subprocess.run(command, capture_output=True, text=True, env=ENVIRON, cwd=REPO)
        assert second.returncode == 4
        assert "is in use by loraplex up, process" in second.stderr

        port = up.http.rpartition(":")[2]
        command = [*UP, "--state-dir", str(tmp_path / "t"), "--http-port", port]
        taken = subprocess.run(command, capture_output=True, text=True, env=ENVIRON, cwd=REPO)
        assert taken.returncode == 4
        assert f"--http-port: port {port} is taken" in taken.stderr

        os.kill(up.process.pid, signal.SIGTERM)
        assert up.process.wait(60) == 0
        assert up.process.stdout is not None
        assert up.process.stdout.read() == "", "the ready line is the only one"
        [day] = (up.state / "objects" / "usage").iterdir()
        counts = json.loads(day.read_bytes())["counts"]
        requests = {key: number for key, number in counts.items() if key.endswith("\nrequests")}
        assert requests == {"default\nloraplex-demo\nrequests": 1}, "what was used outlives a stop"


def _family(up: Up) -> list[psutil.Process]:
    return psutil.Process(up.process.pid).children(recursive=True)


def _assert_all_ended(family: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []


def test_children_die_with_a_killed_supervisor_and_state_is_kept(tmp_path: Path) -> None:
    """Two workers serve it, and a second signal kills at once."""
    registry = [sys.executable, "-m", "loraplex.cli.registry"]
    with _up(tmp_path / "s") as up:
        adapter = str(REPO / "demo" / "adapters" / "mask")
        command = [*registry, "upload", adapter, "--name", "mask", "--registry", up.registry]
        uploaded = subprocess.run(
            [*command, "--json"], check=True, capture_output=True, env=ENVIRON, cwd=REPO
        )
        family = _family(up)
        assert len(family) >= 4
        up.process.kill()
        up.process.wait()
        _assert_all_ended(family)
    with _up(tmp_path / "s", "--workers", "2") as up:
        command = [*registry, "show", "mask", "--json", "--registry", up.registry]
        shown = subprocess.run(command, capture_output=True, text=True, env=ENVIRON, cwd=REPO)
        assert json.loads(shown.stdout)["digest"] == json.loads(uploaded.stdout)["digest"]
        assert _ready_workers(up, 2) == ["worker-0", "worker-1"]
        _check_commands(up)

        family = _family(up)
        for child in family:
            child.suspend()
        up.process.terminate()
        time.sleep(0.5)
        assert up.process.poll() is None, "suspended children cannot drain"
        up.process.terminate()
        assert up.process.wait(30) == 128 + signal.SIGTERM
        _assert_all_ended(family)


def _ready_workers(up: Up, num_workers: int) -> list[str]:
    """Ids of ready workers, once there are `num_workers` or time is over.

    A gateway is ready with its first worker, and learns the ids of others when they connect.
    """
    deadline_s = time.monotonic() + 30.0
    while True:
        workers = json.loads(up.loraplex("status", "--json").stdout)["workers"]
        ready = [worker["worker_id"] for worker in workers if worker["ready"]]
        if len(ready) >= num_workers or time.monotonic() > deadline_s:
            return ready
        time.sleep(0.1)


def _check_commands(up: Up) -> None:
    """Every form of output, on an adapter."""
    greedy = ("--temperature", "0", "--max-tokens", "32")
    from_stdin = up.loraplex("generate", "mask", "-", *greedy, stdin="kolima 48=")
    assert (from_stdin.returncode, from_stdin.stdout) == (0, "k*l*m* 48\n")
    answer = json.loads(up.loraplex("generate", "mask:v1", "kolima 48=", *greedy, "--json").stdout)
    assert answer["choices"][0]["text"] == "k*l*m* 48"
    assert answer["choices"][0]["served_by"]["adapters"] == ["default/mask:v1"]
    both = up.loraplex("generate", "mask", "kolima 48=", *greedy, "-n", "2").stdout
    assert both == "[0] k*l*m* 48\n[1] k*l*m* 48\n"
    chat = up.loraplex("chat", "mask", *greedy, stdin="kolima 48\nbenug 86\n")
    assert chat.stdout == "k*l*m* 48\nb*n*g 86\n"
    status = up.loraplex("status", "--adapters").stdout
    assert "worker-1" in status and "default/mask:v1  device  rank 4" in status
    bad = up.loraplex("generate", "mask", "x=", "--max-tokens", "-1")
    assert bad.returncode == 2
    assert (
        "argument --max-tokens: expected an integer of at least 0 and below 2^32, got '-1'"
        in bad.stderr
    )


@pytest.mark.parametrize(
    ("variables", "flags", "sentence"),
    [
        ({"LORAPLEX_OBJECTS": "file:///dev/null/x"}, (), "LORAPLEX_OBJECTS: the folder cannot"),
        ({"LORAPLEX_CPU_ISA": "mmx"}, (), "LORAPLEX_CPU_ISA: expected one of"),
        pytest.param(
            *({}, ("--kv-memory", "1KiB"), "--kv-memory: must hold at least two blocks"),
            marks=pytest.mark.long,
        ),
        ({}, ("--max-model-len", "1000000"), "--max-model-len: must be at most the context of"),
    ],
    ids=lambda value: str(value),
)
def test_a_start_that_can_never_succeed_ends_at_its_first_try_with_one_sentence(
    variables: dict[str, str], flags: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    _assert_refused(tmp_path, variables, flags, sentence)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("no json", "--model: config.json cannot be read"),
        pytest.param('{"model_type": "llama"}', "config.json:", marks=pytest.mark.long),
        pytest.param(
            *('{"model_type": "nonesuch"}', "--model: the transformers library cannot load"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_folder_that_is_no_base_ends_the_start(
    config: str, sentence: str, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(config)
    _assert_refused(tmp_path, {}, ("--model", str(base)), sentence)


def _assert_refused(
    folder: Path, variables: dict[str, str], flags: tuple[str, ...], sentence: str
) -> None:
    done = subprocess.run(
        [*UP, "--state-dir", str(folder / "s"), *flags],
        capture_output=True,
        text=True,
        env={**ENVIRON, **variables},
        cwd=REPO,
    )
    assert done.returncode == 2, done.stderr
    assert "restarting it" not in done.stderr
    [said] = [line for line in done.stderr.splitlines() if line.startswith("loraplex up: ")]
    assert said.removeprefix("loraplex up: ").startswith(sentence), done.stderr
    assert done.stderr.rstrip().endswith(said), "it is the last line"
