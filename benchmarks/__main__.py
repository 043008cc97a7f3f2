"""The entry point of all benchmarks.

    python -m benchmarks list                   # names and what each one measures
    python -m benchmarks run cpu.decode [args]  # one benchmark; `--help` shows its arguments
    python -m benchmarks run cpu                # a group's goals: the same as `run cpu.table`
    python -m benchmarks quick                  # the short ones, one after another

A module is a benchmark when its docstring shows how to run it. All others are helper modules.
"""

from __future__ import annotations

import ast
import difflib
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
GROUPS = {
    "serving": "an engine, a gateway or a whole stack that serves requests",
    "cpu": "kernels and decode steps on CPUs, compared with other engines",
    "gpu": "kernels and decode steps on CUDA devices",
    "registry": "uploads, downloads and the index",
    "scheduling": "scheduling, routing and caching policies in virtual time",
    "simulation": "simulated results compared with measured ones",
}
QUICK = {
    "scheduling.arena_waste": ([], 30),
    "scheduling.routing": ([], 30),
    "scheduling.overload": ([], 40),
    "cpu.int8_adapters": ([], 10),
    "registry.service": (["--rounds", "1", "--adapters", "2000"], 70),
    "serving.gateway": (["--rounds", "1"], 30),
}
"""Benchmark name -> arguments, and about how many seconds it takes on two cores."""
QUICK_RESULTS = HERE.parent / "build" / "benchmarks"
"""Short runs do not replace published results."""


def summaries() -> dict[str, str]:
    """Name of each benchmark -> the first sentence of its docstring."""
    found = {}
    for path in sorted(HERE.rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        if path != Path(__file__) and "python -m benchmarks" in docstring:
            name = ".".join(path.relative_to(HERE).with_suffix("").parts)
            found[name] = re.split(r": `python -m|(?<=\.)\s", docstring, maxsplit=1)[0]
    return found


def print_list() -> None:
    """Print every benchmark under the heading of its group."""
    known = summaries()
    for group, subject in GROUPS.items():
        print(f"{group}: {subject}")
        members = [name for name in known if name.startswith(f"{group}.")]
        for name in members:
            print(f"  {name:28} {' '.join(known[name].split())}")


def run_quick() -> int:
    """Run the short benchmarks; return the first exit status that is not 0."""
    minutes = sum(seconds for _, seconds in QUICK.values()) / 60
    print(f"{len(QUICK)} benchmarks, about {minutes:.0f} minutes on two idle cores:")
    print(*(f"  {name}: about {seconds} s" for name, (_, seconds) in QUICK.items()), sep="\n")
    status = 0
    environ = {**os.environ, "BENCHMARK_RESULTS": str(QUICK_RESULTS)}
    for name, (arguments, _) in QUICK.items():
        print(f"\n== {name}", *arguments, flush=True)
        begin = time.monotonic()
        command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
        ended = subprocess.run(command, env=environ, check=False)
        status = status or ended.returncode
        print(f"== {name} took {time.monotonic() - begin:.0f} s", flush=True)
    return status


def main(argv: Sequence[str]) -> int:
    """List benchmarks or run them; exit status 2 for a wrong command line."""
    match argv:
        case ["list"]:
            print_list()
        case ["quick"]:
            return run_quick()
        case ["run", name, *arguments] if name in summaries():
            module = f"benchmarks.{name}"
            os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
        case ["run", group, *arguments] if f"{group}.table" in summaries():
            return main(["run", f"{group}.table", *arguments])
        case ["run", name, *_]:
            nearest = difflib.get_close_matches(name, summaries(), n=1, cutoff=0.0)
            print(f"unknown benchmark {name}; the nearest name is {nearest[0]}", file=sys.stderr)
            return 2
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
