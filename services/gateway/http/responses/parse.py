"""Converts bodies of /v1/responses to chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
from loraplex_services.gateway.http.body import Body
from loraplex_services.gateway.http.calls import OpenAICall, Origin
from loraplex_services.gateway.http.responses.items import (
    add_item,
    check_referred_once,
    full_name,
    resolved,
)

_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}
_THOUGHT, _LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
_INCLUDES = frozenset(
    {
        *(_THOUGHT, _LOGPROBS, "file_search_call.results", "web_search_call.results"),
        *("web_search_call.action.sources", "message.input_image.image_url"),
        *("computer_call_output.output.image_url", "code_interpreter_call.outputs"),
    }
)
_ECHOED = ("user", "safety_identifier", "prompt_cache_key", "service_tier")
_UNUSED = ("client_metadata", "prompt_cache_options", "max_tool_calls")
"""Fields that change nothing here: only calls of hosted tools are limited by max_tool_calls."""


@dataclass(frozen=True, slots=True)
class ResponsesCall:
    """One request of the Responses API."""

    chat: OpenAICall
    items: tuple[Mapping[str, Any], ...]
    """Input of this request, without the earlier conversation."""
    previous_id: str
    stores: bool
    encodes_thoughts: bool
    """Whether reasoning is also sent in encoded form, for callers that send it back."""
    shows_logprobs: bool
    namespaces: Mapping[str, tuple[str, str]]
    """Namespace and name of each function that is in a namespace."""
    echoed: dict[str, Any] = field(default_factory=dict)
    """Fields of the request that the response repeats."""


@dataclass(frozen=True, slots=True)
class History:
    """The responses and items that a request continues or refers to."""

    items: Sequence[Mapping[str, Any]] = ()
    """Items of the conversation before this request."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """Items that the input refers to, by id."""


def input_items(value: Any) -> list[Mapping[str, Any]]:
    """The input as items. Raises: InvalidRequest."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    return [item for _, item in objects(value if value is not None else [], "input")]


def parse_responses(
    fields: dict[str, Any], origin: Origin, history: History | None = None
) -> ResponsesCall:
    """Body of /v1/responses. Raises: InvalidRequest, NotFound, Unsupported."""
    body = Body(fields)
    history = history or History()
    instructions = body.text("instructions")
    given = input_items(body.raw("input"))
    check_referred_once(given)
    items = [resolved(item, f"input[{index}]", history.kept) for index, item in enumerate(given)]
    chat = _options(body)
    text, reasoning = _text(body.inner("text")), _reasoning(body.inner("reasoning"))
    includes = _includes(body.texts("include"))
    tools, choice = body.raw("tools") or [], body.raw("tool_choice")
    echoed = _echoed(body, instructions, text, reasoning, tools, choice)
    previous_id, stores = body.text("previous_response_id") or "", body.flag("store", True)
    top_logprobs = body.integer("top_logprobs")
    functions, namespaces = _tools(tools)
    chat |= {
        "messages": _messages(instructions, items, history),
        "response_format": _response_format(text.get("format")),
        "reasoning_effort": reasoning.get("effort"),
        "tools": functions,
        "tool_choice": _tool_choice(choice),
        "logprobs": _LOGPROBS in includes or bool(top_logprobs),
        "top_logprobs": top_logprobs,
    }
    if chat["logprobs"] and chat["tools"]:
        name = "top_logprobs" if top_logprobs else "include"
        raise Unsupported.field(name, "", "logprobs are not served together with tools")
    body.finish()
    return ResponsesCall(
        chat=parse_as_chat(chat, origin, _NAMES),
        items=tuple(items),
        previous_id=previous_id,
        stores=stores,
        encodes_thoughts=_THOUGHT in includes,
        shows_logprobs=chat["logprobs"],
        namespaces=namespaces,
        echoed=echoed,
    )


def _options(body: Body) -> dict[str, Any]:
    """Fields that chat knows under the same or another name. Raises: InvalidRequest."""
    for name, default in (("background", False), ("truncation", "disabled")):
        if (value := body.raw(name)) not in (None, default):
            shown = str(value)[:32]
            raise Unsupported.field(name, shown, f"only {default} is served".lower())
    for name in _UNUSED:
        body.raw(name)
    options = body.named(SHARED_FIELDS | {"model", "stream", "stream_options"})
    options["max_completion_tokens"] = body.integer("max_output_tokens")
    options["parallel_tool_calls"] = body.flag("parallel_tool_calls", True)
    return options


def _echoed(
    body: Body,
    instructions: str | None,
    text: dict[str, Any],
    reasoning: dict[str, Any],
    tools: Any,
    choice: Any,
) -> dict[str, Any]:
    named = {name: body.text(name) for name in _ECHOED}
    return {
        "instructions": instructions,
        "metadata": body.metadata(),
        "text": {**text, "format": text.get("format") or {"type": "text"}},
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "tools": tools,
        "tool_choice": choice or ("auto" if tools else "none"),
        **{name: value for name, value in named.items() if value is not None},
    }


def _messages(
    instructions: str | None, items: Sequence[Mapping[str, Any]], history: History
) -> list[dict[str, Any]]:
    messages = ChatMessages()
    if instructions:
        messages.system(instructions)
    for index, item in enumerate(history.items):
        add_item(messages, item, f"previous_response_id[{index}]")
    for index, item in enumerate(items):
        add_item(messages, item, f"input[{index}]")
    return messages.built()


def _text(body: Body | None) -> dict[str, Any]:
    """`text` with its format and verbosity; the latter changes nothing here."""
    if body is None:
        return {}
    found = body.named({"format", "verbosity"})
    body.finish()
    return found


def _reasoning(body: Body | None) -> dict[str, Any]:
    """The effort, which the template gets, and the summary: none is made, since the thought itself
    is sent."""
    if body is None:
        return {}
    effort, summary = body.text("effort"), body.text("summary")
    summary = body.text("generate_summary") or summary
    body.finish()
    return {"effort": effort, "summary": summary}


def _response_format(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    kind, body = kind_and_body(value, "text.format", ("text", "json_object", "json_schema"))
    found: dict[str, Any] = {"type": kind}
    if kind == "json_schema":
        for name in ("name", "description", "strict"):
            body.raw(name)
        found["json_schema"] = {"schema": body.raw("schema")}
    body.finish()
    return found


def _tools(value: Any) -> tuple[list[dict[str, Any]], dict[str, tuple[str, str]]]:
    """Functions as chat describes them, and namespace and name of those in a namespace."""
    functions: list[dict[str, Any]] = []
    namespaces: dict[str, tuple[str, str]] = {}
    for where, tool in objects(value, "tools"):
        if tool.get("type") != "namespace":
            functions.append(_function(tool, where))
            continue
        body = typed_body(tool, where)
        namespace = required_text(body, "name", where)
        body.text("description")
        for inner_field, inner in objects(body.raw("tools") or [], f"{where}.tools"):
            function = _function(inner, inner_field)
            name = required_text(Body(function["function"]), "name", inner_field)
            function["function"]["name"] = full_name(namespace, name)
            namespaces[full_name(namespace, name)] = (namespace, name)
            functions.append(function)
        body.finish()
    return functions, namespaces


def _function(tool: dict[str, Any], field: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        shown = kind[:32] if isinstance(kind, str) else ""
        why = f"tools of type {shown!r} are not served, only functions; turn the tool off"
        raise Unsupported.field(f"{field}.type", shown, why)
    body = typed_body(tool, field)
    function = body.named({"name", "description", "parameters", "strict"})
    body.finish()
    return {"type": "function", "function": function}


def _tool_choice(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    _, body = kind_and_body(value, "tool_choice", ("function",))
    choice = {"type": "function", "function": {"name": body.text("name")}}
    body.finish()
    return choice


def _includes(names: Sequence[str]) -> frozenset[str]:
    """Optional parts of a response. Results of hosted tools never occur."""
    for index, name in enumerate(names):
        if name not in _INCLUDES:
            why = f"must be one of {', '.join(sorted(_INCLUDES))}"
            raise InvalidRequest.field(f"include[{index}]", name, why)
    return frozenset(names)
