"""Converts the prompts of clients' messages to the gateway's plain types."""

from __future__ import annotations

from loraplex.errors import InvalidRequest
from loraplex.v1 import inference_pb2
from loraplex_services.gateway.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt


def prompt_from_wire(
    message: inference_pb2.GenerateRequest | inference_pb2.Prompt,
    field: str,
    *,
    generates: bool = True,
) -> Prompt:
    """A prompt in any form; `generates`: whether a chat prompt ends with the start of an answer.

    Raises: InvalidRequest naming `field` without one.
    """
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(message.text)
        case "token_ids":
            return TokenPrompt(tuple(message.token_ids.ids))
        case "chat" if message.chat.messages:
            messages = tuple({"role": m.role, "content": m.content} for m in message.chat.messages)
            return ChatPrompt(messages, add_generation_prompt=generates)
        case "chat":
            raise InvalidRequest.field("messages", "", "send at least one message")
    raise InvalidRequest.field(field, "", "send text, token_ids or chat")
