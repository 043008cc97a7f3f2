"""Bodies with vectors, whose numbers are in arrays."""

from __future__ import annotations

import json
import math
from array import array

import pytest

from loraplex.errors import LoraplexError
from loraplex_services.gateway.http.vectors import vectors_json


def test_a_body_with_vectors_has_the_numbers_of_its_arrays() -> None:
    vectors = [[0.1 * index, -1e-20, 3.0] * 100 for index in range(100)]
    data = [{"index": index, "data": array("d", vector)} for index, vector in enumerate(vectors)]
    body = {"id": "\u00e9", "data": data, "usage": {"prompt_tokens": 3}}
    found = json.loads(vectors_json(body))
    assert list(found) == ["id", "data", "usage"]
    assert [item["data"] for item in found["data"]] == vectors
    assert found["id"] == "\u00e9" and found["usage"] == {"prompt_tokens": 3}
    assert json.loads(vectors_json({"data": []})) == {"data": []}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_vector_that_is_not_finite_is_an_error_and_no_json_of_another_kind(value: float) -> None:
    with pytest.raises(LoraplexError) as caught:
        vectors_json({"data": [{"embedding": array("f", [1.0, value, 2.0])}]})
    assert caught.value.reason == "NOT_FINITE"
