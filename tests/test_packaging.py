"""The distribution's metadata agrees with the stubs, the pins and the tree."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import warnings
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.wheels import PACKAGES, ROOT, build_client_wheel, build_wheel

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STUBS = ROOT / "loraplex" / "v1"


def requirements(lines: list[str]) -> dict[str, Requirement]:
    return {requirement.name: requirement for requirement in map(Requirement, lines)}


def floor_of(requirement: Requirement) -> Version:
    [floor] = [Version(part.version) for part in requirement.specifier if part.operator == ">="]
    return floor


def versions_in_stubs(glob: str, pattern: str) -> set[Version]:
    """What each stub says it was made with; fails where a stub does not say it."""
    versions = set()
    for stub in STUBS.glob(glob):
        found = re.search(pattern, stub.read_text())
        assert found, f"{stub.name} does not name the version it demands"
        versions.add(Version(found.group(1)))
    return versions


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return requirements([line for line in lines if line and not line.startswith("#")])


def test_protobuf_floor_is_what_the_committed_stubs_demand() -> None:
    demanded = versions_in_stubs("*_pb2.py", r"# Protobuf Python Version: (\S+)")
    assert demanded == {floor_of(requirements(PROJECT["dependencies"])["protobuf"])}


def test_grpcio_floor_is_what_the_committed_stubs_demand() -> None:
    demanded = versions_in_stubs("*_pb2_grpc.py", r"GRPC_GENERATED_VERSION = '(\S+)'")
    assert demanded == {floor_of(requirements(PROJECT["dependencies"])["grpcio"])}


def test_grpc_companions_have_the_same_floor_as_grpcio() -> None:
    lines = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["server"]
    family = {name: need for name, need in requirements(lines).items() if name.startswith("grpcio")}
    assert len(family) == 4
    assert len({floor_of(need) for need in family.values()}) == 1


def test_stub_generator_is_pinned_to_the_grpcio_floor() -> None:
    tools = requirements(PROJECT["optional-dependencies"]["dev"])["grpcio-tools"]
    floor = floor_of(requirements(PROJECT["dependencies"])["grpcio"])
    assert str(tools.specifier) == f"=={floor}"


def test_protobuf_may_be_one_major_version_newer_than_the_stubs_but_not_two() -> None:
    allowed = requirements(PROJECT["dependencies"])["protobuf"].specifier
    [demanded] = versions_in_stubs("*_pb2.py", r"# Protobuf Python Version: (\S+)")
    assert allowed.contains(f"{demanded.major + 1}.0.0")
    assert not allowed.contains(f"{demanded.major + 2}.0.0")


def test_every_dependency_has_a_pin_that_satisfies_it() -> None:
    pinned = pins()
    for lines in [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]:
        for need in map(Requirement, lines):
            name = re.sub(r"[-_.]+", "-", need.name).lower()
            if name == "loraplex":
                continue
            assert name in pinned, f"constraints.txt has no pin for {name}"
            [pin] = pinned[name].specifier
            assert need.specifier.contains(pin.version), f"{pinned[name]} is outside {need}"


def test_pins_are_exact_sorted_and_unique() -> None:
    names = [
        line.split("==")[0]
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert names == sorted(set(names))
    for pin in pins().values():
        assert [part.operator for part in pin.specifier] == ["=="], pin


def test_core_needs_no_more_than_grpc_and_protobuf() -> None:
    names = set(requirements(PROJECT["dependencies"]))
    assert names == {"grpcio", "grpcio-status", "googleapis-common-protos", "protobuf"}


def test_only_the_worker_extra_names_torch() -> None:
    extras = PROJECT["optional-dependencies"]
    assert [name for name in extras if "torch" in requirements(extras[name])] == ["worker"]


def test_setup_script_installs_the_torch_that_is_pinned() -> None:
    script = (ROOT / "scripts" / "setup.sh").read_text()
    [version] = re.findall(r"^torch_version=(\S+)$", script, re.MULTILINE)
    assert str(pins()["torch"].specifier) == f"=={version}"


@pytest.mark.parametrize("package", ["loraplex", "loraplex_services"])
def test_every_folder_with_code_is_a_package(package: str) -> None:
    """A folder without __init__.py works from a checkout but is left out of the wheel."""
    folders = {path.parent for path in (ROOT / package).rglob("*.py")}
    missing = sorted(str(f) for f in folders if not (f / "__init__.py").exists())
    assert not missing


def test_wheel_holds_every_file_of_the_packages(tmp_path: Path) -> None:
    with zipfile.ZipFile(build_wheel(tmp_path / "wheel")) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    files = {path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()}
    wanted = {str(path.relative_to(ROOT)) for path in files if path.suffix not in (".md", ".pyc")}
    assert wanted - held == set()
    assert held - wanted == set()


def test_the_client_wheel_is_the_package_and_holds_no_server(tmp_path: Path) -> None:
    with zipfile.ZipFile(build_client_wheel(tmp_path / "wheel")) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    files = {path for path in (ROOT / "loraplex").rglob("*") if path.is_file()}
    wanted = {str(path.relative_to(ROOT)) for path in files if path.suffix not in (".md", ".pyc")}
    assert held == wanted


def test_the_client_asks_for_what_the_package_asks_for() -> None:
    client = tomllib.loads((ROOT / "client" / "pyproject.toml").read_text())["project"]
    for key in ("dependencies", "requires-python", "scripts", "license", "classifiers"):
        assert client[key] == PROJECT[key]
    extras = PROJECT["optional-dependencies"]
    assert client["optional-dependencies"] == {
        name: extras[name] for name in ("convert", "sources", "sign")
    }


def test_sdk_import_brings_in_no_server_library_and_no_torch() -> None:
    heavy = ["torch", "numpy", "redis", "boto3", "starlette", "tokenizers", "loraplex_services"]
    code = f"import sys, loraplex; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "module", ["loraplex.client", "loraplex_services", "loraplex_services.worker.engine.engine"]
)
def test_warning_raised_by_our_own_module_is_an_error(module: str) -> None:
    with pytest.raises(DeprecationWarning):
        warn_as(module)


def test_warning_raised_by_a_dependency_is_not_an_error() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warn_as("servicestack.client")
    assert [warning.category for warning in caught] == [DeprecationWarning]


def warn_as(module: str) -> None:
    code = "import warnings; warnings.warn('old', DeprecationWarning, stacklevel=1)"
    exec(compile(code, "<a module>", "exec"), {"__name__": module})
