"""CopyEvents: a step waits for what it reads, once, and for nothing else."""

import pytest

from loraplex_services.worker.adapters.device.copy_events import (
    CopyEvents,
    StallTimer,
    last_extents,
)
from loraplex_services.worker.adapters.pack.image import ImageIndex, PackedRole, PackedSite
from loraplex_services.worker.adapters.pack.tiles import ImageTile


class Clock:
    """A stream whose end is `now_ms`; events are the times at which they happen."""

    def __init__(self):
        self.now_ms = 0.0
        self.waits = []

    def event(self, at_ms=None):
        return Event(self, self.now_ms if at_ms is None else at_ms)


class Event:
    def __init__(self, clock, at_ms):
        self.clock, self.at_ms = clock, at_ms

    def query(self):
        return self.at_ms <= self.clock.now_ms

    def wait(self):
        self.clock.waits.append(self.at_ms)

    def elapsed_time(self, end_event):
        return end_event.at_ms - self.at_ms


def site(site_id, *blocks):
    tiles = [ImageTile(0, 1, 0, 4, block, 0) for block in blocks]
    return PackedSite(site_id, [], [PackedRole("A", "F32", tiles)], [])


INDEX = ImageIndex("layout", 4, 4096, [site(0, 0), site(2, 0, 1), site(5, 2, 3)])


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def stalls(clock):
    return StallTimer(clock.event)


@pytest.fixture
def copy_events(clock, stalls):
    return CopyEvents(INDEX, [clock.event(at) for at in (10, 20, 30, 40)], stalls)


def test_a_site_waits_for_the_last_of_its_blocks_and_for_it_once(copy_events, clock):
    for site_id in (0, 0, 1, 2, 0, 5, 5):
        copy_events.wait(site_id)
    assert clock.waits == [10, 20, 40]
    assert copy_events.is_done


def test_what_has_landed_is_not_waited_for(copy_events, clock, stalls):
    clock.now_ms = 25
    copy_events.wait(2)
    assert clock.waits == [] and not copy_events.is_done
    copy_events.wait_all()
    assert clock.waits == [40] and copy_events.is_done
    copy_events.wait_all()
    assert clock.waits == [40]


def test_time_lost_is_counted_when_the_waits_are_over(copy_events, clock, stalls):
    clock.now_ms = 5
    copy_events.wait(0)
    assert stalls.total_s == 0.0
    clock.now_ms = 12
    assert stalls.total_s == pytest.approx(0.005)
    copy_events.wait(5)
    clock.now_ms = 100
    assert stalls.total_s == pytest.approx(0.005 + 0.028)
    assert stalls.total_s == pytest.approx(0.005 + 0.028)


def test_sites_without_tiles_need_no_block():
    index = ImageIndex("layout", 0, 0, [PackedSite(3, [], [], [])])
    assert last_extents(index) == {3: -1}
    assert CopyEvents(index, [], None).is_done
