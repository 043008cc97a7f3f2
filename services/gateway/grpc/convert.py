"""Converts between clients' messages and the gateway's plain types."""

from __future__ import annotations

from loraplex.errors import InvalidRequest
from loraplex.v1 import common_pb2, inference_pb2
from loraplex_services.gateway.request import (
    ChatPrompt,
    FinishReason,
    Grammar,
    Prompt,
    TextPrompt,
    TokenLogprob,
    TokenPrompt,
)

FINISH_TO_WIRE = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
}


def logprob_to_wire(logprob: TokenLogprob | None) -> common_pb2.TokenLogprob:
    """One position; None becomes an empty entry."""
    if logprob is None:
        return common_pb2.TokenLogprob()
    return common_pb2.TokenLogprob(
        token=common_pb2.TokenCandidate(token_id=logprob.token_id, logprob=logprob.logprob),
        top=[common_pb2.TokenCandidate(token_id=i, logprob=value) for i, value in logprob.top],
    )


def grammar_from_wire(message: common_pb2.Grammar) -> Grammar:
    """Convert a grammar; without a form it is refused later."""
    form = message.WhichOneof("form") or ""
    texts = message.choice.options if form == "choice" else [getattr(message, form)] if form else []
    return Grammar(form, tuple(texts))


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
