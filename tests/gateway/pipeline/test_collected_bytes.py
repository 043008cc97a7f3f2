"""What the answers that are not streamed may hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loraplex.api.output import Candidate, TokenLogprob
from loraplex.errors import InvalidRequest, ResourceExhausted
from loraplex_services.common.callers import ALL_SCOPES, LOCAL, Caller
from loraplex_services.gateway.pipeline import collected_bytes as collected
from loraplex_services.gateway.pipeline.collected_bytes import CollectedBytes, bytes_of
from loraplex_services.gateway.request import TextDelta
from tests.gateway.scripted_worker import ROUTING, experts_of

pytestmark = pytest.mark.hostile
ACME, GLOBEX = (Caller(tenant, f"{tenant}-key", ALL_SCOPES) for tenant in ("acme", "globex"))
DELTA = TextDelta(0, "x", token_ids=(1,))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collected, "MAX_COLLECTED_BYTES", 10 * bytes_of(DELTA))
    monkeypatch.setattr(collected, "MAX_COLLECTED_BYTES_PER_TENANT", 8 * bytes_of(DELTA))


def fill(note: Callable[[TextDelta], None], num_deltas: int) -> None:
    for _ in range(num_deltas):
        note(DELTA)


def test_answers_of_one_tenant_hold_so_much_together_and_give_it_back() -> None:
    answers = CollectedBytes()
    for _ in range(3):
        with answers.counted(ACME) as first, answers.counted(ACME) as second:
            fill(first, 4)
            fill(second, 4)
            with pytest.raises(ResourceExhausted, match="stream them"):
                first(DELTA)


def test_an_answer_that_exceeds_the_limit_alone_is_not_to_be_asked_for_again() -> None:
    answers = CollectedBytes()
    with answers.counted(ACME) as note:
        fill(note, 8)
        with pytest.raises(InvalidRequest, match="the answer is too large"):
            note(DELTA)
    with pytest.raises(InvalidRequest), answers.unread(ACME, 9 * bytes_of(DELTA)):
        pass
    with answers.unread(ACME, 8 * bytes_of(DELTA)):
        pass  # nothing is held any more


def test_when_all_is_taken_whoever_holds_more_than_an_equal_share_is_refused() -> None:
    answers = CollectedBytes()
    with answers.counted(ACME) as acme, answers.counted(GLOBEX) as globex:
        fill(acme, 7)
        fill(globex, 4)
        with pytest.raises(ResourceExhausted):
            acme(DELTA)


def test_without_keys_only_the_experts_of_one_answer_are_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collected, "MAX_COLLECTED_BYTES_PER_TENANT", 10 * ROUTING.token_bytes)
    answers = CollectedBytes()
    for _ in range(2):
        with answers.counted(LOCAL) as note:
            fill(note, 100)
            note(TextDelta(0, routed_experts=experts_of(0, 6)))
            note(TextDelta(1, routed_experts=experts_of(0, 4)))
            with pytest.raises(InvalidRequest, match="experts over gRPC"):
                note(TextDelta(0, routed_experts=experts_of(6, 7)))


@pytest.mark.parametrize("caller", [ACME, LOCAL], ids=["with a key", "without keys"])
def test_numbers_of_vectors_count(monkeypatch: pytest.MonkeyPatch, caller: Caller) -> None:
    vector = TextDelta(0, pooled=(0.5,) * 1000)
    most = 2 * bytes_of(vector) + 100
    monkeypatch.setattr(collected, "MAX_COLLECTED_BYTES_PER_TENANT", most)
    monkeypatch.setattr(collected, "MAX_COLLECTED_BYTES", most)
    with CollectedBytes().counted(caller) as note:
        note(vector)
        note(vector)
        with pytest.raises(InvalidRequest, match="inputs at a time"):
            note(vector)


def test_experts_count() -> None:
    experts = experts_of(0, 100)
    num_bytes = bytes_of(TextDelta(0, routed_experts=experts)) - bytes_of(TextDelta(0))
    assert num_bytes == 100 * ROUTING.token_bytes


def test_logprobs_count() -> None:
    entry = TokenLogprob(1, -1.0, tuple(Candidate(token, -1.0) for token in range(20)))
    assert bytes_of(TextDelta(0, "x", (1,), (entry,))) > 5 * bytes_of(DELTA)
