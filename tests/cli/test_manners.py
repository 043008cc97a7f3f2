"""How the commands talk to people: corrections, values of bad fields, and bytes spared."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import Authority
from tests.cli.conftest import DEMO, REPO, Command, environment

UPPER = DEMO / "adapters" / "upper"


@pytest.mark.parametrize(
    ("words", "meant"),
    [(["uplaod"], "upload"), (["base", "ad"], "add"), (["keys", "crate"], "create")],
)
def test_a_misspelt_command_is_answered_with_the_nearest(
    offline: Any, words: list[str], meant: str
) -> None:
    done = offline(*words)
    assert done.returncode == 2
    assert f"did you mean {meant!r}?" in done.stderr


def test_a_misspelt_flag_is_answered_with_the_nearest(offline: Any) -> None:
    done = offline("upload", ".", "--name", "a", "--stric")
    assert done.returncode == 2
    assert done.stderr.endswith("unrecognized arguments: --stric; did you mean '--strict'?\n")


def test_an_address_is_not_validated_offline(offline: Any) -> None:
    code, error = offline.error("validate", "hf://acme/support-lora")
    assert code == 2
    assert "use `registry upload --dry-run` for an address" in error["message"]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["upload", ".", "--name", "a"], "registry upload"),
        (["keys", "create", "--scope", "reader"], "registry keys create"),
        (["base", "list"], "registry base list"),
    ],
)
def test_an_unknown_argument_is_answered_with_the_usage_of_its_command(
    offline: Any, words: list[str], command: str
) -> None:
    done = offline(*words, "--bogus")
    assert done.returncode == 2
    assert done.stderr.startswith(f"usage: {command} ")
    assert done.stderr.endswith(f"{command}: unrecognized arguments: --bogus\n")


def test_control_characters_of_an_argument_are_shown_escaped(offline: Any) -> None:
    done = offline("list", "--\x1b[31m")
    assert done.returncode == 2
    assert done.stderr.endswith("registry list: unrecognized arguments: --\\x1b[31m\n")


@pytest.mark.parametrize("target", ["v1=0", "v1=-1", "v1", "v1=", "1=5", "v1=1000001", "v1=9" * 99])
def test_a_target_of_a_split_that_cannot_be_is_usage(offline: Any, target: str) -> None:
    assert offline.error("split", "a", "prod", target)[0] == 2


@pytest.mark.parametrize("bound", ["much", "-1", "nan", "inf"])
def test_a_bound_that_is_no_number_is_answered_with_what_is_expected(
    offline: Any, bound: str
) -> None:
    words = ("certify", "a:v1", "--reference", "127.0.0.1:1", "--max-kl", bound)
    code, error = offline.error(*words)
    assert code == 2
    assert f"--max-kl: expected a number of at least 0, got {bound!r}" in error["message"]


def test_a_refusal_shows_the_value_people_gave(offline: Any) -> None:
    done = offline("validate", "/no/such/folder")
    assert done.returncode == 2
    assert "DIR = /no/such/folder: is not a folder" in done.stderr


def test_values_are_spelled_as_in_the_file(offline: Any, adapter: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    path = folder / "adapter_config.json"
    fields = {
        **json.loads(path.read_text()),
        "r": True,
        "bias": None,
        "layer_replication": [[0, 1]],
    }
    path.write_text(json.dumps(fields))
    code, error = offline.error("validate", str(folder))
    values = {v["field"].partition(":")[2]: v["value"] for v in error["violations"]}
    assert code == 3
    assert values == {"r": "true", "bias": "null", "layer_replication": "[[0, 1]]"}


@pytest.mark.parametrize("words", [["show", "x\udcff"], ["list", "--tenant", "\udcff"]])
def test_arguments_that_are_not_utf_8_are_usage(offline: Any, words: list[str]) -> None:
    code, error = offline.error(*words)
    assert code == 2
    assert "not UTF-8" in error["message"]


def test_a_folder_whose_name_is_not_utf_8_is_read(
    offline: Any, adapter: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(adapter, tmp_path / "bad\udcff")
    assert offline("validate", str(folder)).returncode == 0


def test_a_system_error_is_printed_like_any_other_error(offline: Any, tmp_path: Path) -> None:
    folder = tmp_path / "folder\x1b[31m"
    folder.mkdir()
    words = ("certify", "a:v1", "--reference", "127.0.0.1:1", "--probe", str(folder))
    done = offline(*words)
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path}/folder\\x1b[31m: Is a directory\n"
    name = "z" * 300
    done = offline("validate", name)
    assert done.returncode == 1
    assert done.stderr == f"error: {name}/oci-layout: File name too long\n"


INTERRUPT = """
import importlib.abc, os, signal, sys

# A shell that runs the tests in the background starts them with interrupts ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "{imported}":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
import loraplex.cli.{command}
sys.exit(loraplex.cli.{command}.main())
"""


@pytest.mark.parametrize("imported", ["argparse", "loraplex.cli.completion", "grpc"])
@pytest.mark.parametrize("command", ["registry", "loraplex"])
def test_an_interrupt_while_a_command_begins_prints_nothing(command: str, imported: str) -> None:
    words = ["list"] if command == "registry" else ["status"]
    _check_interrupted(INTERRUPT.format(command=command, imported=imported), *words)


@pytest.mark.parametrize(
    ("imported", "words"),
    [
        ("loraplex.rewriting.merging", ["merge", str(UPPER), "--out", "{tmp}/out"]),
        ("loraplex.rewriting.trtllm", ["convert", str(UPPER), "{tmp}/out", "--to", "trtllm"]),
        ("loraplex.adapter_format.tensor_scan", ["validate", str(UPPER)]),
    ],
)
def test_an_interrupt_stops_a_command_that_computes(
    tmp_path: Path, imported: str, words: list[str]
) -> None:
    code = INTERRUPT.format(command="registry", imported=imported)
    _check_interrupted(code, *(word.replace("{tmp}", str(tmp_path)) for word in words))
    assert list(tmp_path.iterdir()) == []


def _check_interrupted(code: str, *words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=REPO,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_failed_tls_handshake_is_one_object(registry: Command, tmp_path: Path) -> None:
    """gRPC's own log stays out of it. It is set up once for a process, so that none is forked."""
    ca = Authority(tmp_path).ca
    done = subprocess.run(
        registry.argv("list", "--ca", str(ca), "--json"),
        capture_output=True,
        text=True,
        env=environment(**registry.variables),
        cwd=REPO,
    )
    assert done.returncode == 6
    assert json.loads(done.stderr)["error"]["reason"] == "UNREACHABLE"


@pytest.mark.parametrize(
    "words",
    [
        ("upload", "demo/adapters/mask", "--name", "mask", "--convert"),
        ("upload", "demo/adapters/mask", "--name", "mask", "--text-only"),
        ("convert", "demo/adapters/mask", "never", "--to", "lora"),
        ("merge", "demo/adapters/mask", "--out", "never"),
    ],
)
def test_a_missing_package_is_named_with_the_way_to_get_it(words: tuple[str, ...]) -> None:
    code = (
        "import sys; sys.modules['numpy'] = None; import loraplex.cli.registry as registry; "
        "sys.exit(registry.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--json"],
        capture_output=True,
        text=True,
        env=environment(LORAPLEX_REGISTRY_ADDRESS="127.0.0.1:1"),
        cwd=REPO,
    )
    error = json.loads(done.stderr)["error"]
    assert (done.returncode, error["reason"]) == (2, "NOT_INSTALLED")
    assert "pip install numpy" in error["message"]
