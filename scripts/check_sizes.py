"""Refuse files and functions too long to be one idea, and functions written twice.

Limits: 400 lines a file; outside tests, 60 lines a function. Generated stubs are exempt. Two
functions are one written twice when their bodies have the same syntax tree and are not tiny.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MIN_DUPLICATE_LINES = 8

Function = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> int:
    """Print one line for each finding; the exit status says whether there was any."""
    findings = []
    first_seen: dict[str, str] = {}
    for path in tracked_sources():
        text = path.read_text()
        num_lines = text.count("\n")
        if num_lines > MAX_FILE_LINES:
            findings.append(f"{path}: {num_lines} lines, at most {MAX_FILE_LINES}")
        if path.parts[0] != "tests":
            findings += check_functions(path, ast.parse(text), first_seen)
    print("\n".join(findings) or "sizes: all files and functions are within their limits")
    return 1 if findings else 0


def tracked_sources() -> list[Path]:
    """Python files that git tracks and that people write."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    paths = [Path(name) for name in listed if "_pb2" not in name]
    return [path for path in paths if path.exists()]


def check_functions(path: Path, tree: ast.Module, first_seen: dict[str, str]) -> Iterator[str]:
    """Yield findings about the functions of one module. Mutates: first_seen."""
    for node in ast.walk(tree):
        if not isinstance(node, Function):
            continue
        where = f"{path}:{node.lineno} {node.name}"
        num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if num_lines > MAX_FUNCTION_LINES:
            yield f"{where}: {num_lines} lines, at most {MAX_FUNCTION_LINES}"
        body = written_code(node)
        if (body[-1].end_lineno or 0) - body[0].lineno + 1 < MIN_DUPLICATE_LINES:
            continue
        twin = first_seen.setdefault("".join(map(ast.dump, body)), where)
        if twin != where:
            yield f"{where}: the same code as {twin}"


def written_code(function: Function) -> list[ast.stmt]:
    """The statements of a function without its docstring (a lone docstring stays)."""
    has_docstring = ast.get_docstring(function) is not None
    return function.body[1:] if has_docstring and len(function.body) > 1 else function.body


if __name__ == "__main__":
    sys.exit(main())
