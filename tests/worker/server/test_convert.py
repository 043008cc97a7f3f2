"""Outputs of the engine as messages to gateways."""

from __future__ import annotations

from loraplex.api.output import (
    FinishReason,
    PackedLogprobs,
    RoutedExperts,
    RoutingShape,
    Timings,
    TokenLogprob,
)
from loraplex_services.worker.server.convert import events_to_wire, token_to_wire
from loraplex_services.worker.server.sessions import SessionUpdate
from loraplex_services.worker.types.messages import TokenOutput


def test_an_event_has_every_field_of_its_output():
    output = TokenOutput(
        request_id="1/r",
        token_ids=[7, 8],
        output_position=3,
        finish_reason=FinishReason.STOP,
        stop_token_id=0,
        logprobs=[TokenLogprob(7, -0.5), TokenLogprob(8, -1.5)],
        prompt_logprobs=PackedLogprobs(0, b"\1\0\0\0", b"\0\0\0\0"),
        cached_tokens=16,
        timings=Timings(1.0, 2.0, 3.0),
        pooled=[0.25],
        routed_experts=RoutedExperts(0, RoutingShape(1, 1, 4), b"\2"),
    )
    event = token_to_wire("r", output)
    assert {field.name for field, _ in event.ListFields()} == set(event.DESCRIPTOR.fields_by_name)
    assert event.request_id == "r" and event.token_ids == [7, 8] and event.output_position == 3
    assert event.stop_token_id == 0 and event.cached_tokens == 16 and event.pooled == [0.25]


def test_the_events_of_a_step_keep_the_order_of_its_outputs():
    outputs = [(name, TokenOutput(f"1/{name}", [i], 10 + i)) for i, name in enumerate("abc")]
    events = events_to_wire(SessionUpdate(4, outputs))
    found = [(each.request_id, [*each.token_ids], each.output_position) for each in events.tokens]
    assert events.step == 4
    assert found == [("a", [0], 10), ("b", [1], 11), ("c", [2], 12)]
    assert all(not each.HasField("stop_token_id") for each in events.tokens)
