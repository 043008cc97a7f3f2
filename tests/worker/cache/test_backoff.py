"""Pauses after failures."""

from loraplex.errors import DataLoss
from loraplex_services.worker.cache.backoff import Backoff


def test_the_pause_doubles_up_to_its_maximum() -> None:
    backoff = Backoff(max_s=5.0)
    for now, pause_s in ((0.0, 1.0), (10.0, 2.0), (20.0, 4.0), (30.0, 5.0)):
        backoff.record("a", DataLoss("bytes differ"), now)
        assert backoff.blocked("a", now + pause_s - 0.01) is not None
        assert backoff.blocked("a", now + pause_s) is None


def test_success_clears_the_past() -> None:
    backoff = Backoff()
    backoff.record("a", DataLoss("bytes differ"), 0.0)
    backoff.clear("a")
    assert backoff.blocked("a", 0.0) is None


def test_one_key_does_not_block_another() -> None:
    backoff = Backoff()
    backoff.record("a", DataLoss("bytes differ"), 0.0)
    assert backoff.blocked("b", 0.0) is None


def test_the_oldest_failures_are_forgotten_when_there_are_too_many() -> None:
    backoff = Backoff(max_keys=2)
    for key in "abc":
        backoff.record(key, DataLoss("bytes differ"), 0.0)
    assert [backoff.blocked(key, 0.0) is None for key in "abc"] == [True, False, False]
