"""What is remembered by keys that a stranger chooses has a bound."""

from __future__ import annotations

from loraplex_services.common.lru_cache import LruCache


def test_entry_used_longest_ago_makes_space() -> None:
    cache: LruCache[str, int] = LruCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert [cache.get(key) for key in "abc"] == [1, None, 3]
    assert len(cache) == 2


def test_a_large_entry_makes_space_for_itself_and_is_left_out_if_it_alone_is_too_large() -> None:
    cache: LruCache[str, int] = LruCache(10)
    for key, size in (("a", 4), ("b", 4), ("b", 5), ("c", 3)):
        cache.put(key, 1, size)
    assert [cache.get(key) for key in "abc"] == [None, 1, 1]
    cache.put("d", 1, 11)
    assert [cache.get(key) for key in "abcd"] == [None, 1, 1, None]


def test_dropped_entry_is_forgotten() -> None:
    cache: LruCache[str, int] = LruCache(2)
    cache.put("a", 1)
    cache.drop("a")
    cache.drop("a")
    assert cache.get("a") is None
