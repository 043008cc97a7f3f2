"""Converts input items of the Responses API to the messages of a chat."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loraplex.errors import InvalidRequest, NotFound, Unsupported
from loraplex_services.gateway.http.as_chat import ChatMessages, required_text, typed_body
from loraplex_services.gateway.http.body import Body
from loraplex_services.gateway.http.prompts import joined_text

_TEXTS = {"input_text": "text", "text": "text"}
_ANSWERS = {"output_text": "text", "refusal": "refusal", **_TEXTS}
_THOUGHTS = {"reasoning_text": "text", "summary_text": "text"}
_UNUSED = ("id", "status", "phase")
"""Fields of items that the model does not see."""
_THOUGHT_MARK = "loraplex-thought:"

REFERENCE = "item_reference"


def encoded_thought(text: str) -> str:
    """A thought as `encrypted_content`: encoded, not encrypted, since `content` shows it."""
    return _THOUGHT_MARK + base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def kind_of(item: Mapping[str, Any]) -> object:
    """The type of an item, which messages and references may leave out."""
    return item.get("type") or ("message" if "role" in item else REFERENCE)


def resolved(item: Mapping[str, Any], field: str, kept: Mapping[str, Any]) -> Mapping[str, Any]:
    """The item, or the kept one that it refers to. Raises: InvalidRequest, NotFound."""
    if kind_of(item) != REFERENCE:
        return item
    body = typed_body(item, field)
    item_id = required_text(body, "id", field)
    body.finish()
    if item_id not in kept:
        why = "this gateway keeps no item with this id; send the item itself"
        raise NotFound.field(f"{field}.id", "", why, reason="ITEM_NOT_FOUND")
    found: Mapping[str, Any] = kept[item_id]
    return found


def check_referred_once(items: Sequence[Mapping[str, Any]]) -> None:
    """Raises: InvalidRequest if an item is referred to twice, as OpenAI refuses it: 100,000
    references to one long item make gigabytes of input."""
    seen: set[object] = set()
    for index, item in enumerate(items):
        item_id = item.get("id")
        if kind_of(item) != REFERENCE or not isinstance(item_id, str):
            continue
        if item_id in seen:
            why = "the same item was referred to before; refer to each item once"
            raise InvalidRequest.field(f"input[{index}].id", "", why)
        seen.add(item_id)


def add_item(messages: ChatMessages, item: Mapping[str, Any], field: str) -> None:
    """Append an item to a chat. Raises: InvalidRequest, Unsupported."""
    kind = kind_of(item)
    add = _ADDERS.get(kind) if isinstance(kind, str) else None
    if add is None:
        shown = kind[:32] if isinstance(kind, str) else ""
        raise Unsupported.field(
            field, "", f"items of type {shown!r} are not served; there are {', '.join(_ADDERS)}"
        )
    body = typed_body(item, field)
    for name in _UNUSED:
        body.raw(name)
    add(messages, body, field)
    body.finish()


def _add_message(messages: ChatMessages, body: Body, field: str) -> None:
    role, content = required_text(body, "role", field), body.raw("content")
    if role == "assistant":
        messages.said(joined_text(content, f"{field}.content", _ANSWERS, ""))
        return
    text = joined_text(content, f"{field}.content", _TEXTS, "")
    if role in ("system", "developer"):
        messages.system(text)
    elif role == "user":
        messages.user(text)
    else:
        why = "must be user, assistant, system or developer"
        raise InvalidRequest.field(f"{field}.role", role, why)


def full_name(namespace: str, name: str) -> str:
    """The name of a namespace's function that the model is shown."""
    return f"{namespace}__{name}"


def _add_call(messages: ChatMessages, body: Body, field: str) -> None:
    call_id, name = required_text(body, "call_id", field), required_text(body, "name", field)
    if namespace := body.text("namespace"):
        name = full_name(namespace, name)
    arguments = body.text("arguments") or "{}"
    messages.called(call_id, name, _json(arguments, f"{field}.arguments"))


def _json(text: str, field: str) -> str:
    """Check that a text is JSON and return it. Raises: InvalidRequest."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest.field(field, "", "must be JSON") from None
    return text


def _add_result(messages: ChatMessages, body: Body, field: str) -> None:
    call_id = required_text(body, "call_id", field)
    messages.result(call_id, joined_text(body.raw("output"), f"{field}.output", _TEXTS, "\n"))


def _add_thought(messages: ChatMessages, body: Body, field: str) -> None:
    """The thought itself, else what this server encoded, else a summary from elsewhere."""
    content = joined_text(body.raw("content") or [], f"{field}.content", _THOUGHTS, "\n")
    encoded = _decoded(body.text("encrypted_content"), f"{field}.encrypted_content")
    summary = joined_text(body.raw("summary") or [], f"{field}.summary", _THOUGHTS, "\n")
    if text := content or encoded or summary:
        messages.thought(text)


def _decoded(text: str | None, field: str) -> str:
    if not text:
        return ""
    try:
        if not text.startswith(_THOUGHT_MARK):
            raise ValueError
        raw = base64.b64decode(text.removeprefix(_THOUGHT_MARK), validate=True)
        return raw.decode()
    except (ValueError, binascii.Error):
        why = "was not made by this server; leave the item out"
        raise InvalidRequest.field(field, "", why) from None


_ADDERS: Mapping[str, Callable[[ChatMessages, Body, str], None]] = {
    "message": _add_message,
    "function_call": _add_call,
    "function_call_output": _add_result,
    "reasoning": _add_thought,
}
