"""Schemas of tools whose keywords have values of the wrong type, such as null."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex_services.gateway.text.chat_style import ChatStyle, ToolFormat
from loraplex_services.gateway.tools.call_grammar import call_grammar
from loraplex_services.gateway.tools.schema_values import json_value
from loraplex_services.gateway.tools.tool_use import ToolUse

KEYWORDS = ("enum", "type", "anyOf", "oneOf", "allOf", "$ref", "properties", "required")


WRONG = pytest.mark.parametrize("value", [None, True, 5])


@WRONG
@pytest.mark.parametrize("keyword", KEYWORDS)
def test_grammars_are_made_without_a_keyword_of_the_wrong_type(keyword: str, value: Any) -> None:
    schema = {"type": "object", "properties": {"days": {keyword: value}}, keyword: value}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    for tool_format in ToolFormat:
        for must_call in (False, True):
            use = ToolUse((tool,), must_call=must_call, is_strict=True)
            call_grammar(ChatStyle(tool_format), use, None, lambda _: None)


@WRONG
@pytest.mark.parametrize("keyword", KEYWORDS)
def test_values_are_read_without_a_keyword_of_the_wrong_type(keyword: str, value: Any) -> None:
    assert json_value("2", "days", {"properties": {"days": {keyword: value}}}) == "2"
