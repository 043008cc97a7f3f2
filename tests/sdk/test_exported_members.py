"""The public surface is small, complete and lazy."""

import importlib
import pydoc
import subprocess
import sys
from pathlib import Path

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


def test_dir_and_help_show_the_public_classes() -> None:
    code = "import loraplex; print(' '.join(dir(loraplex)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(loraplex.__all__) <= set(done.stdout.split())
    for name in ("generate", "models"):
        shown = pydoc.plain(pydoc.render_doc(getattr(loraplex.BlockingInference, name)))
        returns = shown.partition("->")[2].partition("\n")[0]
        assert returns.strip(" '").startswith("Iterator["), shown


def test_the_reference_page_is_the_one_that_the_docstrings_give() -> None:
    command = [sys.executable, "-c", "import sdk_page; print(sdk_page.page(), end='')"]
    scripts = Path(__file__).parents[2] / "scripts"
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=scripts)
    page = scripts.parent / "docs" / "reference" / "sdk.md"
    assert done.stdout == page.read_text(), "run scripts/sdk_page.py"
