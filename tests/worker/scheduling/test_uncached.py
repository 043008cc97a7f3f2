"""Pooled prompts take no block of the arena where nobody has cached their beginning."""

from __future__ import annotations

import pytest

from loraplex.api.pooling import Pooling
from loraplex_services.worker.types.step_plan import StepPlan
from tests.worker.scheduling.stage import Stage, make_request


def vector(request_id: str, num_prompt: int, **fields: object) -> object:
    return make_request(request_id, num_prompt, 0, **{"pooling": Pooling.LAST, **fields})


def names(plan: StepPlan) -> list[str]:
    return [row.request.request_id for row in plan.rows]


@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN, Pooling.HEAD])
def test_pooled_prompts_that_fit_in_a_step_use_no_blocks(pooling: Pooling) -> None:
    stage = Stage()
    stage.submit(vector("a", 9, pooling=pooling), vector("b", 7, pooling=pooling))
    plan = stage.step()
    assert names(plan) == ["a", "b"] and not plan.uses_cache
    assert stage.finished == ["a", "b"]
    assert stage.arena.num_free == 24 and stage.prefixes.num_idle == 0


def test_they_start_where_no_block_is_free() -> None:
    stage = Stage(num_blocks=4)
    stage.submit(make_request("text", 8, 8))
    stage.step()
    assert not stage.scheduler.is_full
    stage.submit(vector("a", 14, prompt_ids=[2] * 14))
    assert names(stage.step()) == ["a"]


def test_their_steps_and_those_of_streams_alternate() -> None:
    stage = Stage(num_blocks=60)
    stage.submit(make_request("text", 3, 8))
    stage.step()
    stage.submit(*(vector(f"v{index}", 10) for index in range(4)))
    assert [names(stage.step()) for _ in range(4)] == [["v0"], ["text"], ["v1"], ["text"]]
    stage.run_dry()
    assert sorted(stage.finished) == ["text", "v0", "v1", "v2", "v3"]


def test_a_prompt_longer_than_a_step_is_computed_in_parts_with_the_cache() -> None:
    stage = Stage()
    stage.submit(vector("long", 20))
    plan = stage.step()
    assert plan.uses_cache and [row.num_tokens for row in plan.rows] == [16]
    stage.run_dry()
    assert stage.finished == ["long"]


def test_a_cached_beginning_is_read_from_the_cache() -> None:
    stage = Stage()
    stage.submit(make_request("text", 12, 1))
    stage.run_dry()
    stage.submit(vector("v", 12), vector("mean", 12, pooling=Pooling.MEAN))
    first, second = stage.step(), stage.step()
    assert names(first) == ["mean"] and not first.uses_cache
    assert [(row.request.request_id, row.start) for row in second.rows] == [("v", 8)]


def test_a_base_with_recurrent_layers_computes_them_with_its_state() -> None:
    stage = Stage(state_blocks=2)
    stage.submit(vector("v", 9))
    assert stage.step().uses_cache


def test_those_that_do_not_fit_into_a_step_together_take_one_after_the_other() -> None:
    stage = Stage()
    stage.submit(
        *(vector(f"v{index}", 10) for index in range(3)),
        make_request("text", 5, 2, prompt_ids=[2] * 5),
    )
    assert [names(stage.step()) for _ in range(3)] == [["v0"], ["text"], ["v1"]]
