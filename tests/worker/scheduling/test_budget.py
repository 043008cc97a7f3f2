"""How many tokens of prompts a step takes alongside requests that decode."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loraplex_services.worker.scheduling.budget import MAX_STRETCH, MIN_PROMPT_TOKENS, TokenBudget
from loraplex_services.worker.scheduling.running import RunningBatch
from loraplex_services.worker.types.step_plan import StepPlan
from tests.worker.scheduling.stage import Stage, make_request

MAX_TOKENS = 2048


def plan_of(num_prompt: int, num_decoding: int) -> StepPlan:
    running = RunningBatch()
    decoding = [running.add(make_request(f"{i}", 1), ()) for i in range(num_decoding)]
    for member in decoding:
        member.request.num_computed, member.request.output_ids = 1, [7]
    prompt = running.add(make_request("prompt", num_prompt + 1), ())
    rows = [*([prompt.row(num_prompt)] if num_prompt else []), *(m.row(1) for m in decoding)]
    return StepPlan(0, tuple(rows))


def taught(decode_s: float, token_s: float, max_step_s: float = 0.2) -> TokenBudget:
    budget = TokenBudget(MAX_TOKENS, max_step_s)
    for _ in range(3):
        budget.measure(plan_of(0, 1), decode_s)
        budget.measure(plan_of(500, 1), decode_s + 500 * token_s)
    return budget


def batch_of(num_decoding: int) -> RunningBatch:
    running = RunningBatch()
    for i in range(num_decoding):
        member = running.add(make_request(f"{i}", 1), ())
        member.request.num_computed, member.request.output_ids = 1, [7]
        running.caught_up(member.request)
    return running


def max_prompt_tokens(budget: TokenBudget, num_decoding: int = 4) -> int:
    """Of the next step, in which so many requests decode."""
    budget.share(batch_of(num_decoding), False)
    return budget.max_prompt_tokens


@given(st.floats(0.001, 10.0), st.floats(1e-6, 1.0))
def test_prompts_fit_into_the_time_that_others_may_wait(decode_s: float, token_s: float) -> None:
    num_tokens = max_prompt_tokens(taught(decode_s, token_s))
    longest_s = max(0.2, MAX_STRETCH * decode_s)
    assert MIN_PROMPT_TOKENS <= num_tokens <= MAX_TOKENS
    if num_tokens > MIN_PROMPT_TOKENS:
        assert decode_s + num_tokens * token_s <= longest_s * (1 + 1e-6)
    if num_tokens < MAX_TOKENS:
        assert decode_s + (num_tokens + 1) * token_s >= longest_s * (1 - 1e-6)


def test_one_slow_step_does_not_cut_the_next_prompts() -> None:
    budget = taught(0.02, 0.0005)
    before = max_prompt_tokens(budget)
    budget.measure(plan_of(100, 4), 5.0)
    assert max_prompt_tokens(budget) == before == 360


def test_where_nobody_decodes_a_prompt_has_the_whole_step() -> None:
    budget = taught(0.02, 0.0005)
    running = RunningBatch()
    running.add(make_request("long", 2000), ())
    assert budget.share(running, False) == ({"long": 2000}, 48)
    member = running.add(make_request("stream", 1), ())
    member.request.num_computed, member.request.output_ids = 1, [7]
    running.caught_up(member.request)
    assert budget.share(running, False) == ({"long": 360}, 0)
    assert budget.share(running, True) == ({"long": 180}, 180)


def test_several_prompts_take_no_longer_than_streams_may_wait() -> None:
    budget = taught(0.02, 0.0005)
    running = RunningBatch()
    running.add(make_request("first", 2000), ())
    assert budget.share(running, True) == ({"first": 200}, 200)
    running.add(make_request("second", 2000), ())
    assert budget.share(running, False) == ({"first": 400, "second": 0}, 0)
    assert budget.left_after(0, 2048) == 2048
    assert (budget.left_after(100, 2048), budget.left_after(2000, 2048)) == (300, 0)


def test_prompts_that_arrive_together_share_a_step_no_longer_than_streams_may_wait() -> None:
    stage = Stage(num_blocks=1000, max_step_tokens=1024, max_step_s=0.2)
    stage.submit(make_request("first", 500, 1))
    stage.scheduler.budget.measure(stage.step(), 0.25)  # 400 tokens in 0.2 s
    stage.submit(
        *(make_request(name, max_tokens=1, prompt_ids=[i] * 150) for i, name in enumerate("abc", 2))
    )
    plans = [stage.step() for _ in range(2)]
    rows = [{row.request.request_id: row.num_tokens for row in plan.rows} for plan in plans]
    assert rows == [{"a": 150, "b": 150, "c": 100}, {"c": 50}]
    stage.submit(make_request("alone", 900, prompt_ids=[9] * 900))
    assert [row.num_tokens for row in stage.step().rows] == [900]


def test_before_anything_is_measured_and_without_a_bound_only_the_token_budget_counts() -> None:
    assert max_prompt_tokens(TokenBudget(MAX_TOKENS, 0.2)) == MAX_TOKENS
    assert max_prompt_tokens(taught(0.02, 0.01, max_step_s=0.0)) == MAX_TOKENS


def test_a_step_is_compared_with_steps_in_which_about_as_many_requests_decode() -> None:
    budget = TokenBudget(MAX_TOKENS, 0.2)
    for num_decoding, decode_s in ((1, 0.01), (8, 0.04), (32, 0.08)):
        budget.measure(plan_of(0, num_decoding), decode_s)
        budget.measure(plan_of(100, num_decoding), decode_s + 100 * 0.001)
    expected = {0: 200, 1: 190, 3: 190, 8: 160, 15: 160, 32: 240, 100: 240}
    assert {n: max_prompt_tokens(budget, n) for n in expected} == expected
