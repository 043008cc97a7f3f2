"""What a gateway keeps of responses, and what it drops."""

from __future__ import annotations

import pytest

from loraplex.errors import InvalidRequest, NotFound
from loraplex_services.common.limits import MAX_HISTORY_RESPONSES
from loraplex_services.gateway.http.responses.store import ResponseStore, StoredResponse

SIZE = 2048


def _stored(response_id: str, previous_id: str = "", num_bytes: int = SIZE) -> StoredResponse:
    return StoredResponse(response_id, previous_id, b"r" * (num_bytes - 1024), b"")


def test_a_tenant_beyond_its_share_loses_what_it_used_least_recently() -> None:
    store = ResponseStore(max_bytes=10 * SIZE, max_tenant_bytes=3 * SIZE)
    for name in "abc":
        store.put("t", _stored(name))
    store.history("t", "a")
    store.put("t", _stored("d"))
    assert [name for name in "abcd" if store.find("t", name)] == ["a", "c", "d"]
    assert store.num_bytes == 3 * SIZE


def test_beyond_the_limit_of_all_the_largest_tenant_loses() -> None:
    store = ResponseStore(max_bytes=4 * SIZE, max_tenant_bytes=3 * SIZE)
    store.put("small", _stored("s"))
    for name in "abcd":
        store.put("large", _stored(name))
    assert store.find("small", "s") is not None
    store.put("small", _stored("t"))
    assert store.num_bytes == 4 * SIZE
    assert [name for name in "abcd" if store.find("large", name)] == ["c", "d"]


def test_a_response_that_is_larger_than_the_share_is_not_kept_and_drops_nothing() -> None:
    store = ResponseStore(max_bytes=4 * SIZE, max_tenant_bytes=2 * SIZE)
    store.put("t", _stored("a"))
    store.put("t", _stored("b", num_bytes=3 * SIZE))
    assert store.find("t", "a") is not None and store.find("t", "b") is None


def test_a_history_is_oldest_first_and_has_no_gaps() -> None:
    store = ResponseStore()
    for name, previous in (("a", ""), ("b", "a"), ("c", "b")):
        store.put("t", _stored(name, previous))
    assert [each.response_id for each in store.history("t", "c")] == ["a", "b", "c"]
    store.delete("t", "b")
    with pytest.raises(NotFound) as caught:
        store.history("t", "c")
    assert caught.value.reason == "PREVIOUS_RESPONSE_NOT_FOUND"
    assert caught.value.violations[0].value == "b"


def test_a_history_has_a_limit() -> None:
    store = ResponseStore()
    names = [str(index) for index in range(MAX_HISTORY_RESPONSES + 1)]
    for name, previous in zip(names, ["", *names], strict=False):
        store.put("t", _stored(name, previous, 1024))
    assert len(store.history("t", names[-2])) == MAX_HISTORY_RESPONSES
    with pytest.raises(InvalidRequest) as caught:
        store.history("t", names[-1])
    assert caught.value.violations[0].field == "previous_response_id"


def test_nothing_is_left_of_a_tenant_whose_responses_are_gone() -> None:
    store = ResponseStore()
    store.put("t", _stored("a"))
    store.delete("t", "a")
    with pytest.raises(NotFound):
        store.delete("t", "a")
    assert store.num_bytes == 0
