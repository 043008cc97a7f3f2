"""Answers that are collected before they are sent."""

from __future__ import annotations

import gc

from loraplex.api.output import (
    Candidate,
    FinishReason,
    PackedLogprobs,
    TokenLogprob,
    WeightSpan,
)
from loraplex_services.gateway.http.collected import CollectedChoice
from loraplex_services.gateway.request import TextDelta
from tests.gateway.scripted_worker import experts_of

DELTA = TextDelta(0, "x", token_ids=(1,))


def test_collected_text_deltas_add_up_to_the_choice() -> None:
    parts = [
        TextDelta(
            3,
            text=f"{number}",
            token_ids=(number, number + 1),
            logprobs=tuple(
                TokenLogprob(number, -0.1, (Candidate(9, -0.2),) * count) for count in (number, 0)
            ),
            offsets=(number, number),
            finish_reason=FinishReason.LENGTH if number == 2 else None,
            prompt_logprobs=PackedLogprobs(1) if not number else None,
            spans=(WeightSpan(2 * number, 2, ("a",)),),
            routed_experts=experts_of(2 * number, 2 * number + 2) if number else None,
        )
        for number in range(3)
    ]
    choice = CollectedChoice(parts[0])
    for part in parts[1:]:
        choice.add(part)
    whole = choice.sum()
    assert list(whole.logprobs) == [entry for part in parts for entry in part.logprobs]
    assert (whole.index, whole.text, whole.token_ids) == (3, "012", (0, 1, 1, 2, 2, 3))
    assert (whole.offsets, whole.finish_reason) == ((0, 0, 1, 1, 2, 2), FinishReason.LENGTH)
    assert whole.prompt_logprobs == PackedLogprobs(1)
    assert whole.spans == (WeightSpan(0, 6, ("a",)),)
    assert whole.routed_experts == experts_of(2, 6)


def test_collected_answers_keep_no_objects_for_the_garbage_collector() -> None:
    entry = TokenLogprob(1, -1.0, tuple(Candidate(token, -1.0) for token in range(5)))
    spans = (WeightSpan(0, 1, ("a",)),)
    choice = CollectedChoice(DELTA)
    gc.collect()
    num_before = len(gc.get_objects())
    for number in range(1000):
        routed = experts_of(number, number + 1)
        choice.add(
            TextDelta(0, "x", (number,), (entry,), (number,), spans=spans, routed_experts=routed)
        )
    gc.collect()
    assert len(gc.get_objects()) < num_before + 500
