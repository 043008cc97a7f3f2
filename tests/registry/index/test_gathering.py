"""Many questions, few round trips: each answered rightly, none with what was known before it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from loraplex_services.registry.index.gathering import RequestBatcher


class Oracle:
    """Answers after `gate` opens, ten times the question."""

    def __init__(self) -> None:
        self.rounds: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def ask_all(self, questions: Sequence[int]) -> list[int]:
        self.rounds.append(list(questions))
        await self.gate.wait()
        if 13 in questions:
            raise LookupError("13")
        return [10 * question for question in questions]


async def test_questions_of_one_moment_share_a_round_trip_of_bounded_size() -> None:
    oracle = Oracle()
    gathering = RequestBatcher(oracle.ask_all, max_questions=4)
    answers = await asyncio.gather(*(gathering.ask(question) for question in range(10)))
    assert answers == [10 * question for question in range(10)]
    assert [len(round_) for round_ in oracle.rounds] == [4, 4, 2]


async def first_under_way() -> tuple[Oracle, RequestBatcher[int, int], asyncio.Task[int]]:
    """A round trip with the question 1, which lasts until the oracle's gate is opened."""
    oracle = Oracle()
    oracle.gate.clear()
    gathering = RequestBatcher(oracle.ask_all, max_questions=4)
    first = asyncio.create_task(gathering.ask(1))
    while not oracle.rounds:
        await asyncio.sleep(0)
    return oracle, gathering, first


async def test_a_question_never_joins_a_round_trip_that_is_under_way() -> None:
    oracle, gathering, first = await first_under_way()
    later = [asyncio.create_task(gathering.ask(question)) for question in (2, 3)]
    await asyncio.sleep(0)
    assert oracle.rounds == [[1]]
    oracle.gate.set()
    assert await asyncio.gather(first, *later) == [10, 20, 30]
    assert oracle.rounds == [[1], [2, 3]]


async def test_a_failure_reaches_those_asked_together_and_nobody_later() -> None:
    gathering = RequestBatcher(Oracle().ask_all, max_questions=4)
    answers = await asyncio.gather(gathering.ask(1), gathering.ask(13), return_exceptions=True)
    assert [type(answer) for answer in answers] == [LookupError, LookupError]
    assert await gathering.ask(2) == 20


async def test_who_gave_up_waiting_is_not_asked_for() -> None:
    oracle, gathering, first = await first_under_way()
    gone, kept = (asyncio.create_task(gathering.ask(question)) for question in (2, 3))
    await asyncio.sleep(0)
    gone.cancel()
    oracle.gate.set()
    assert await asyncio.gather(first, kept) == [10, 30]
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert oracle.rounds == [[1], [3]]
