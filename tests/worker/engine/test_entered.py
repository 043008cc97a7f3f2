"""Engine.announce: which requests the engine says it is about to compute for the first time. The
server suspects these if the engine dies in that step (see CrashGuard)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.api.pooling import Pooling
from loraplex.api.sampling import SamplingParams
from tests.worker.commands import make_submit
from tests.worker.engine_stage import Stage, make_runner, submit, write_files


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(make_runner(write_files(tmp_path)), tmp_path)
    yield stage
    stage.close()


def test_each_request_enters_once_in_the_first_step_that_computes_it(stage: Stage) -> None:
    """A prompt that needs no cache has its step for itself, so the other request starts in the
    same plan but is computed in the next one."""
    steps: list[list[str]] = []
    stage.engine.announce = steps.append
    sampling = SamplingParams(max_tokens=0, seed=0)
    pooled = make_submit("pooled", [1, 2, 3], sampling, pooling=Pooling.LAST)
    stage.run(submit("generating", max_tokens=3), pooled)
    assert steps == [["pooled"], ["generating"]]
