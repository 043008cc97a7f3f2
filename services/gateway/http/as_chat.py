"""Converts requests of other APIs to chats, and keeps the field names of the caller for errors."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from loraplex.errors import InvalidRequest, LoraplexError, Unsupported
from loraplex_services.gateway.http.body import Body, bad_type
from loraplex_services.gateway.http.calls import OpenAICall, Origin, parse_chat
from loraplex_services.gateway.request import with_names

SHARED_FIELDS = frozenset(
    {
        *("adapters", "allowed_token_ids", "bad_token_ids", "bad_words", "cache_salt"),
        "chat_template_kwargs",
        *("first_token_s", "frequency_penalty", "ignore_eos", "include_stop_str_in_output"),
        *("logit_bias", "lora_scale", "min_p", "min_tokens", "on_update"),
        *("presence_penalty", "priority"),
        *("repetition_penalty", "seed", "skip_special_tokens", "stop_token_ids", "temperature"),
        *("top_k", "top_p", "truncate_prompt_tokens"),
    }
)
"""Fields of chat that every API here takes under the same name."""

_FUNCTION = re.compile(r"(tools\[\d+\])\.function\b")


def parse_as_chat(fields: dict[str, Any], origin: Origin, names: Mapping[str, str]) -> OpenAICall:
    """A chat's call from a chat's body.

    Args:
        names: what the caller calls fields of chat. It describes a function in `tools[i]` itself.

    Raises: InvalidRequest, Unsupported, with the caller's names.
    """

    def named(field: str) -> str:
        return names.get(field, _FUNCTION.sub(r"\1", field))

    try:
        call = parse_chat(fields, origin)
    except LoraplexError as error:
        raise with_names(error, {v.field: named(v.field) for v in error.violations}) from None
    for ours, name in call.field_names.items():
        call.field_names[ours] = named(name)
    call.field_names.setdefault("stop", named("stop"))
    return call


class _Text:
    """A text that grows. Its parts are joined once: a body may have 100,000 of them."""

    def __init__(self, text: str, separator: str = "\n") -> None:
        self._parts = [text]
        self._separator = separator

    def add(self, text: str) -> None:
        self._parts.append(text)

    def __str__(self) -> str:
        return self._separator.join(self._parts)


class ChatMessages:
    """Builds the messages of a chat. What an assistant says in one turn becomes one message."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        """Texts in them may still grow; `built` joins them."""

    def built(self) -> list[dict[str, Any]]:
        """All messages, with their texts joined."""
        return [
            {key: str(value) if isinstance(value, _Text) else value for key, value in each.items()}
            for each in self._messages
        ]

    def system(self, text: str) -> None:
        """Add instructions. Those that open the conversation become one message, because templates
        accept only one."""
        if self._messages and all(each["role"] == "system" for each in self._messages):
            self._messages[0]["content"].add(text)
        else:
            self._messages.append({"role": "system", "content": _Text(text, "\n\n")})

    def user(self, text: str, *, joins: bool = False) -> None:
        """Add what the user says. With `joins`, consecutive texts become one message."""
        if joins and self._messages and self._messages[-1]["role"] == "user":
            self._messages[-1]["content"].add(text)
        else:
            self._messages.append({"role": "user", "content": _Text(text)})

    def thought(self, text: str) -> None:
        """Add reasoning. It begins a turn unless the turn consists only of reasoning so far."""
        turn = self._turn()
        if turn["content"] is not None or "tool_calls" in turn:
            turn = self._new_turn()
        _add(turn, "reasoning", text)

    def said(self, text: str, *, joins: bool = False) -> None:
        """Add what the assistant says. It begins a turn after calls and, unless it joins, after
        other text."""
        turn = self._turn()
        if "tool_calls" in turn or (turn["content"] is not None and not joins):
            turn = self._new_turn()
        _add(turn, "content", text)

    def called(self, call_id: str, name: str, arguments: object) -> None:
        """Add a call of the assistant. `arguments` is JSON or an object."""
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._turn().setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, text: str, **fields: object) -> None:
        """Add what a call returned."""
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": text, **fields})

    def _turn(self) -> dict[str, Any]:
        if self._messages and self._messages[-1]["role"] == "assistant":
            return self._messages[-1]
        return self._new_turn()

    def _new_turn(self) -> dict[str, Any]:
        self._messages.append({"role": "assistant", "content": None})
        return self._messages[-1]


def _add(turn: dict[str, Any], field: str, text: str) -> None:
    if turn.get(field) is None:
        turn[field] = _Text(text)
    else:
        turn[field].add(text)


def objects(value: Any, field: str) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a list with the names of their fields. Raises: InvalidRequest."""
    if not isinstance(value, list):
        raise bad_type(field, value, "a list of objects")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise bad_type(f"{field}[{index}]", item, "an object")
    return [(f"{field}[{index}]", item) for index, item in enumerate(value)]


def typed_body(item: Mapping[str, Any], field: str) -> Body:
    """The fields of an object besides its type, which was read before."""
    return Body({name: value for name, value in item.items() if name != "type"}, f"{field}.")


def required_text(body: Body, name: str, field: str) -> str:
    """A text that may not be missing. Raises: InvalidRequest."""
    text = body.text(name)
    if text is None:
        raise InvalidRequest.field(f"{field}.{name}", "", "is missing")
    return text


def kind_and_body(value: Any, field: str, kinds: Collection[str]) -> tuple[str, Body]:
    """The type of an object, and its other fields. Raises: InvalidRequest, Unsupported."""
    if not isinstance(value, dict):
        raise bad_type(field, value, "an object with a type")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise Unsupported.field(f"{field}.type", "", f"must be one of {', '.join(kinds)}")
    return kind, typed_body(value, field)
