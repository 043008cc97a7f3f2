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


def test_dropped_entry_is_forgotten() -> None:
    recent: Recent[str, int] = Recent(2)
    recent.put("a", 1)
    recent.drop("a")
    recent.drop("a")
    assert recent.get("a") is None
