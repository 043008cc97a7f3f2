"""What is remembered by keys that a stranger chooses has a bound."""

from __future__ import annotations

from loraplex_services.common.recent import Recent


def test_entry_used_longest_ago_makes_space() -> None:
    recent: Recent[str, int] = Recent(2)
    recent.put("a", 1)
    recent.put("b", 2)
    assert recent.get("a") == 1
    recent.put("c", 3)
    assert [recent.get(key) for key in "abc"] == [1, None, 3]
    assert len(recent) == 2


def test_a_large_entry_makes_space_for_itself_and_is_left_out_if_it_alone_is_too_large() -> None:
    recent: Recent[str, int] = Recent(10)
    for key, size in (("a", 4), ("b", 4), ("b", 5), ("c", 3)):
        recent.put(key, 1, size)
    assert [recent.get(key) for key in "abc"] == [None, 1, 1]
    recent.put("d", 1, 11)
    assert [recent.get(key) for key in "abcd"] == [None, 1, 1, None]


def test_dropped_entry_is_forgotten() -> None:
    recent: Recent[str, int] = Recent(2)
    recent.put("a", 1)
    recent.drop("a")
    recent.drop("a")
    assert recent.get("a") is None
