"""A base whose layers read each other's keys gives the same tokens however it is interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.worker.engine.test_recurrent import (
    alone,
    alone_in_small_steps,
    changed,
    make_runner,
    run,
    submit,
)
from tests.worker.engine_stage import A, B, Stage
from tests.worker.parity.adapters import make_adapter
from tests.worker.parity.bases import make_base


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gemma4")
    base = make_base("gemma4-all", root / "base")
    make_adapter(base, "rank-4-attention", root / A)
    make_adapter(base, "activated", root / B)
    return root


def test_chunks_and_cached_prefixes_change_no_token(files: Path) -> None:
    runner = make_runner(files)
    requests = [submit("base1"), submit("a2", A, num_prompt=130, temperature=0.8), submit("b1", B)]
    expected = alone(runner, files, requests)
    stage = run(runner, files, requests, max_step_tokens=7)
    assert stage.outputs == expected
    again = {request.request.request_id: f"again{n}" for n, request in enumerate(requests)}
    stage.run(*(changed(r, request_id=again[r.request.request_id]) for r in requests))
    stage.close()
    assert {name: stage.outputs[other] for name, other in again.items()} == expected
    assert stage.cached["again1"] == 128, "the second run read the first one's keys"


def test_preempted_requests_end_with_the_tokens_of_an_undisturbed_run(files: Path) -> None:
    block_bytes = make_runner(files).block_bytes
    runner = make_runner(files, arena_bytes=28 * block_bytes, max_num_batched_tokens=4)
    old = submit("old1", num_prompt=10, max_tokens=150, temperature=0.7)
    young = submit("young2", num_prompt=160, max_tokens=20, temperature=0.7)
    expected = alone_in_small_steps(runner, files, [old, young])
    stage = Stage(runner, files, max_step_tokens=4)
    assert stage.run(old, young) == expected
    assert stage.engine.scheduler.num_preemptions > 0
