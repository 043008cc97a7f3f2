"""Prints /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.gateway.http.calls import OpenAICall
from services.gateway.http.logprobs import chat_logprobs
from services.gateway.http.printing import Head, prompt_id_fields, token_id_fields
from services.gateway.pipeline.prepared import Prepared
from services.gateway.request import FinishReason, Piece
from services.gateway.text.chat_style import ChatStyle
from services.gateway.text.detokenize import whole_text
from services.gateway.tools.reader import CallDelta, Delta
from services.gateway.tools.readers import reader_of
from services.gateway.tools.reply import Reply

_CHUNK = "chat.completion.chunk"
_TAIL_TOKENS = 8
"""Enough of a prompt's end to see whether it ends inside a thought."""


class ChatPrinter:
    """Prints the pieces of one conversation, in a stream or as a whole."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._begun: set[int] = set()
        """Indices of choices whose role is out."""
        self._replies: dict[int, Reply] = {}

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        chunks = []
        if piece.index not in self._begun:
            chunks.append(self._opening(piece.index))
            self._begun.add(piece.index)
        delta = _printed(self._read(piece), self._head.call.include_reasoning)
        shows_ids = self._head.call.return_token_ids or self._wants_logprobs(piece.index)
        if delta or piece.finish_reason or (shows_ids and piece.token_ids):
            if not delta and not piece.finish_reason:
                delta = {"content": ""}
            chunks.append(self._chunk([self._choice(piece, "delta", delta)]))
        return chunks

    def usage_chunk(self) -> dict[str, Any]:
        return self._head.object(_CHUNK, []) | {"usage": self._head.usage()}

    def whole(self, choices: Sequence[Piece]) -> dict[str, Any]:
        printed = [
            self._choice(piece, "message", self._message(self._read(piece)), with_prompt=True)
            for piece in choices
        ]
        body = self._head.object("chat.completion", printed) | {"usage": self._head.usage()}
        return body | prompt_id_fields(self._head)

    def _read(self, piece: Piece) -> Delta:
        """What is new in a choice's answer, by kind."""
        if piece.index not in self._replies:
            prepared = self._head.of_choice(piece.index)
            self._replies[piece.index] = reply_of(prepared, self._head.call)
        reply = self._replies[piece.index]
        delta = reply.feed(piece.text)
        if piece.finish_reason is not None:
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
        if delta.reasoning and self._head.call.include_reasoning:
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
        if self._head.call.return_token_ids:
            choice["prompt_token_ids"] = list(self._head.of_choice(index).prompt_ids)
        chunk = self._chunk([choice])
        return chunk if self._begun else chunk | prompt_id_fields(self._head)

    def _choice(
        self, piece: Piece, part: str, content: dict[str, Any], *, with_prompt: bool = False
    ) -> dict[str, Any]:
        return {
            "index": piece.index,
            part: content,
            "logprobs": self._logprobs(piece),
            "finish_reason": self._finish_reason(piece),
            "stop_reason": piece.stop_reason,
            **token_id_fields(self._head, piece, with_prompt=with_prompt),
        }

    def _finish_reason(self, piece: Piece) -> str | None:
        """An answer that asks for calls says so, unless the caller chose the function."""
        reason = piece.finish_reason
        if reason is FinishReason.STOP and not self._head.call.tool_use.named:
            return "tool_calls" if self._replies[piece.index].num_calls else reason
        return reason

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._head.object(_CHUNK, choices)
        return chunk | {"usage": None} if self._head.call.include_usage else chunk

    def _wants_logprobs(self, index: int) -> bool:
        return self._head.of_choice(index).call.sampling.logprobs is not None

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        prepared = self._head.of_choice(piece.index)
        num_top = prepared.call.sampling.logprobs
        return None if num_top is None else chat_logprobs(prepared.tokens, piece, num_top)


def reply_of(prepared: Prepared, call: OpenAICall) -> Reply:
    """How to read one answer. Under a grammar all of it is content or calls, never a thought,
    unless it is a grammar of calls within free text."""
    style = prepared.style
    if call.grammar is not None:
        style = ChatStyle(style.tool_format, thinks=False)
    is_thinking = False
    if style.thinks:
        tail = prepared.prompt_ids[-_TAIL_TOKENS:]
        end = whole_text(prepared.tokens, tail, skip_special=False)
        is_thinking = end.rstrip().endswith("<think>")
    tools = reader_of(style.tool_format, call.tool_use)
    return Reply(thinks=style.thinks, is_thinking=is_thinking, tools=tools)


def _printed(delta: Delta, include_reasoning: bool) -> dict[str, Any]:
    """A stream's delta object; empty when there is nothing to say."""
    printed: dict[str, Any] = {}
    if delta.reasoning and include_reasoning:
        printed["reasoning_content"] = delta.reasoning
    if delta.content:
        printed["content"] = delta.content
    if delta.calls:
        printed["tool_calls"] = [_call_delta(call) for call in delta.calls]
    return printed


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
