"""Calls as GLM writes them."""

from __future__ import annotations

import json

import pytest

from loraplex_services.gateway.tools.glm_calls import glm_call

ROME = "<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"


def test_pairs_of_tags_become_an_object() -> None:
    body = f"weather\n{ROME}<arg_key> days </arg_key><arg_value>2</arg_value>"
    found = glm_call(body, {"weather": {"properties": {"days": {"type": "integer"}}}})
    assert found is not None
    assert (found[0], json.loads(found[1])) == ("weather", {"city": "Rome", "days": 2})
    assert glm_call("weather", {}) == ("weather", "{}")


@pytest.mark.parametrize(
    "body",
    ["", "<arg_key>", "weather x", f"weather {ROME}x", f"weather {ROME}<arg_key>a</arg_key>"],
)
def test_other_text_is_no_call(body: str) -> None:
    assert glm_call(body, {}) is None


@pytest.mark.hostile
@pytest.mark.parametrize(
    "part", ["<arg_key>", "<arg_key></arg_key>", "<arg_key></arg_key><arg_value>"]
)
def test_tags_that_nothing_closes_are_read_once(part: str) -> None:
    """With a search from every tag, the last one takes hours, on the event loop."""
    assert glm_call("weather" + part * 40_000, {}) is None
