"""The body of vLLM's call that loads an adapter."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.errors import InvalidRequest
from loraplex_services.gateway.http.aliases import parse_load


def test_a_folder_is_loaded_in_place_only_where_that_is_asked_for() -> None:
    body = {"lora_name": "a", "lora_path": "p"}
    assert parse_load(body) == ("a", "p", False)
    assert parse_load({**body, "load_inplace": True}) == ("a", "p", True)
    assert parse_load(body, in_place=True) == ("a", "p", True)


@pytest.mark.parametrize("body", [{}, {"lora_path": ""}, {"lora_path": None}])
def test_a_body_without_a_folder_is_wrong_rather_than_one_that_is_not_there_yet(
    body: dict[str, Any],
) -> None:
    """Clients call again where a folder is not found."""
    with pytest.raises(InvalidRequest, match="lora_path: must name a folder"):
        parse_load({"lora_name": "a", **body})
