"""Parses the tools and the tool choice of a chat request."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from loraplex.errors import InvalidRequest, Unsupported
from loraplex_services.gateway.http.body import Body, bad_type
from loraplex_services.gateway.tools.tool_use import ToolUse

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def read_tools(body: Body) -> ToolUse:
    """tools, tool_choice, parallel_tool_calls. Raises: InvalidRequest, Unsupported."""
    tools = _tools(body.raw("tools", {"type": "array"}))
    choice = body.raw("tool_choice", {"type": ["string", "object"]})
    is_parallel = body.flag("parallel_tool_calls", default=True)
    if choice is None:
        choice = "auto" if tools else "none"
    if not tools:
        if choice in ("none", "auto"):
            return ToolUse()
        raise InvalidRequest.field("tool_choice", "", "needs tools")
    if choice == "none":
        return ToolUse()
    if choice == "auto":
        is_strict = any(tool["function"].get("strict") for tool in tools)
        return ToolUse(tools, is_strict=is_strict, is_parallel=is_parallel)
    if choice == "required":
        return ToolUse(tools, must_call=True, is_parallel=is_parallel)
    return _named(tools, choice)


def _named(tools: tuple[dict[str, Any], ...], choice: Any) -> ToolUse:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest.field(
            "tool_choice",
            "",
            'must be none, auto, required or {"type": "function", "function": {"name": ...}}',
        )
    if any(tool["function"]["name"] == name for tool in tools):
        return ToolUse(tools, must_call=True, named=name, is_parallel=False)
    raise InvalidRequest.field("tool_choice", name, "no tool of this name is offered")


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise bad_type("tools", value, "a list of tools")
    if len(value) > MAX_TOOLS:
        raise InvalidRequest.field("tools", len(value), f"at most {MAX_TOOLS} tools")
    for index, tool in enumerate(value):
        _check_tool(tool, f"tools[{index}]")
    return tuple(value)


def _check_tool(tool: Any, field: str) -> None:
    if not isinstance(tool, dict):
        raise bad_type(field, tool, "an object with type and function")
    if tool.get("type") != "function":
        raise Unsupported.field(f"{field}.type", "", "only tools of type function are served")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise bad_type(f"{field}.function", function, "an object with name and parameters")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest.field(
            f"{field}.function.name", "", "must be 1 to 64 letters, digits, '_', '.' or '-'"
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise bad_type(f"{field}.function.parameters", parameters, "a JSON Schema")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise bad_type(f"{field}.function.strict", strict, "true or false")


def template_messages(messages: Sequence[dict[str, object]]) -> tuple[dict[str, object], ...]:
    """Messages in the form that chat templates expect.

    Arguments of past calls become objects, null fields are removed, past thoughts get both of their
    names, and results get the name of their function, which OpenAI's clients leave out.

    Raises: InvalidRequest for arguments that are not JSON.
    """
    names: dict[str, object] = {}
    prepared = []
    for index, message in enumerate(messages):
        one = _template_message(message, f"messages[{index}]")
        calls: Any = one.get("tool_calls") or ()
        names.update({str(call.get("id")): call["function"]["name"] for call in calls})
        call_id = str(one.get("tool_call_id"))
        if one.get("role") == "tool" and call_id in names:
            one = {"name": names[call_id], **one}
        prepared.append(one)
    return tuple(prepared)


def _template_message(message: dict[str, object], field: str) -> dict[str, object]:
    message = {name: value for name, value in message.items() if value is not None}
    message.setdefault("content", None)
    if "reasoning" in message or "reasoning_content" in message:
        thought = message.get("reasoning", message.get("reasoning_content"))
        message = {"reasoning": thought, "reasoning_content": thought, **message}
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not isinstance(calls, list):
        raise bad_type(f"{field}.tool_calls", calls, "a list of calls")
    template_calls = [_call(call, f"{field}.tool_calls[{n}]") for n, call in enumerate(calls)]
    return {**message, "tool_calls": template_calls}


def _call(call: Any, field: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_type(f"{field}.function", function, "an object with name and arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise InvalidRequest.field(f"{field}.function.arguments", "", "must be JSON") from None
    return {**call, "function": {**function, "arguments": arguments}}
