"""Reading a JSON body: what no text can be, and the names that errors give to fields."""

from __future__ import annotations

import json

import pytest

from loraplex.errors import InvalidRequest, LoraplexError
from loraplex_services.gateway.http.body import parse_object
from loraplex_services.gateway.http.calls import Origin, parse_completion

HALF_A_PAIR = "\ud83d"
ORIGIN = Origin("r", "default", "", "")


@pytest.mark.parametrize(
    "value",
    [HALF_A_PAIR, ["a", HALF_A_PAIR], {"a": [HALF_A_PAIR]}, {HALF_A_PAIR: 1}],
    ids=["text", "in-list", "nested", "key"],
)
@pytest.mark.parametrize("name", ["guided_regex", "cache_salt", "unknown"])
def test_half_a_surrogate_pair_is_refused_in_any_field(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_object(json.dumps({"model": "base", name: value}).encode())
    assert [violation.field for violation in caught.value.violations] == [name]


def test_whole_pairs_and_other_escapes_are_text() -> None:
    assert parse_object(rb'{"prompt": "\ud83d\ude00 \\ud83d"}') == {"prompt": "😀 \\ud83d"}


@pytest.mark.parametrize("raw", [b"\xed\xa0\x80", '{"a": 1}'.encode("utf-16"), b"[]", b"1e5"])
def test_other_encodings_and_values_are_no_body(raw: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_object(raw)
    assert caught.value.reason == "INVALID_JSON"


@pytest.mark.parametrize(
    ("item", "field"),
    [({"ref": 1}, "ref"), ({"ref": "a", "weight": "x"}, "weight"), ({"ref": "a", "x": 1}, "x")],
)
def test_errors_in_a_list_of_adapters_name_the_index(item: object, field: str) -> None:
    with pytest.raises(LoraplexError) as caught:
        parse_completion({"model": "base", "prompt": "a", "adapters": [{"ref": "b"}, item]}, ORIGIN)
    assert caught.value.violations[0].field == f"adapters[1].{field}"
