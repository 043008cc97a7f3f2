"""Events that wait for their reader become one event."""

from __future__ import annotations

from loraplex.api.output import FinishReason
from loraplex_services.gateway.request import Tokens
from loraplex_services.gateway.workers.token_stream import merged


def test_an_event_of_several_has_the_facts_of_the_last_one() -> None:
    first = Tokens((1, 2), 0, cached_tokens=3)
    last = Tokens((), 2, finish_reason=FinishReason.LENGTH, pooled=(0.5, 0.25))
    one = merged([first, last])
    assert (one.token_ids, one.position, one.cached_tokens) == ((1, 2), 0, 3)
    assert (one.finish_reason, one.pooled) == (FinishReason.LENGTH, (0.5, 0.25))
