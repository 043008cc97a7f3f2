"""What works, or fails well, with nobody to talk to."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loraplex.cli import completion
from loraplex.cli import loraplex as loraplex_command
from loraplex.cli import registry as registry_command
from loraplex.cli.output import sized
from loraplex.cli.parsing import spelled_out

REPO = Path(__file__).parents[2]
BASE = str(REPO / "demo" / "base")


def test_validate_accepts_a_good_adapter_offline(offline: Any, adapter: Path) -> None:
    found = offline.json("validate", str(adapter), "--base", BASE)
    assert found["name"] == "mask"
    assert found["digest"].startswith("sha256:")


def test_validate_takes_a_base_from_the_local_hub_cache(
    offline: Any, adapter: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "models--acme--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc123")
    shutil.copytree(BASE, repository / "snapshots" / "abc123")
    offline.variables["HF_HUB_CACHE"] = str(tmp_path)
    try:
        found = offline.json("validate", str(adapter), "--base", "acme/tiny")
    finally:
        del offline.variables["HF_HUB_CACHE"]
    assert found["digest"] == offline.json("validate", str(adapter), "--base", BASE)["digest"]


def test_validate_refuses_damage_with_exit_3(offline: Any, adapter: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(adapter, folder)
    tensors = folder / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-8])
    code, error = offline.error("validate", str(folder))
    assert (code, error["reason"]) == (3, "INVALID_ADAPTER")
    assert error["violations"][0]["field"].startswith("adapter_model.safetensors")


@pytest.mark.parametrize(
    "arguments",
    [
        ("validate", "no/such/folder"),
        ("validate", "demo/adapters/mask", "--base", "no/such/base"),
        ("upload", "no/such/folder", "--name", "x"),
        ("upload", "demo/adapters/mask"),
        ("upload", "demo/adapters/mask", "--name", "x", "--label", "novalue"),
        ("split", "name", "prod", "v1=0"),
        ("tenants", "set", "acme", "--max-versions", "-1"),
        ("delete", "name"),
        ("delete", "name:v1", "--all"),
        ("nonsense",),
        ("convert", "no/such/folder", "no/such/out", "--to", "lora"),
        ("list", "--ca", "no/such/file"),
        ("list", "--registry", "no-port"),
    ],
    ids=" ".join,
)
def test_usage_errors_exit_2(offline: Any, arguments: tuple[str, ...]) -> None:
    code, error = offline.error(*arguments)
    assert (code, error["code"]) == (2, "INVALID_ARGUMENT")


@pytest.mark.parametrize("arguments", [("nonsense",), ("validate", "no/such/folder")], ids=" ".join)
def test_without_json_a_usage_error_is_a_sentence(offline: Any, arguments: tuple[str, ...]) -> None:
    done = offline(*arguments)
    assert done.returncode == 2
    assert arguments[-1] in done.stderr or "folder" in done.stderr
    assert not done.stderr.startswith("{")


def test_nobody_there_exits_6_naming_the_address(offline: Any) -> None:
    code, error = offline.error("list")
    assert (code, error["code"]) == (6, "UNAVAILABLE")
    assert offline.variables["LORAPLEX_REGISTRY_ADDRESS"] in error["message"]


def test_upload_to_nobody_exits_6(offline: Any, adapter: Path) -> None:
    assert offline.error("upload", str(adapter), "--name", "x")[0] == 6


def test_key_file_that_is_missing_exits_2(offline: Any) -> None:
    offline.variables["LORAPLEX_API_KEY_FILE"] = "no/such/key"
    try:
        code, error = offline.error("list")
    finally:
        del offline.variables["LORAPLEX_API_KEY_FILE"]
    assert (code, error["violations"][0]["field"]) == (2, "LORAPLEX_API_KEY_FILE")


def test_a_key_without_any_validity_exits_2(offline: Any) -> None:
    """0 means no limit elsewhere, and would make a key that never expires."""
    code, error = offline.error("keys", "create", "--ttl", "0s")
    assert (code, error["violations"][0]["field"]) == (2, "--ttl")


def test_gateway_that_is_away_exits_6() -> None:
    command = [sys.executable, "-m", "loraplex.cli.loraplex", "generate", "x", "hello"]
    done = subprocess.run(
        [*command, "--gateway", "127.0.0.1:1", "--json"], capture_output=True, text=True, cwd=REPO
    )
    assert done.returncode == 6
    assert json.loads(done.stderr)["error"]["reason"] == "UNREACHABLE"


@pytest.mark.parametrize("module", ["loraplex.cli.registry", "loraplex.cli.loraplex"])
def test_help_imports_neither_grpc_nor_asyncio(module: str) -> None:
    code = (
        f"import sys; sys.argv = ['x', '--help']\nfrom {module} import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print({'grpc', 'asyncio', 'torch', 'google.protobuf'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO, check=True
    )
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize("service", ["up", "simulate", "registry", "gateway", "worker"])
def test_help_of_a_server_loads_none_of_what_serves(service: str) -> None:
    """Those modules take most of a second; `--help` answers within 0.3 s."""
    code = (
        f"import sys; sys.argv = ['x', '--help']\n"
        f"from loraplex_services.{service}.__main__ import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print({'boto3', 'google.protobuf', 'grpc', 'msgspec', 'numpy', 'redis', 'starlette',"
        " 'tokenizers', 'torch', 'uvloop'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO, check=True
    )
    assert done.stdout.splitlines()[-1] == "set()"
    assert "usage:" in done.stdout


def test_up_does_not_load_the_other_commands_before_it_starts() -> None:
    """`loraplex up` starts a second interpreter: what the first one loads comes on top."""
    code = "import sys, loraplex.cli.loraplex; print('loraplex.cli.bench' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO, check=True
    )
    assert done.stdout.strip() == "False"


def _parsers(parser: Any) -> list[Any]:
    found = [parser]
    for action in parser._subparsers._group_actions if parser._subparsers else ():
        for child in action.choices.values():
            found += _parsers(child)
    return found


@pytest.mark.parametrize(
    "parser",
    [
        parser
        for make in (registry_command.make_parser, loraplex_command.make_parser)
        for parser in _parsers(make())
        if parser.add_help
    ],
    ids=lambda parser: parser.prog,
)
def test_every_help_has_an_example_and_no_text_that_breaks_off(parser: Any) -> None:
    assert "example:\n  " in parser.format_help()
    texts = [action.help for action in parser._actions if action.help]
    assert [text for text in texts if text.endswith((" ", ","))] == []


def test_one_server_flag_fits_all_commands_that_do_anything() -> None:
    for make, flag in (
        (registry_command.make_parser, "--registry"),
        (loraplex_command.make_parser, "--gateway"),
    ):
        leaves = [p for p in _parsers(make()) if p._subparsers is None and p.add_help]
        without = {p.prog.split()[1] for p in leaves if flag not in p._option_string_actions}
        assert without <= {"validate", "completion"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("registry upl", ["upload"]),
        ("registry base a", ["add"]),
        ("registry upload --dr", ["--dry-run"]),
        ("registry keys create --t", ["--tenant", "--ttl"]),
        ("loraplex sta", ["status"]),
    ],
)
def test_completion_script_completes_in_bash(line: str, expected: list[str]) -> None:
    name, *words = line.split()
    command = registry_command if name == "registry" else loraplex_command
    ask = (
        f"{completion.script(name, command.make_parser())}\n"
        f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; _{name}; echo ${{COMPREPLY[@]}}"
    )
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == expected


def test_bare_when_loaded_takes_no_operand() -> None:
    words = ["tag", "--when-loaded", "a:v1", "prod"]
    args = registry_command.make_parser().parse_args(spelled_out(words))
    assert (args.when_loaded, args.ref) == (300.0, "a:v1")
    args = registry_command.make_parser().parse_args(["tag", "--when-loaded=90s", "a:v1", "prod"])
    assert args.when_loaded == 90.0


def test_sizes_for_people() -> None:
    assert [sized(n) for n in (0, 1023, 1536, 3 << 30)] == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB"]


def test_first_admin_key_is_drawn_without_a_registry(offline: Any) -> None:
    tokens = {offline.json("keys", "create", "--bootstrap")["token"] for _ in range(2)}
    assert len(tokens) == 2
    for token in tokens:
        assert re.fullmatch(r"lpx_[a-z0-9]{12}_[0-9a-f]{48}", token)


def test_a_file_that_a_flag_names_is_refused_by_the_flag(offline: Any) -> None:
    _, error = offline.error("list", "--ca", "no/such/file")
    assert error["violations"][0]["field"] == "--ca"
