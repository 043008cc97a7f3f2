"""Parses the prompts of OpenAI request bodies: texts, token ids, conversations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loraplex.api.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from loraplex.errors import InvalidRequest, Unsupported
from loraplex_services.gateway.http.body import STRING, TOKEN_IDS, Body, Schema, are_ids, bad_type
from loraplex_services.gateway.http.tool_choice import template_messages
from loraplex_services.gateway.tools.tool_use import ToolUse

MAX_PROMPTS = 1024
PROMPTS: Schema = {
    "anyOf": [
        STRING,
        TOKEN_IDS,
        {"type": "array", "items": {"anyOf": [STRING, TOKEN_IDS]}, "maxItems": MAX_PROMPTS},
    ]
}
"""The forms of a prompt that `parse_prompts` takes."""
MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {"role": STRING, "content": {"type": ["string", "array"]}},
    },
}
"""The form of a chat's `messages`."""


def parse_prompts(field: str, value: Any, add_special_tokens: bool) -> list[Prompt]:
    """Text, a list of texts, token ids, or a list of lists of them. Ids are taken unchanged."""
    if isinstance(value, str):
        return [TextPrompt(value, add_special_tokens)]
    if value is None or value == []:
        raise InvalidRequest.field(field, "", f"the {field} is missing or empty")
    if not isinstance(value, list):
        raise _bad_prompt(field, value)
    if are_ids(value):
        return [TokenPrompt(tuple(value))]
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest.field(field, len(value), f"at most {MAX_PROMPTS} prompts")
    return [_listed_prompt(field, item, add_special_tokens) for item in value]


def _listed_prompt(field: str, item: Any, add_special_tokens: bool) -> Prompt:
    if isinstance(item, str):
        return TextPrompt(item, add_special_tokens)
    if are_ids(item):
        return TokenPrompt(tuple(item))
    raise _bad_prompt(field, item)


def _bad_prompt(field: str, value: object) -> InvalidRequest:
    return bad_type(field, value, "text, a list of texts, token ids or a list of token id lists")


def parse_conversation(body: Body, tool_use: ToolUse, *, generates: bool = True) -> ChatPrompt:
    """A conversation and the options of its template. Raises: InvalidRequest.

    Args:
        generates: the default of add_generation_prompt.
    """
    options = body.raw("chat_template_kwargs", {"type": "object"})
    if options is not None and not isinstance(options, dict):
        raise bad_type("chat_template_kwargs", options, "an object")
    effort = body.text("reasoning_effort")
    continues = body.flag("continue_final_message")
    generates = body.flag("add_generation_prompt", default=generates)
    if continues and generates:
        raise InvalidRequest.field(
            "continue_final_message", "true", "needs add_generation_prompt: false"
        )
    return ChatPrompt(
        template_messages(_messages(body.raw("messages", MESSAGES))),
        body.flag("add_special_tokens"),
        tool_use.tools,
        {**(options or {}), **({"reasoning_effort": effort} if effort else {})},
        add_generation_prompt=generates,
        continue_final_message=continues,
    )


def parse_inputs(body: Body, fields: dict[str, Any]) -> tuple[list[Prompt], str]:
    """The prompts in `input`, or one conversation, and their field. Raises: InvalidRequest."""
    if fields.get("messages") is None:
        special = body.flag("add_special_tokens", default=True)
        return parse_prompts("input", body.raw("input", PROMPTS), special), "input"
    if fields.get("input") is not None:
        raise InvalidRequest.field("messages", "", "send input or messages, not both")
    return [parse_conversation(body, ToolUse(), generates=False)], "messages"


def _messages(value: Any) -> tuple[dict[str, object], ...]:
    if not isinstance(value, list) or not value:
        raise InvalidRequest.field("messages", "", "must be a list of at least one message")
    return tuple(_message(message, index) for index, message in enumerate(value))


def _message(message: Any, index: int) -> dict[str, object]:
    field = f"messages[{index}]"
    if not isinstance(message, dict):
        raise bad_type(field, message, "an object with role and content")
    if not isinstance(message.get("role"), str):
        raise bad_type(f"{field}.role", message.get("role"), "a string")
    content = message.get("content")
    if content is not None:
        content = joined_text(content, f"{field}.content", {"text": "text"}, "")
    elif not message.get("tool_calls"):
        raise InvalidRequest.field(f"{field}.content", "", "the message needs content")
    return {**message, "content": content}


def joined_text(value: Any, field: str, kinds: Mapping[str, str], separator: str) -> str:
    """Text, or the text of a list of parts.

    Args:
        kinds: types of parts that hold text, and the field that holds it.

    Raises: Unsupported for other parts, naming them; InvalidRequest.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise bad_type(field, value, "a string or a list of text parts")
    return separator.join(
        _part_text(part, f"{field}[{index}]", kinds) for index, part in enumerate(value)
    )


def _part_text(part: Any, field: str, kinds: Mapping[str, str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        named = f"is of type {kind[:32]!r}" if isinstance(kind, str) else "has no type"
        served = " and ".join(kinds)
        why = f"{named}, but only parts of type {served} are served; send no images, audio or files"
        raise Unsupported.field(field, "", why)
    text = part.get(kinds[kind])
    if not isinstance(text, str):
        raise bad_type(f"{field}.{kinds[kind]}", text, "a string")
    return text
