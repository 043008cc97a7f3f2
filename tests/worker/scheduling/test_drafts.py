"""Which drafts a request gets, and when it gets none."""

from __future__ import annotations

import random

import pytest

from loraplex.api.pooling import Pooling
from loraplex.api.request import BASE_ONLY, AdapterSet
from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.scheduling import drafts as drafting
from loraplex_services.worker.scheduling.drafts import (
    FIXED_ROWS,
    MAX_DRAFTS,
    PROBE_STEPS,
    Drafts,
)
from loraplex_services.worker.scheduling.limits import SchedulerLimits
from loraplex_services.worker.types.request import OwnRope, Request
from loraplex_services.worker.types.step_plan import PlannedRow, Sampled, SampledRow
from tests.worker.scheduling.stage import make_states

BLOCK = 16
WORDS = [5, 6, 7, 8, 9]


def decoding(prompt_ids, *, num_blocks=4, max_tokens=64, adapters=BASE_ONLY, **params):
    """A request whose last known token is to be computed."""
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, **params)
    known, last = list(prompt_ids[:-1]), [prompt_ids[-1]]
    request = Request("r", known, sampling, adapters, output_ids=last)
    request.num_computed = len(prompt_ids) - 1
    request.block_tables = [[0] * num_blocks]
    return request


def make_drafts(max_step_tokens=64, **costs):
    limits = SchedulerLimits(max_step_tokens, 1, drafts=True, **costs)
    return Drafts(limits, BLOCK, make_states())


def row_of(request, num_tokens=1):
    return PlannedRow(request, request.num_computed, num_tokens, True, ())


def sampled(num_accepted, proposal=None):
    return SampledRow(1, further=(Sampled(1, None),) * num_accepted, proposal=proposal)


def drafted(request, drafts=None, max_step_tokens=64):
    drafts = drafts or make_drafts(max_step_tokens)
    (row,) = drafts.added([row_of(request)], 0.0)
    assert row.num_tokens == 1 + len(row.drafts)
    return row.drafts


def test_a_draft_is_what_followed_the_last_tokens_where_they_were_last():
    assert drafted(decoding([5, 6, 7, 1, 5, 6, 7, 2, 5, 6, 7]))[0] == 2
    assert drafted(decoding([1, 2, 3, 4, 5])) == ()
    assert drafted(decoding([5, 6])) == ()


def test_a_cycle_is_continued_beyond_the_end():
    (first, *others) = drafted(decoding([1, 4, 4, 4, 4]))
    assert [first, *others] == [4] * len([first, *others]) and others
    ids = drafted(decoding([9, 1, 2, 3, 1, 2, 3]))
    assert ids == (1, 2, 3, 1, 2, 3, 1)[: len(ids)]


def test_bytes_of_other_tokens_are_no_match():
    """The bytes of 3, 3, 3 lie across the borders of these tokens."""
    shifted = [3 << 8, 3 << 8, 3 << 8, 3 << 8, 7]
    assert drafted(decoding([*shifted, 3, 3, 3])) == ()


def test_drafts_are_those_of_a_plain_search():
    rng = random.Random(1)
    for _ in range(200):
        ids = [rng.randrange(4) for _ in range(rng.randrange(2, 60))]
        positions = [i for i in range(len(ids) - 3) if ids[i : i + 3] == ids[-3:]]
        found = drafted(decoding(ids, num_blocks=8))
        assert bool(found) == bool(positions)
        for draft in found:
            ids.append(draft)
        if positions:
            begin = positions[-1] + 3
            assert all(ids[begin + i] == draft for i, draft in enumerate(found))


def test_drafts_end_with_the_block_the_output_and_the_step():
    ids = WORDS * 3
    assert len(ids) == BLOCK - 1
    assert len(drafted(decoding(ids, num_blocks=1))) == 1
    assert len(drafted(decoding([0, *ids], num_blocks=1))) == 0
    assert len(drafted(decoding(ids, max_tokens=3))) == 1
    assert len(drafted(decoding(ids, max_tokens=2))) == 0
    assert len(drafted(decoding(ids), max_step_tokens=2)) == 1
    assert len(drafted(decoding(ids), max_step_tokens=1)) == 0


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"bad_sequences": ((1, 2),)},
    ],
    ids=str,
)
def test_what_the_output_so_far_decides_gets_no_drafts(params):
    assert drafted(decoding(WORDS * 3, **params)) == ()


def test_grammars_poolings_prompts_and_ropes_of_adapters_get_no_drafts():
    for field, value in (
        ("constraint", object()),
        ("pooling", Pooling.LAST),
        ("rope", OwnRope("yarn", None)),
    ):
        request = decoding(WORDS * 3)
        setattr(request, field, value)
        assert drafted(request) == (), field
    prompt = Request("p", WORDS * 3, SamplingParams(max_tokens=9, seed=0))
    prompt.block_tables = [[0] * 4]
    (row,) = make_drafts().added([row_of(prompt, 15)], 0.0)
    assert row.drafts == ()


def test_drafts_that_prove_wrong_stop_and_are_tried_again_now_and_then():
    drafts, request = make_drafts(), decoding(WORDS * 3)
    lengths = []
    for _ in range(4 * PROBE_STEPS):
        (row,) = drafts.added([row_of(request)], 0.0)
        lengths.append(len(row.drafts))
        drafts.verified(row, sampled(0), 0.0)
    assert lengths[0] > 1
    assert set(lengths[PROBE_STEPS:]) == {0, 1}
    assert lengths[PROBE_STEPS:].count(1) == 3
    assert drafts.take_counts() == (sum(lengths), 0)
    assert drafts.take_counts() == (0, 0)


def test_requests_for_an_adapter_begin_with_what_is_known_of_it():
    drafts = make_drafts()
    poor, other = AdapterSet((("poor", 1.0),)), AdapterSet((("other", 1.0),))
    for _ in range(8):
        (row,) = drafts.added([row_of(decoding(WORDS * 3, adapters=poor))], 0.0)
        drafts.verified(row._replace(drafts=(1,) * 7), sampled(0), 0.0)
    assert len(drafted(decoding(WORDS * 3, adapters=poor), drafts)) < 3
    assert len(drafted(decoding(WORDS * 3, adapters=other), drafts)) > 3


def test_outputs_of_an_adapter_are_drafts_for_its_other_requests():
    adapter, other = AdapterSet((("a", 1.0),)), AdapterSet((("b", 1.0),))
    drafts = make_drafts()
    ended = decoding([9, 1, 2, 3], adapters=adapter)
    ended.output_ids += [4, 5, 6]
    drafts.ended(ended)
    asked = [8, 1, 2, 3]
    assert drafted(decoding(asked, adapters=adapter), drafts)[:3] == (4, 5, 6)
    assert drafted(decoding(asked, adapters=other), drafts) == ()
    salted = decoding(asked, adapters=adapter)
    salted.cache_salt = "another"
    assert drafted(salted, drafts) == ()
    of_another_tenant = decoding(asked, adapters=adapter)
    of_another_tenant.tenant = "globex"
    assert of_another_tenant.cache_salt == ended.cache_salt
    assert drafted(of_another_tenant, drafts) == (), "its speed would tell what others were told"
    own = decoding([1, 2, 3, 7, *asked], adapters=adapter)
    assert drafted(own, drafts)[0] == 7


def test_outputs_are_kept_within_bounds(monkeypatch):
    monkeypatch.setattr(drafting, "MAX_KEPT_TOKENS", 8)
    monkeypatch.setattr(drafting, "MAX_KEPT_OUTPUTS", 2)
    drafts = make_drafts()
    sets = [AdapterSet(((name, 1.0),)) for name in "abc"]
    for adapters in sets:
        drafts.ended(decoding([1, 2, 3, 4, 5], adapters=adapters))
        for _ in range(4):
            drafts.ended(decoding([6, 7, 8, 9, 6], adapters=adapters))
    assert drafted(decoding([6, 7, 8, 9], adapters=sets[2]), drafts)
    assert drafted(decoding([1, 2, 3, 4], adapters=sets[2]), drafts) == ()
    assert drafted(decoding([6, 7, 8, 9], adapters=sets[0]), drafts) == ()


def test_drafts_that_prove_right_grow():
    drafts, request = make_drafts(), decoding(WORDS * 3)
    for _ in range(12):
        (row,) = drafts.added([row_of(request)], 0.0)
        drafts.verified(row, sampled(len(row.drafts)), 0.0)
    assert len(row.drafts) == MAX_DRAFTS


def test_a_large_step_has_no_drafts_until_they_are_nearly_sure():
    drafts = make_drafts(256)
    rows = [row_of(decoding(WORDS * 3)) for _ in range(40)]
    assert not any(row.drafts for row in drafts.added(rows, 0.0))
    sure = rows[0]
    for _ in range(30):
        drafts.verified(sure._replace(drafts=(5,)), sampled(1), 0.0)
    assert [bool(row.drafts) for row in drafts.added(rows, 0.0)] == [True] + [False] * 39


def test_drafts_stretch_a_step_of_several_tenants_by_half_at_most():
    for num_rows in (2, 4, 8):
        drafts = make_drafts(256)
        rows = [row_of(decoding(WORDS * 3)) for _ in range(num_rows)]
        for row in rows * 20:
            drafts.verified(row._replace(drafts=(5,)), sampled(1), 0.0)
        alone = sum(len(row.drafts) for row in drafts.added(rows, 0.0))
        rows[0].request.tenant = "other"
        shared = [len(row.drafts) for row in drafts.added(rows, 0.0)]
        assert alone == 7 * num_rows
        assert min(shared) == max(shared) > 0
        assert sum(shared) <= (num_rows + FIXED_ROWS) / 2


@pytest.mark.parametrize(
    ("expert_share", "num_rows", "rate", "pays"),
    [
        (0.0, 1, 0.3, True),
        (0.5, 1, 0.4, False),  # the draft adds nearly half of the step
        (0.5, 1, 0.6, True),
        (0.9, 1, 0.7, False),
        (0.0, 64, 0.6, False),
        (0.9, 64, 0.6, True),  # all experts are read anyway, and more rows use them
    ],
)
def test_experts_that_only_a_draft_needs_count(expert_share, num_rows, rate, pays):
    drafts = make_drafts(1024, expert_share=expert_share, active_experts=0.125)
    rows = [row_of(decoding(WORDS * 3)) for _ in range(num_rows)]
    for row in rows:
        drafts._history(row.request).rates.found = rate
    assert any(row.drafts for row in drafts.added(rows, 0.0)) == pays


def test_the_history_grows_with_the_output():
    drafts, request = make_drafts(), decoding([1, 2, 3, 4])
    assert drafted(request, drafts) == ()
    request.output_ids += [1, 2, 3]
    request.num_computed += 3
    assert drafted(request, drafts)[0] == 4


def test_the_head_proposes_where_nothing_was_found_and_its_proposal_is_the_next_draft():
    drafts, request = make_drafts(proposal_cost=0.2), decoding([1, 2, 3, 4])
    (row,) = drafts.added([row_of(request)], 0.0)
    assert row.proposes and not row.drafts
    drafts.verified(row, sampled(0, proposal=9), 0.0)
    (row,) = drafts.added([row_of(request)], 0.0)
    assert row.proposes and row.drafts == (9,) and row.num_tokens == 2
    drafts.verified(row, sampled(1), 0.0)
    (row,) = drafts.added([row_of(request)], 0.0)
    assert row.drafts == (), "a proposal is for one step"
    assert not make_drafts().added([row_of(request)], 0.0)[0].proposes, "there is no head"


def test_the_head_proposes_nothing_that_no_step_could_verify():
    drafts = make_drafts(proposal_cost=0.2)
    for request in (
        decoding([1, 2, 3], max_tokens=3),
        decoding([1, 2, 3], presence_penalty=0.5),
    ):
        assert not drafts.added([row_of(request)], 0.0)[0].proposes
    prompt = Request("p", [1, 2, 3], SamplingParams(max_tokens=9, seed=0))
    prompt.block_tables = [[0] * 4]
    assert drafts.added([row_of(prompt, 3)], 0.0)[0].proposes, "for its first decode step"
    unfinished = row_of(prompt, 2)._replace(needs_logits=False)
    assert not drafts.added([unfinished], 0.0)[0].proposes


def test_a_head_that_proves_wrong_or_costs_too_much_is_asked_now_and_then():
    drafts, request = make_drafts(proposal_cost=0.2), decoding([1, 2, 3, 4])
    asked = []
    for _ in range(4 * PROBE_STEPS):
        (row,) = drafts.added([row_of(request)], 0.0)
        asked.append(row.proposes)
        drafts.verified(row, sampled(0, proposal=9 if row.proposes else None), 0.0)
    assert asked[0] and asked[PROBE_STEPS:].count(True) == 3
    rows = [row_of(decoding([1, 2, 3, 4])) for _ in range(40)]
    assert not any(row.proposes for row in drafts.added(rows, 0.0)), "a step of many rows"
    assert not make_drafts(proposal_cost=0.9).added([row_of(decoding([1, 2]))], 0.0)[0].proposes
