"""Tests of counters without zeros."""

from __future__ import annotations

from loraplex_services.common.nonzero_counter import NonzeroCounter


def test_a_key_is_forgotten_once_its_count_is_zero() -> None:
    counts = NonzeroCounter("aab")
    counts.remove("a")
    counts.remove("b")
    assert dict(counts) == {"a": 1}


def test_several_are_removed_at_once_and_nothing_from_a_key_without_a_count() -> None:
    counts: NonzeroCounter[str] = NonzeroCounter({"a": 5})
    counts.remove("a", 3)
    counts.remove("b", 0)
    assert dict(counts) == {"a": 2}
