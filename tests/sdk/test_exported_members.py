"""The public surface is small, complete and lazy."""

import importlib
import subprocess
import sys

import pytest

import loraplex


def test_all_is_sorted_and_every_name_loads() -> None:
    assert loraplex.__all__ == sorted(loraplex.__all__)
    for name in loraplex.__all__:
        assert getattr(loraplex, name).__module__.startswith("loraplex.")


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        importlib.import_module("loraplex").Nothing  # noqa: B018


def test_importing_the_package_imports_neither_grpc_nor_torch() -> None:
    code = "import loraplex, loraplex.errors, sys; print({'grpc', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
