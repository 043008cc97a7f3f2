"""Converts bodies of /v1/messages to chats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from loraplex.errors import InvalidRequest, Unsupported
from loraplex_services.gateway.http.as_chat import (
    SHARED_FIELDS,
    ChatMessages,
    kind_and_body,
    objects,
    parse_as_chat,
    required_text,
    typed_body,
)
from loraplex_services.gateway.http.body import Body, bad_type
from loraplex_services.gateway.http.calls import OpenAICall, Origin
from loraplex_services.gateway.http.prompts import joined_text

_NAMES = {
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
_TEXTS = {"text": "text"}
_UNUSED = ("cache_control", "inference_geo", "service_tier", "user_profile_id", "workspace_id")
"""Fields that change nothing here: the prefix cache needs no marks."""


def parse_messages(fields: dict[str, Any], origin: Origin, *, generates: bool = True) -> OpenAICall:
    """Body of /v1/messages; without `generates`, max_tokens may be missing.

    Raises: InvalidRequest, Unsupported.
    """
    if generates and fields.get("max_tokens") is None:
        raise InvalidRequest.field("max_tokens", "", "is missing")
    body = Body(fields)
    for name in _UNUSED:
        body.raw(name)
    _check_context_management(body.raw("context_management"))
    chat = body.named(SHARED_FIELDS | {"model", "stream"})
    messages = _messages(body.raw("system"), body.raw("messages"))
    is_prefilled = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    effort, response_format = _output_config(body.inner("output_config"))
    choice, is_parallel = _tool_choice(body.raw("tool_choice"))
    options = chat.pop("chat_template_kwargs", None)
    if options is not None and not isinstance(options, dict):
        raise bad_type("chat_template_kwargs", options, "an object")
    chat |= {
        "messages": messages,
        "continue_final_message": is_prefilled,
        "add_generation_prompt": not is_prefilled,
        "max_completion_tokens": body.integer("max_tokens"),
        "stop": list(body.texts("stop_sequences")),
        "chat_template_kwargs": {**_thinking(body.raw("thinking")), **(options or {})},
        "reasoning_effort": effort,
        "response_format": response_format,
        "tools": [_tool(tool, name) for name, tool in objects(body.raw("tools") or [], "tools")],
        "tool_choice": choice,
        "parallel_tool_calls": is_parallel,
        "user": _user(body.inner("metadata")),
    }
    body.finish()
    return parse_as_chat(chat, origin, _NAMES)


def _messages(system: Any, messages: Any) -> list[dict[str, Any]]:
    chat = ChatMessages()
    if system is not None and (text := joined_text(system, "system", _TEXTS, "\n")):
        chat.system(text)
    found = objects(messages if messages is not None else [], "messages")
    if not found:
        raise InvalidRequest.field("messages", "", "must be a list of at least one message")
    for field, message in found:
        _add_message(chat, message, field)
    built = chat.built()
    if not any(each["role"] != "system" for each in built):
        raise InvalidRequest.field("messages", "", "contain nothing")
    return built


def _add_message(chat: ChatMessages, message: dict[str, Any], field: str) -> None:
    body = Body(message, f"{field}.")
    role, content = required_text(body, "role", field), body.raw("content")
    body.finish()
    if role not in _READERS:
        raise InvalidRequest.field(f"{field}.role", role, "must be user, assistant or system")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    for path, block in objects(content, f"{field}.content"):
        kind = block.get("type")
        read = _READERS[role].get(kind) if isinstance(kind, str) else None
        if read is None:
            shown = kind[:32] if isinstance(kind, str) else ""
            kinds = ", ".join(_READERS[role])
            why = f"blocks of type {shown!r} are not served in messages of the {role}, only {kinds}"
            raise Unsupported.field(path, shown, why)
        inner = typed_body(block, path)
        inner.raw("cache_control")
        read(chat, inner, path)
        inner.finish()


def _system_text(chat: ChatMessages, block: Body, field: str) -> None:
    chat.system(required_text(block, "text", field))


def _user_text(chat: ChatMessages, block: Body, field: str) -> None:
    chat.user(required_text(block, "text", field), joins=True)


def _result(chat: ChatMessages, block: Body, field: str) -> None:
    call_id, content = required_text(block, "tool_use_id", field), block.raw("content")
    text = joined_text(content if content is not None else "", f"{field}.content", _TEXTS, "\n")
    fields = {"is_error": True} if block.flag("is_error") else {}
    chat.result(call_id, text, **fields)


def _answer_text(chat: ChatMessages, block: Body, field: str) -> None:
    chat.said(required_text(block, "text", field), joins=True)


def _thought(chat: ChatMessages, block: Body, field: str) -> None:
    block.text("signature")
    if text := required_text(block, "thinking", field):
        chat.thought(text)


def _call(chat: ChatMessages, block: Body, field: str) -> None:
    call_id, name = required_text(block, "id", field), required_text(block, "name", field)
    arguments = block.raw("input")
    if arguments is not None and not isinstance(arguments, dict):
        raise bad_type(f"{field}.input", arguments, "an object")
    chat.called(call_id, name, arguments or {})


_READERS: Mapping[str, Mapping[str, Callable[[ChatMessages, Body, str], None]]] = {
    "system": {"text": _system_text},
    "user": {"text": _user_text, "tool_result": _result},
    "assistant": {"text": _answer_text, "thinking": _thought, "tool_use": _call},
}


def _tool(tool: dict[str, Any], field: str) -> dict[str, Any]:
    if (kind := tool.get("type")) not in (None, "custom"):
        why = "only tools with a name and an input_schema are served; turn this one off"
        raise Unsupported.field(f"{field}.type", str(kind)[:32], why)
    body = typed_body(tool, field)
    for name in ("cache_control", "eager_input_streaming"):
        body.raw(name)  # A call is sent when it is complete, whatever the client allows.
    function = body.named({"name", "description", "strict"})
    parameters = body.raw("input_schema")
    if not isinstance(parameters, dict):
        raise bad_type(f"{field}.input_schema", parameters, "a JSON Schema")
    body.finish()
    return {"type": "function", "function": {**function, "parameters": parameters}}


def _tool_choice(value: Any) -> tuple[Any, bool]:
    """Chat's tool_choice, and whether calls may be parallel."""
    if value is None:
        return None, True
    kind, body = kind_and_body(value, "tool_choice", ("auto", "any", "tool", "none"))
    is_parallel = not body.flag("disable_parallel_tool_use")
    choice: Any = "required" if kind == "any" else kind
    if kind == "tool":
        choice = {"type": "function", "function": {"name": body.text("name")}}
    body.finish()
    return choice, is_parallel


def _thinking(value: Any) -> dict[str, Any]:
    """Variables of the template. Without `thinking` there is none, as the API promises."""
    if value is None:
        return {"enable_thinking": False}
    kind, body = kind_and_body(value, "thinking", ("enabled", "adaptive", "disabled"))
    variables: dict[str, Any] = {"enable_thinking": kind != "disabled"}
    if kind != "disabled":
        body.text("display")
    if kind == "enabled":
        budget = body.integer("budget_tokens")
        if budget is None or budget < 1:
            raise InvalidRequest.field("thinking.budget_tokens", budget or 0, "must be at least 1")
        variables["thinking_budget"] = budget
    body.finish()
    return variables


def _check_context_management(value: Any) -> None:
    """Raises: Unsupported for edits that would change the prompt; all thoughts are kept anyway."""
    edits = value.get("edits") if isinstance(value, dict) else []
    for index, edit in enumerate(edits if isinstance(edits, list) else [edits]):
        if edit != {"type": "clear_thinking_20251015", "keep": "all"}:
            field = f"context_management.edits[{index}]"
            raise Unsupported.field(field, "", "this edit is not served; prompts stay as sent")


def _output_config(body: Body | None) -> tuple[Any, dict[str, Any] | None]:
    """The effort, which the template gets, and the response format."""
    if body is None:
        return None, None
    effort, asked = body.text("effort"), body.raw("format")
    body.finish()
    if asked is None:
        return effort, None
    _, schema = kind_and_body(asked, "output_config.format", ("json_schema",))
    response_format = {"type": "json_schema", "json_schema": {"schema": schema.raw("schema")}}
    schema.finish()
    return effort, response_format


def _user(body: Body | None) -> str | None:
    if body is None:
        return None
    user = body.text("user_id")
    body.finish()
    return user
