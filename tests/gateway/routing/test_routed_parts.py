"""The experts of a job's tokens: each position once, whatever attempts they come from."""

from __future__ import annotations

import pytest

from loraplex.api.output import FinishReason
from loraplex.api.request import WorkerRequest
from loraplex.api.sampling import SamplingParams
from loraplex.errors import Unavailable
from loraplex_services.gateway.request import Tokens, WorkerJob
from loraplex_services.gateway.routing.relay import Relay
from loraplex_services.gateway.routing.routed_parts import RoutedParts
from loraplex_services.gateway.workers.token_stream import TokenStream
from tests.gateway.routing.test_relay import WorkerPool
from tests.gateway.scripted_worker import experts_of

PROMPT, OUTPUT = (1, 2, 3, 4, 5), (7, 8, 9)


def job(routed_from: int | None = 0) -> WorkerJob:
    sampling = SamplingParams(max_tokens=len(OUTPUT), seed=1)
    request = WorkerRequest(prompt_ids=PROMPT, sampling=sampling, routed_from=routed_from)
    return WorkerJob(request, "base", 1e9)


def event(start: int, end: int, experts: tuple[int, int] | None = None) -> Tokens:
    """Tokens [start, end) of the output, and experts of positions."""
    finish = FinishReason.LENGTH if end == len(OUTPUT) else None
    routed = experts_of(*experts) if experts else None
    return Tokens(OUTPUT[start:end], start, finish_reason=finish, routed_experts=routed)


class Feeding:
    """An attempt that sends some events and is then lost, unless it ends."""

    def __init__(self, *events: Tokens) -> None:
        self.events = events

    def __call__(self, stream: TokenStream, job: WorkerJob) -> None:
        for each in self.events:
            stream.put(each)
        if self.events[-1].finish_reason is None:
            stream.fail(Unavailable("gone"))


async def relayed(pool: WorkerPool, asked: WorkerJob) -> list[Tokens]:
    return [tokens async for tokens in Relay(pool).stream(asked)]


async def test_experts_of_parts_of_a_prompt_come_with_the_first_tokens() -> None:
    pool = WorkerPool(
        Feeding(event(0, 0, (1, 3)), event(0, 0, (3, 4)), event(0, 2, (4, 6)), event(2, 3, (6, 7)))
    )
    (tokens,) = await relayed(pool, job(1))
    assert tokens.token_ids == OUTPUT
    assert tokens.routed_experts == experts_of(1, 7)


async def test_another_worker_continues_where_the_first_one_stopped() -> None:
    pool = WorkerPool(
        Feeding(event(0, 0, (0, 3)), event(0, 1, (3, 5))),
        Feeding(event(1, 3, (5, 7))),
    )
    first, second = await relayed(pool, job())
    assert (first.routed_experts, second.routed_experts) == (experts_of(0, 5), experts_of(5, 7))
    assert [each.request.routed_from for each in pool.jobs] == [0, 5]


async def test_an_attempt_without_a_token_leaves_no_experts() -> None:
    pool = WorkerPool(Feeding(event(0, 0, (2, 4))), Feeding(event(0, 3, (2, 7))))
    (tokens,) = await relayed(pool, job(2))
    assert tokens.routed_experts == experts_of(2, 7)
    assert [each.request.routed_from for each in pool.jobs] == [2, 2]


@pytest.mark.parametrize("part", [None, (1, 5), (0, 4)])
async def test_a_worker_that_leaves_some_out_is_not_believed(part: tuple[int, int] | None) -> None:
    """As one that does not know the field."""
    pool = WorkerPool(Feeding(event(0, 3, part)), Feeding(event(0, 3, (0, 7))))
    (tokens,) = await relayed(pool, job())
    assert tokens.routed_experts == experts_of(0, 7)
    assert len(pool.jobs) == 2


async def test_experts_that_nobody_asked_for_are_dropped() -> None:
    pool = WorkerPool(Feeding(event(0, 3, (0, 7))))
    (tokens,) = await relayed(pool, job(None))
    assert tokens.routed_experts is None


def test_positions_that_come_again_are_dropped() -> None:
    parts = RoutedParts(job().request)
    parts.add(experts_of(0, 4))
    parts.add(experts_of(2, 5))
    assert parts.take(1) == experts_of(0, 5)
    parts.add(experts_of(0, 6))
    assert parts.take(2) == experts_of(5, 6)
