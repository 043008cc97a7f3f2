"""Formats the responses of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loraplex.api.output import FinishReason
from loraplex_services.gateway.http.calls import OpenAICall
from loraplex_services.gateway.http.formatting import (
    ResponseInfo,
    prompt_id_fields,
    token_id_fields,
)
from loraplex_services.gateway.http.logprobs import chat_logprobs
from loraplex_services.gateway.pipeline.prepared import PreparedRequest
from loraplex_services.gateway.request import TextDelta
from loraplex_services.gateway.text.chat_style import ChatStyle
from loraplex_services.gateway.text.detokenize import decode_all
from loraplex_services.gateway.tools.answer import AnswerParser
from loraplex_services.gateway.tools.reader import CallDelta, Delta
from loraplex_services.gateway.tools.readers import reader_of

_CHUNK = "chat.completion.chunk"
_TAIL_TOKENS = 8
"""Enough of the end of a prompt to see whether it ends inside a thought."""


class ChatFormatter:
    """Formats the answer to one conversation, streamed or complete."""

    def __init__(self, info: ResponseInfo) -> None:
        self._info = info
        self._begun: set[int] = set()
        """Indices of choices whose role has been sent."""
        self._answers: dict[int, AnswerParser] = {}

    def chunks(self, text_delta: TextDelta) -> list[dict[str, Any]]:
        chunks = []
        if text_delta.index not in self._begun:
            chunks.append(self._opening(text_delta.index))
            self._begun.add(text_delta.index)
        delta = _formatted(self._read(text_delta), self._info.call.include_reasoning)
        shows_ids = self._info.call.return_token_ids or self._wants_logprobs(text_delta.index)
        if delta or text_delta.finish_reason or (shows_ids and text_delta.token_ids):
            if not delta and not text_delta.finish_reason:
                delta = {"content": ""}
            chunks.append(self._chunk([self._choice(text_delta, "delta", delta)]))
        return chunks

    def usage_chunk(self) -> dict[str, Any]:
        return self._info.object(_CHUNK, []) | {"usage": self._info.usage()}

    def full_body(self, choices: Sequence[TextDelta]) -> dict[str, Any]:
        formatted = [
            self._choice(
                text_delta, "message", self._message(self._read(text_delta)), with_prompt=True
            )
            for text_delta in choices
        ]
        body = self._info.object("chat.completion", formatted) | {"usage": self._info.usage()}
        return body | prompt_id_fields(self._info)

    def _read(self, text_delta: TextDelta) -> Delta:
        """The new parts of a choice's answer, by kind."""
        if text_delta.index not in self._answers:
            prepared = self._info.of_choice(text_delta.index)
            self._answers[text_delta.index] = answer_parser(prepared, self._info.call)
        reply = self._answers[text_delta.index]
        delta = reply.feed(text_delta.text)
        if text_delta.finish_reason is not None:
            rest = reply.finish()
            delta.content += rest.content
            delta.reasoning += rest.reasoning
            delta.calls += rest.calls
        return delta

    def _message(self, delta: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if delta.calls and not delta.content else delta.content,
            "refusal": None,
        }
        if delta.reasoning and self._info.call.include_reasoning:
            message["reasoning_content"] = delta.reasoning
        if delta.calls:
            message["tool_calls"] = _whole_calls(delta.calls)
        return message

    def _opening(self, index: int) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if self._info.call.return_token_ids:
            choice["prompt_token_ids"] = list(self._info.of_choice(index).prompt_ids)
        chunk = self._chunk([choice])
        return chunk if self._begun else chunk | prompt_id_fields(self._info)

    def _choice(
        self,
        text_delta: TextDelta,
        part: str,
        content: dict[str, Any],
        *,
        with_prompt: bool = False,
    ) -> dict[str, Any]:
        return {
            "index": text_delta.index,
            part: content,
            "logprobs": self._logprobs(text_delta),
            "finish_reason": self._finish_reason(text_delta),
            "stop_reason": text_delta.stop_reason,
            **token_id_fields(self._info, text_delta, with_prompt=with_prompt),
        }

    def _finish_reason(self, text_delta: TextDelta) -> str | None:
        """`tool_calls` if the answer contains calls, unless the caller chose the function."""
        reason = text_delta.finish_reason
        if reason is FinishReason.STOP and not self._info.call.tool_use.named:
            return "tool_calls" if self._answers[text_delta.index].num_calls else reason
        return reason

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._info.object(_CHUNK, choices)
        return chunk | {"usage": None} if self._info.call.include_usage else chunk

    def _wants_logprobs(self, index: int) -> bool:
        return self._info.of_choice(index).call.sampling.logprobs is not None

    def _logprobs(self, text_delta: TextDelta) -> dict[str, Any] | None:
        prepared = self._info.of_choice(text_delta.index)
        num_top = prepared.call.sampling.logprobs
        return None if num_top is None else chat_logprobs(prepared.tokens, text_delta, num_top)


def answer_parser(prepared: PreparedRequest, call: OpenAICall) -> AnswerParser:
    """The parser of one answer. Under a grammar all of it is content or calls, never a thought,
    unless it is a grammar of calls within free text."""
    style = prepared.style
    if call.grammar is not None:
        style = ChatStyle(style.tool_format, thinks=False)
    is_thinking = False
    if style.thinks:
        tail = prepared.prompt_ids[-_TAIL_TOKENS:]
        end = decode_all(prepared.tokens, tail, skip_special=False)
        is_thinking = end.rstrip().endswith("<think>")
    tools = reader_of(style.tool_format, call.tool_use)
    return AnswerParser(thinks=style.thinks, is_thinking=is_thinking, tools=tools)


def _formatted(delta: Delta, include_reasoning: bool) -> dict[str, Any]:
    """The delta object of a stream; empty if there is nothing new."""
    formatted: dict[str, Any] = {}
    if delta.reasoning and include_reasoning:
        formatted["reasoning_content"] = delta.reasoning
    if delta.content:
        formatted["content"] = delta.content
    if delta.calls:
        formatted["tool_calls"] = [_call_delta(call) for call in delta.calls]
    return formatted


def _call_delta(call: CallDelta) -> dict[str, Any]:
    if not call.call_id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {
        "index": call.index,
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _whole_calls(deltas: Sequence[CallDelta]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if delta.call_id:
            function = {"name": delta.name, "arguments": ""}
            calls.append({"id": delta.call_id, "type": "function", "function": function})
        calls[delta.index]["function"]["arguments"] += delta.arguments
    return calls
