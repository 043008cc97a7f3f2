"""Recurrent states: how many blocks they take, and from where a prompt goes on."""

from __future__ import annotations

import pytest

from loraplex_services.worker.types.step_plan import PlannedRow
from tests.worker.scheduling.stage import Stage, make_request, make_states


def run(stage: Stage, name: str, prompt_ids: list[int]) -> int:
    """Run a request alone; how many of its tokens were not computed."""
    request = make_request(name, prompt_ids=prompt_ids)
    stage.submit(request)
    stage.run_dry()
    return request.num_cached


def test_a_prompt_goes_on_from_the_last_block_of_one_that_it_repeats() -> None:
    stage = Stage(num_blocks=80, state_blocks=3, max_step_tokens=64)
    prompt = list(range(30))
    assert run(stage, "first", prompt) == 0
    assert run(stage, "again", prompt) == 28
    assert run(stage, "next turn", [*prompt, *range(40, 60)]) == 28


def test_a_common_beginning_is_found_by_the_third_request_that_has_it() -> None:
    stage = Stage(num_blocks=80, state_blocks=3, max_step_tokens=64)
    common = list(range(20))
    assert run(stage, "first", [*common, *range(40, 50)]) == 0
    assert run(stage, "second", [*common, *range(50, 60)]) == 0, "its KV is there, not its state"
    assert run(stage, "third", [*common, *range(60, 70)]) == 20


def test_snapshots_give_way_to_what_runs() -> None:
    stage = Stage(num_blocks=20, state_blocks=3, max_step_tokens=64)
    for number in range(6):
        assert run(stage, str(number), [number] * 30) == 0
    assert stage.scheduler.num_preemptions == 0
    assert stage.prefixes.states.idle_blocks(()) > 0


def test_a_preempted_request_gives_its_state_back_and_computes_it_again() -> None:
    stage = Stage(num_blocks=26, max_step_tokens=4, max_running=4, state_blocks=3)
    stage.submit(make_request("old", 1, 40))
    young = make_request("young", 60, 4)
    stage.submit(young)
    while not stage.scheduler.num_preemptions:
        stage.step()
    assert young.state_blocks == [] and young.num_computed == 0
    stage.run_dry()
    assert stage.finished == ["old", "young"] and len(young.output_ids) == 4


def test_without_a_prefix_cache_no_snapshot_is_taken() -> None:
    stage = Stage(num_blocks=40, state_blocks=3, prefix_cache=False)
    assert run(stage, "first", [1] * 20) == run(stage, "again", [1] * 20) == 0
    assert stage.arena.num_free == 40


@pytest.mark.parametrize("num_blocks", [8, 9])
def test_a_request_whose_state_leaves_no_blocks_for_its_tokens_is_refused(num_blocks: int) -> None:
    stage = Stage(num_blocks=num_blocks, state_blocks=3)
    stage.submit(make_request("r", 20, 4))  # 6 blocks of KV
    stage.run_dry()
    assert (stage.lost, stage.finished) == ((["r"], []) if num_blocks == 8 else ([], ["r"]))


@pytest.mark.parametrize("num_accepted", [0, 1, 2])
def test_the_state_after_the_last_accepted_draft_is_kept_and_the_others_are_freed(
    num_accepted: int,
) -> None:
    states = make_states(num_blocks=64, state_blocks=2)
    request = make_request("r", 3)
    request.state_blocks = states._allocate(request)
    assert [states.free_for_drafts(n, 0.0) for n in (1, 2, 9)] == [1, 2, 2], "a share of the arena"
    before = request.state_blocks
    ((first, *others),) = states.spans([PlannedRow(request, 3, 3, True, (), drafts=(5, 6))], 0.0)
    assert (first.num_tokens, first.source, first.target) == (1, before, before)
    assert [span.num_tokens for span in others] == [1, 1]
    assert [span.source for span in others] == [before, others[0].target]
    states.verified(request, num_accepted, 0.0)
    assert request.state_blocks == (first, *others)[num_accepted].target
    assert not request.draft_states and len(states._arena.blocks_by_owner()["request r"]) == 2
