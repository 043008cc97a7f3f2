"""What a rank other than the first does with copies."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from loraplex_services.worker.adapters.device.copy_events import CopyEvents, StallTimer
from loraplex_services.worker.adapters.device.loader import CopiedImage
from loraplex_services.worker.adapters.pack.image import ImageIndex
from loraplex_services.worker.runner.parallel.messages import Copy, CopyDone, Drop, RankLost
from loraplex_services.worker.runner.parallel.rank_process import FollowingRank
from loraplex_services.worker.types.extents import Extents
from tests.worker.loading import copied_image


class Event:
    """Of a copy that has not ended."""

    num_waits = 0

    def query(self):
        return False

    def wait(self):
        self.num_waits += 1

    def elapsed_time(self, end_event):
        return 0.0


class RankZero:
    """Its connection, which is lost after some orders."""

    def __init__(self, *orders):
        self.orders, self.replies = list(orders), []

    def order(self):
        if not self.orders:
            raise RankLost("done")
        return self.orders.pop(0)

    def send(self, reply):
        self.replies.append(reply)


def test_steps_wait_for_a_copy_that_is_dropped_while_it_is_under_way():
    event, index = Event(), ImageIndex("layout", 1, 64, [])
    done: Future[CopiedImage] = Future()
    copy_events = CopyEvents(index, [event], StallTimer(Event))
    done.set_result(copied_image(Path("one"), index, (0,), copy_events))
    copy = Copy(1, "one", Extents(1, (0,)), 0.0)
    rank_zero = RankZero(copy, Drop(2), Drop(1), Drop(1))
    runner = SimpleNamespace(copy_adapter=lambda *arguments: done)
    with pytest.raises(RankLost):
        FollowingRank(runner, rank_zero, None).run()
    assert rank_zero.replies == [CopyDone(1)]
    assert event.num_waits == 1 and copy_events.is_done
