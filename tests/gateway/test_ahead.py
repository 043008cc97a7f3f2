"""Room ahead of the first token: a step or two of work, whatever the workers' speed."""

from __future__ import annotations

import pytest

from services.gateway.ahead import (
    LEAST_TOKENS_PER_WORKER,
    MOST_TOKENS_PER_WORKER,
    AheadRoom,
    ReadyWorkers,
)


def _settled(tokens_per_step: float, step_s: float, num_workers: int = 1) -> float:
    """The room after steps that each start what there is room for, up to what they can."""
    room, workers, now_s = AheadRoom(), ReadyWorkers(num_workers, step_s), 0.0
    room.begin(now_s)
    for _ in range(300):
        now_s += step_s
        room.started(int(min(tokens_per_step, room.tokens(workers))), now_s, workers)
    return room.tokens(workers)


def test_room_is_wide_until_requests_wait() -> None:
    assert AheadRoom().tokens(ReadyWorkers(2)) == 2 * MOST_TOKENS_PER_WORKER


@pytest.mark.parametrize("step_s", [0.005, 0.02, 0.5, 3.0])
def test_room_holds_what_few_steps_start(step_s: float) -> None:
    """It follows the workers and does not shrink on its own account where steps are long."""
    assert 2000 <= _settled(1000.0, step_s) <= 12_000
    assert _settled(3000.0, step_s) >= 6000


def test_workers_that_start_little_get_the_least() -> None:
    assert _settled(1.0, 0.02, num_workers=3) == 3 * LEAST_TOKENS_PER_WORKER
