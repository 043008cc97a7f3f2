"""How much Python a decode step runs for each of its rows, counted instead of timed."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from types import FrameType

from tests.worker.engine_stage import Stage, make_runner, submit, write_files

MOST_CALLS = 30
"""Calls of Python functions that a row may cost. There are 22, and there were 48 at f1b532e6."""


def count_calls(stage: Stage) -> int:
    """Calls of Python functions in one step."""
    num_calls = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(note)
    try:
        stage.engine.step([])
    finally:
        sys.setprofile(None)
    return num_calls


def typical_calls(files: Path, num_rows: int) -> float:
    """The median over decode steps of requests that ask for nothing but tokens."""
    stage = Stage(make_runner(files), files, drafts=False)
    requests = [submit(f"r{i}", num_prompt=1, max_tokens=40) for i in range(num_rows)]
    stage.engine.step(requests)
    return statistics.median(count_calls(stage) for _ in range(20))


def test_a_row_that_decodes_costs_a_step_few_calls(tmp_path):
    files = write_files(tmp_path)
    each = (typical_calls(files, 16) - typical_calls(files, 8)) / 8
    assert 1 < each <= MOST_CALLS, f"{each} calls for each row"
