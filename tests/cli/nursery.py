"""`python -m tests.cli.nursery MODULE`: runs a command often and imports what it needs once.

Each run is a process of its own, forked from this one, with arguments, environment, standard files
and an exit code of its own. A line of JSON asks for it, a line with the exit code answers.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

COMMANDS_IMPORT = (
    "loraplex.client.registry_client",
    "loraplex.adapter_format.tensor_scan",
    "loraplex.adapter_format.validate",
    "loraplex.signing",
    "loraplex.sources",
    "numpy",
)
"""Once they know what is asked of them."""


class Nursery:
    """The end of the tests: one run at a time."""

    def __init__(self, module: str) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self._process = subprocess.Popen([sys.executable, "-m", __name__, module], **pipes)

    def run(
        self, args: list[str], environ: Mapping[str, str], given: str
    ) -> subprocess.CompletedProcess[str]:
        """A run with `given` on its standard input."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, name) for name in ("in", "out", "err")]
            files[0].write_text(given)
            asked = {"args": args, "environ": dict(environ), "files": list(map(str, files))}
            self._process.stdin.write(json.dumps(asked) + "\n")
            code = int(self._process.stdout.readline())
            return subprocess.CompletedProcess(
                args, code, files[1].read_text(), files[2].read_text()
            )

    def close(self) -> None:
        """Let it end."""
        self._process.communicate()


def serve(module: str) -> None:
    """Fork until there is nobody to ask; returns in each child, too, which is then the command."""
    importlib.import_module(module).make_parser()  # which imports every command
    for name in COMMANDS_IMPORT:
        importlib.import_module(name)
    gc.freeze()  # or each child would copy what its collector looks at
    while line := sys.stdin.readline():
        if (child := os.fork()) == 0:
            become(module, **json.loads(line))
            return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def become(module: str, args: list[str], environ: dict[str, str], files: list[str]) -> None:
    """Take the place that the caller of a command gives it."""
    for number, path in enumerate(files):
        flags = os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY
        os.dup2(os.open(path, flags), number)
    sys.stdin = os.fdopen(0)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [module, *args]
    del sys.modules[module]  # to be run as the main one
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert isinstance(end.code, int)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code)  # rather than take apart all that was imported


if __name__ == "__main__":
    serve(sys.argv[1])
