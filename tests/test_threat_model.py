"""Each attack in the threat model has a test that `pytest -m hostile` runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/operate/threat-model.md"
ROW = re.compile(r"^\| ([CHML][0-9]+) \|", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
ATTACKS = {
    *(f"C{n}" for n in range(1, 3)),
    *(f"H{n}" for n in range(1, 12)),
    *(f"M{n}" for n in range(1, 15)),
}


def named_tests() -> list[tuple[str, str]]:
    return sorted(set(TEST.findall(PAGE.read_text())))


def test_every_attack_has_a_row() -> None:
    assert {*ROW.findall(PAGE.read_text())} == ATTACKS


@pytest.mark.parametrize(("path", "name"), named_tests())
def test_a_named_test_exists_and_is_marked_hostile(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    marks = [
        ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    [function] = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    ]
    marks += [ast.unparse(decorator) for decorator in function.decorator_list]
    assert any("mark.hostile" in mark for mark in marks)
