"""The wheel in an environment of its own, far from the checkout: what it serves, what it misses."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from loraplex_services.worker.native.build import BuildFailed, build_library
from loraplex_services.worker.native.isa import TORCH, choose_isa
from tests.wheels import ROOT, build_client_wheel, build_wheel

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

PACKAGES = Path(sysconfig.get_path("purelib"))
OURS = re.compile(r"loraplex|__editable__|__pycache__")
CLIENT = re.compile(r"grpc|google|googleapis|grpcio|protobuf|typing_extensions")
NO_TORCH = re.compile(r"(?!torch$)")
EVERYTHING = re.compile("")


@dataclass
class Installation:
    """A virtual environment with the wheel, and a folder that its commands run in."""

    root: Path

    @property
    def packages(self) -> Path:
        return next((self.root / "venv/lib").glob("python3*/site-packages"))

    def link(self, wanted: re.Pattern[str]) -> None:
        """Make those packages that match importable, and no other."""
        for path in self.packages.iterdir():
            if path.is_symlink():
                path.unlink()
        for path in PACKAGES.iterdir():
            is_package = path.suffix != ".pth" and not OURS.match(path.name)
            if is_package and wanted.match(path.name) and not (self.packages / path.name).exists():
                (self.packages / path.name).symlink_to(path)

    def start(self, *command: str, stderr: IO[str] | int) -> subprocess.Popen[str]:
        own = {k: v for k, v in os.environ.items() if not k.startswith(("LORAPLEX_", "PYTHON"))}
        changes = {
            "XDG_CACHE_HOME": str(self.root / "xdg"),
            "LORAPLEX_MODEL": "base",
            "LORAPLEX_OBJECTS": f"file://{self.root}/objects",
        }
        return subprocess.Popen(
            [str(self.root / "venv/bin" / command[0]), *command[1:]],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=own | changes,
            cwd=self.root / "work",
        )

    def run(self, *command: str) -> tuple[int, str, str]:
        """Exit code, output and error output."""
        process = self.start(*command, stderr=subprocess.PIPE)
        output, errors = process.communicate(timeout=60)
        return process.returncode, output, errors


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    root = tmp_path_factory.mktemp("installed")
    return install(build_wheel(root / "wheel"), root)


@pytest.fixture(scope="module")
def client_only(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    root = tmp_path_factory.mktemp("client")
    client = install(build_client_wheel(root / "wheel"), root)
    client.link(CLIENT)
    return client


def install(wheel: Path, root: Path) -> Installation:
    venv.create(root / "venv", symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(root / "venv"), "install"]
    options = ["--no-deps", "--no-index", "--no-compile", "--quiet", str(wheel)]
    subprocess.run([*pip, *options], check=True)
    (root / "work/services").mkdir(parents=True)
    (root / "work/services/__init__.py").write_text("raise SystemExit('code of the user ran')")
    shutil.copytree(ROOT / "demo/base", root / "work/base")
    return Installation(root)


def offer_kernels(installation: Installation) -> str:
    """Lay this checkout's library where one of the same sources is looked for; its name."""
    isa = choose_isa("auto")
    if isa == TORCH:
        return TORCH
    try:
        library = build_library(isa)
    except BuildFailed:
        return TORCH
    folder = installation.root / "xdg/loraplex/native"
    folder.mkdir(parents=True)
    (folder / library.name).symlink_to(library)
    return isa


def up(installation: Installation) -> Generator[str]:
    """The lines that `loraplex up` prints."""
    ports = [word for name in ("http", "grpc", "registry") for word in (f"--{name}-port", "0")]
    state = ["--state-dir", "state", "--kv-memory", "16MiB", "--dtype", "float32"]
    with (installation.root / "log").open("w") as log:
        process = installation.start("loraplex", "up", *ports, *state, stderr=log)
    assert process.stdout is not None
    try:
        yield from process.stdout
    finally:
        process.terminate()
        process.wait(60)


def test_an_installed_stack_serves_with_compiled_kernels(installation: Installation) -> None:
    installation.link(EVERYTHING)
    isa = offer_kernels(installation)
    code = (
        "import loraplex_services, loraplex; print(loraplex_services.__file__, loraplex.__file__)"
    )
    files = installation.run("python", "-P", "-c", code)[1].split()
    assert [Path(file).is_relative_to(installation.packages) for file in files] == [True, True]
    lines = up(installation)
    try:
        ready = re.fullmatch(r"loraplex ready \S+ grpc (\S+) registry \S+\n", next(lines, ""))
        log = (installation.root / "log").read_text()
        assert ready, log
        assert re.search(rf"cpu kernels: {isa}\b", log), log
        options = ["--gateway", ready.group(1), "--temperature", "0"]
        status, text, errors = installation.run("loraplex", "generate", "base", "abc 12", *options)
        assert (status, text.strip()) == (0, "abc 12"), errors
    finally:
        lines.close()


def test_a_client_reports_what_a_stack_needs(installation: Installation) -> None:
    installation.link(CLIENT)
    status, _, errors = installation.run("loraplex", "up")
    assert status == 2
    [line] = errors.splitlines()
    assert "starlette" in line and "pip install 'loraplex[local]'" in line


def test_a_worker_without_torch_ends_with_one_line(installation: Installation) -> None:
    installation.link(NO_TORCH)
    status, _, errors = installation.run("python", "-P", "-m", "loraplex_services.worker")
    assert status == 2
    [line] = errors.splitlines()
    assert line.startswith("worker: torch is not installed: run `pip install torch`")


def test_a_client_is_installed_without_any_code_of_the_servers(client_only: Installation) -> None:
    code = "import loraplex, importlib.util as u; print(loraplex.BlockingInference.__module__,"
    code += " loraplex.__file__, u.find_spec('loraplex_services'), u.find_spec('services'))"
    status, output, errors = client_only.run("python", "-P", "-c", code)
    assert status == 0, errors
    module, file, *servers = output.split()
    assert module == "loraplex.client.blocking" and servers == ["None", "None"]
    assert Path(file).is_relative_to(client_only.packages)
    assert not list(client_only.packages.glob("*services*"))


@pytest.mark.parametrize(
    "command",
    ["loraplex --help", "loraplex generate --help", "registry --help", "registry upload --help"],
)
def test_the_commands_of_a_client_show_their_help(client_only: Installation, command: str) -> None:
    status, output, errors = client_only.run(*command.split())
    assert (status, errors) == (0, "") and "example:" in output


@pytest.mark.parametrize("command", ["up", "simulate"])
def test_a_client_says_what_its_servers_need(client_only: Installation, command: str) -> None:
    status, _, errors = client_only.run("loraplex", command, "--help")
    assert status == 2
    [line] = errors.splitlines()
    assert line.startswith(f"loraplex {command}: the installed package is loraplex-client, which")


def test_both_distributions_say_the_same_version(
    client_only: Installation, installation: Installation
) -> None:
    versions = [one.run("loraplex", "--version")[1] for one in (client_only, installation)]
    assert versions[0] == versions[1] != ""
