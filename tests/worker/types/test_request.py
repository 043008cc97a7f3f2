"""The order of a batch and the arithmetic of a request."""

from __future__ import annotations

import pytest

from loraplex.api.request import AdapterSet
from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import PlannedRow, StepPlan, batch_order


def make_request(num_prompt: int = 4, **fields: object) -> Request:
    return Request("r", list(range(num_prompt)), SamplingParams(max_tokens=8, seed=0), **fields)


def row(start: int, num_tokens: int, *slots: int) -> PlannedRow:
    coefficients = tuple((slot, 1.0) for slot in slots)
    return PlannedRow(make_request(), start, num_tokens, True, coefficients)


def test_contexts_come_first_then_slots_rise_and_the_base_is_last() -> None:
    rows = [row(4, 1), row(4, 1, 2), row(0, 4), row(4, 1, 1, 9), row(0, 4, 7), row(3, 1, 0)]
    ordered = sorted(rows, key=batch_order)
    assert [(r.is_context, r.slots[:1]) for r in ordered] == [
        (True, ((0, 1.0),)),
        (True, ((7, 1.0),)),
        (True, ()),
        (False, ((1, 1.0),)),
        (False, ((2, 1.0),)),
        (False, ()),
    ]
    plan = StepPlan(0, tuple(ordered))
    assert (plan.num_contexts, plan.num_tokens, plan.num_distinct_adapters) == (3, 12, 5)


def test_tokens_are_counted_over_prompt_and_output() -> None:
    request = make_request(output_ids=[70, 71], num_computed=3)
    assert (request.num_tokens, request.num_pending, request.max_num_tokens) == (6, 3, 12)
    assert (request.tokens(0, 1), request.tokens(3, 6)) == ([0], [3, 70, 71])


def test_an_adapter_set_is_ordered_and_keyed_by_digests_and_weights() -> None:
    one = AdapterSet((("sha256:a", 1.0), ("sha256:b", 0.5)))
    assert one.digests == ("sha256:a", "sha256:b")
    assert one.key() != AdapterSet((("sha256:a", 1.0), ("sha256:b", 0.25))).key()
    with pytest.raises(AssertionError, match="sorted"):
        AdapterSet((("sha256:b", 1.0), ("sha256:a", 1.0)))
