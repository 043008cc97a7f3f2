"""scripts/setup.sh, run for real against interpreters that only pretend to install.

The pretended Python answers the few questions that the script asks and notes what it asks of pip.
Nothing else is on PATH but the ordinary tools, so the outcome does not depend on this machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOLS = "sh cat cksum tr grep rm mv tail dirname id mkdir cp".split()
PYTHON = """#!/bin/sh
here=$(dirname "$0")
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip")
        case "$*" in *"pip>="*) exit 1 ;; esac # none to be had: the old one does
        echo "VERSION $*" >>"$CALLS"
        printf '%s' "${PIP_SAYS:-}"
        case "$*" in
            *"$REFUSE"*) exit 1 ;;
            *torch==2.13.0+cpu*)
                case "$*" in *--index-url*) place=index ;; *) place=config ;; esac
                case "$CPU_TORCH" in *"$place:VERSION"*) ;; *) exit 1 ;; esac
                echo 2.13.0+cpu >"$here/torch" ;;
            *torch==2.13.0*) echo 2.13.0+cu130 >"$here/torch" ;;
        esac ;;
    "-m loraplex_services.worker.native.build")
        echo "$*" >"$here/built"; exit "${BUILD_STATUS:-0}" ;;
    "-c "*version_info*) echo VERSION ;;
    "-c "*ensurepip*) HAS_VENV ;;
    "-c "*torch*) cat "$here/torch" ;;
esac
"""


@dataclass
class Checkout:
    """A copy of what the script reads, and a PATH on which it finds only what a test put there."""

    folder: Path
    path: Path
    environ: dict[str, str]

    def add_command(self, name: str, text: str) -> None:
        command = self.path / name
        command.write_text(text)
        command.chmod(0o755)

    def add_python(self, name: str, version: str, has_venv: bool = True) -> None:
        text = PYTHON.replace("VERSION", version)
        self.add_command(name, text.replace("HAS_VENV", "true" if has_venv else "false"))

    def setup(self, *groups: str, **environ: str) -> subprocess.CompletedProcess[str]:
        command = ["sh", str(self.folder / "scripts" / "setup.sh"), *(groups or ["run"])]
        merged = self.environ | environ
        return subprocess.run(command, env=merged, capture_output=True, text=True, timeout=60)

    def pip_calls(self) -> list[str]:
        """What pip was asked for since the last look, each line beginning with the version."""
        calls = Path(self.environ["CALLS"])
        lines = calls.read_text().splitlines() if calls.exists() else []
        calls.unlink(missing_ok=True)
        return lines

    def torch_calls(self) -> list[str]:
        return [line for line in self.pip_calls() if "torch==" in line]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    folder, path = tmp_path / "checkout", tmp_path / "bin"
    (folder / "scripts").mkdir(parents=True)
    path.mkdir()
    for name in ["pyproject.toml", "constraints.txt", "scripts/setup.sh"]:
        shutil.copy(ROOT / name, folder / name)
    for name in TOOLS:
        (path / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    environ = {"PATH": str(path), "CALLS": str(tmp_path / "calls"), "REFUSE": "<nothing>"}
    made = Checkout(folder, path, environ | {"CPU_TORCH": "config:3.11 config:3.13"})
    made.add_command("uname", uname("Linux", "x86_64"))
    made.add_command("g++", "#!/bin/sh\n")
    made.add_python("python3.11", "3.11")
    return made


def test_newest_python_is_used(checkout: Checkout) -> None:
    checkout.add_python("python3.13", "3.13")
    assert checkout.setup().returncode == 0
    assert {call.split()[0] for call in checkout.pip_calls()} == {"3.13"}


def test_python_variable_wins_over_the_newest(checkout: Checkout) -> None:
    checkout.add_python("python3.13", "3.13")
    assert checkout.setup(PYTHON="python3.11").returncode == 0
    assert {call.split()[0] for call in checkout.pip_calls()} == {"3.11"}


def test_another_python_variable_makes_the_environment_anew(checkout: Checkout) -> None:
    checkout.add_python("python3.13", "3.13")
    checkout.setup()
    checkout.pip_calls()
    assert checkout.setup(PYTHON="python3.11").returncode == 0
    assert {call.split()[0] for call in checkout.pip_calls()} == {"3.11"}


def test_unsupported_python_is_refused_by_name(checkout: Checkout) -> None:
    checkout.add_python("python3.10", "3.10")
    done = checkout.setup(PYTHON="python3.10")
    assert done.returncode == 1
    assert "PYTHON=python3.10 is not a working Python 3.11-3.14" in done.stderr
    assert not checkout.pip_calls()


@pytest.mark.parametrize(
    ("default", "package"), [("3.12", "python3-venv"), ("3.11", "python3.12-venv")]
)
def test_missing_venv_module_prints_the_line_to_run(
    checkout: Checkout, default: str, package: str
) -> None:
    checkout.add_python("python3", default)
    checkout.add_python("python3.12", "3.12", has_venv=False)
    done = checkout.setup(PYTHON="python3.12")
    sudo = "" if os.getuid() == 0 else "sudo "
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"{sudo}apt-get install -y {package}"


def test_python_without_venv_module_gives_way_to_an_older_one_with_it(checkout: Checkout) -> None:
    checkout.add_python("python3.13", "3.13", has_venv=False)
    assert checkout.setup().returncode == 0
    assert {call.split()[0] for call in checkout.pip_calls()} == {"3.11"}


def test_cpu_torch_comes_from_the_configuration_of_pip(checkout: Checkout) -> None:
    assert checkout.setup().returncode == 0
    [call] = checkout.torch_calls()
    assert "torch==2.13.0+cpu" in call
    assert "--index-url" not in call


def test_cpu_torch_comes_from_the_cpu_index_where_pip_has_none(checkout: Checkout) -> None:
    done = checkout.setup(CPU_TORCH="index:3.11", TORCH_CPU_INDEX="https://mirror.example/cpu")
    assert done.returncode == 0
    _, call = checkout.torch_calls()
    assert "--retries 1 --timeout 15 --index-url https://mirror.example/cpu" in call


def test_newer_python_without_cpu_torch_gives_way_to_an_older_one_with_it(
    checkout: Checkout,
) -> None:
    checkout.add_python("python3.13", "3.13")
    done = checkout.setup(CPU_TORCH="config:3.11")
    assert done.returncode == 0
    assert "no CPU build of torch for Python 3.13; trying Python 3.11" in done.stderr
    assert checkout.pip_calls()[-1].startswith("3.11 ")


def test_no_cpu_torch_stops_before_any_gigabyte_of_cuda(checkout: Checkout) -> None:
    done = checkout.setup(CPU_TORCH="", GOAL="demo")
    assert done.returncode == 1
    assert "TORCH=cuda make demo" in done.stderr
    assert "2.6 GB" in done.stderr
    assert all("2.13.0+cpu" in call for call in checkout.pip_calls())


def test_set_up_says_why_an_index_cannot_be_reached(checkout: Checkout) -> None:
    said = [
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'Connection refused'",
        "WARNING: Location '/wheels' is ignored",
        "ERROR: No matching distribution found for torch==2.13.0+cpu",
    ]
    done = checkout.setup(CPU_TORCH="", PIP_SAYS="\n".join([*said, ""]))
    assert done.returncode == 1
    shown = done.stderr.splitlines()
    assert said[0] in shown
    assert said[1] not in shown
    assert said[2] in shown


def test_cuda_torch_is_taken_where_nvidia_smi_works(checkout: Checkout) -> None:
    checkout.add_command("nvidia-smi", "#!/bin/sh\n[ $1 = -L ]\n")
    assert checkout.setup().returncode == 0
    [call] = checkout.torch_calls()
    assert call.endswith("torch==2.13.0")


def test_cuda_torch_is_not_taken_where_nvidia_smi_fails(checkout: Checkout) -> None:
    checkout.add_command("nvidia-smi", "#!/bin/sh\nexit 9\n")
    assert checkout.setup().returncode == 0
    [call] = checkout.torch_calls()
    assert call.endswith("torch==2.13.0+cpu")


def test_plain_torch_is_taken_on_macos(checkout: Checkout) -> None:
    checkout.add_command("uname", "#!/bin/sh\necho Darwin\n")
    assert checkout.setup().returncode == 0
    [call] = checkout.torch_calls()
    assert call.endswith("torch==2.13.0")


def test_torch_variable_replaces_the_cpu_build_by_cuda(checkout: Checkout) -> None:
    checkout.setup()
    checkout.pip_calls()
    assert checkout.setup(TORCH="cuda").returncode == 0
    [call] = checkout.torch_calls()
    assert call.endswith("--force-reinstall torch==2.13.0")


def test_finished_setup_asks_nothing_of_pip(checkout: Checkout) -> None:
    checkout.setup("run", "test")
    checkout.pip_calls()
    assert checkout.setup("test").returncode == 0
    assert not checkout.pip_calls()


def test_another_group_adds_to_the_environment(checkout: Checkout) -> None:
    checkout.setup("run")
    checkout.pip_calls()
    assert checkout.setup("test").returncode == 0
    [call] = checkout.pip_calls()
    assert "worker,stack,test" in call
    assert checkout.setup("run", "test").returncode == 0
    assert not checkout.pip_calls()


def test_changed_pins_run_pip_again_in_the_same_environment(checkout: Checkout) -> None:
    checkout.setup()
    checkout.pip_calls()
    kept = checkout.folder / ".venv" / "kept"
    kept.touch()
    with (checkout.folder / "constraints.txt").open("a") as pins:
        pins.write("zstandard==1.0\n")
    assert checkout.setup().returncode == 0
    [call] = checkout.pip_calls()
    assert "-e .[worker,stack]" in call
    assert kept.exists()


def test_unstamped_environment_is_rebuilt(checkout: Checkout) -> None:
    foreign = checkout.folder / ".venv" / "foreign"
    foreign.parent.mkdir()
    foreign.touch()
    assert checkout.setup().returncode == 0
    assert not foreign.exists()


def test_setup_that_failed_half_way_is_not_taken_for_finished(checkout: Checkout) -> None:
    assert checkout.setup(REFUSE="-e .[").returncode == 1
    checkout.pip_calls()
    assert checkout.setup().returncode == 0
    assert len(checkout.pip_calls()) == 2


def test_moved_checkout_is_set_up_anew(checkout: Checkout) -> None:
    checkout.setup()
    checkout.pip_calls()
    checkout.folder = checkout.folder.rename(checkout.folder.with_name("moved"))
    assert checkout.setup().returncode == 0
    assert len(checkout.pip_calls()) == 2


def test_importable_torch_of_another_version_is_kept(checkout: Checkout) -> None:
    checkout.setup()
    checkout.pip_calls()
    venv = checkout.folder / ".venv"
    (venv / "bin" / "torch").write_text("2.11.0+cu130\n")
    assert checkout.setup("test").returncode == 0
    assert not checkout.torch_calls()
    pins = (venv / "constraints.txt").read_text().splitlines()
    assert "torch==2.11.0+cu130" in pins
    assert not [pin for pin in pins if pin.startswith("triton") or pin == "torch==2.13.0"]


def test_kernels_that_cannot_be_built_are_said_and_stop_nothing(checkout: Checkout) -> None:
    done = checkout.setup(BUILD_STATUS="1")
    assert "could not compile the CPU kernels" in done.stderr
    assert done.returncode == 0
    assert "torch alone" in done.stderr
    assert "torch alone" not in checkout.setup("test").stderr


@pytest.mark.parametrize(("groups", "asked"), [(["run"], ""), (["run", "test"], " --best 2")])
def test_tests_get_the_kernels_of_the_two_best_instruction_sets(
    checkout: Checkout, groups: list[str], asked: str
) -> None:
    assert checkout.setup(*groups).returncode == 0
    built = (checkout.folder / ".venv" / "bin" / "built").read_text()
    assert built == f"-m loraplex_services.worker.native.build{asked}\n"


def uname(system: str, machine: str) -> str:
    return f'#!/bin/sh\n[ "$1" = -m ] && echo {machine} || echo {system}\n'


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_compiler_is_installed_where_there_is_none(checkout: Checkout, machine: str) -> None:
    (checkout.path / "g++").unlink()
    checkout.add_command("uname", uname("Linux", machine))
    done = checkout.setup()
    assert done.returncode == 0
    assert "ziglang" in done.stderr
    assert checkout.pip_calls()[-1].endswith("-e .[worker,stack,compiler]")
    assert (checkout.folder / ".venv/bin/built").exists()


@pytest.mark.parametrize("name", ["clang++", "c++", "my-compiler"])
def test_a_compiler_of_the_system_is_enough(checkout: Checkout, name: str) -> None:
    (checkout.path / "g++").rename(checkout.path / name)
    assert checkout.setup(CXX="my-compiler").returncode == 0
    assert checkout.pip_calls()[-1].endswith("-e .[worker,stack]")


@pytest.mark.parametrize(("system", "machine"), [("Linux", "riscv64"), ("Darwin", "x86_64")])
def test_no_compiler_is_installed_where_there_is_nothing_to_compile(
    checkout: Checkout, system: str, machine: str
) -> None:
    (checkout.path / "g++").unlink()
    checkout.add_command("uname", uname(system, machine))
    assert checkout.setup().returncode == 0
    assert checkout.pip_calls()[-1].endswith("-e .[worker,stack]")


def test_torch_free_environment_builds_no_kernels(checkout: Checkout) -> None:
    done = checkout.setup("torch-free", BUILD_STATUS="1")
    assert done.returncode == 0
    assert "kernels" not in done.stderr


def test_torch_free_environment_gets_no_torch(checkout: Checkout) -> None:
    assert checkout.setup("torch-free", VENV=".venv-3.11").returncode == 0
    [call] = checkout.pip_calls()
    assert call.endswith("-e .[stack,test-lite]")


@pytest.mark.parametrize(
    ("groups", "torch", "named"), [(["all"], "", "all"), (["run"], "rocm", "TORCH=rocm")]
)
def test_unknown_words_are_usage_errors(
    checkout: Checkout, groups: list[str], torch: str, named: str
) -> None:
    done = checkout.setup(*groups, TORCH=torch)
    assert done.returncode == 2
    assert named in done.stderr
