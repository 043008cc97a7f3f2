"""A worker that finds no compiled kernels: it compiles them before it is ready, or does without."""

from __future__ import annotations

import asyncio
import sysconfig
import venv
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from loraplex_services.worker.native.build import NO_COMPILER, SOURCE_DIR, build_library
from loraplex_services.worker.native.isa import TORCH, choose_isa
from tests.worker.native.isas import native
from tests.worker.worker_process import SessionCall, WorkerProcess, request, worker_folder

pytestmark = pytest.mark.e2e

ISA = choose_isa("auto")


@pytest.fixture
def worker() -> Iterator[WorkerProcess]:
    """In an environment without a library."""
    if ISA == TORCH:
        pytest.skip("nothing to build on this processor")
    native(ISA)  # skips without a compiler
    with worker_folder() as worker:
        venv.create(worker.root / "venv", symlinks=True)
        worker.python = str(worker.root / "venv/bin/python")
        yield worker


def quick_compiler(worker: WorkerProcess) -> Path:
    """A compiler whose library is the one that this environment has."""
    script = worker.root / "quick-c++"
    script.write_text(
        "#!/bin/sh\n"
        "for target; do :; done\n"  # the last argument
        'case " $* " in\n'
        f'*" -shared "*) cp "{build_library(ISA)}" "$target" ;;\n'
        '*" -c "*) : >"$target" ;;\n'
        "esac\n"
    )
    script.chmod(0o755)
    return script


async def serve_once(worker: WorkerProcess, **changes: str) -> list[str]:
    """Start, answer one request and stop; what the log says of kernels."""
    packages = sysconfig.get_path("purelib")
    worker.start(PYTHONPATH=packages, XDG_CACHE_HOME=str(worker.root / "xdg"), **changes)
    async with worker.connected() as stub:
        session = await SessionCall(stub).open()
        await session.submit(request("r"))
        await session.until_ended("r")
        assert len(session.tokens["r"]) == 8
        session.close()
    code, log = await asyncio.to_thread(worker.stop)
    assert code == 0, log
    return [line.partition("cpu kernels: ")[2] for line in log.splitlines() if "kernels" in line]


async def test_the_first_start_compiles_and_logs_how_far_it_is(worker: WorkerProcess) -> None:
    lines = await serve_once(worker, CXX=str(quick_compiler(worker)))
    sources = sorted(path.name for path in SOURCE_DIR.glob("*.cpp"))
    progress = [f"{ISA}: compiled {n}, {i} of {len(sources)}" for i, n in enumerate(sources, 1)]
    begin, end = f"{ISA}: compiling {len(sources)} sources, once", f"{ISA}: linking"
    assert lines == [begin, *progress, end, ISA]
    assert await serve_once(worker, CXX="/bin/false") == [ISA]


async def test_without_a_compiler_torch_serves_and_one_line_says_the_way_out(
    worker: WorkerProcess,
) -> None:
    if find_spec("ziglang") is not None:
        pytest.skip("this environment has a compiler of its own")
    lines = await serve_once(worker, CXX="", PATH="/nowhere")
    assert lines == [f"torch, several times slower: {NO_COMPILER}"]
