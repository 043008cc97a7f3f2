"""Formats the responses of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loraplex.errors import LoraplexError
from loraplex_services.gateway.http.chat_answers import ChatAnswers
from loraplex_services.gateway.http.errors import error_object
from loraplex_services.gateway.http.formatting import (
    ResponseInfo,
    UnsentSpans,
    prompt_id_fields,
    token_id_fields,
)
from loraplex_services.gateway.http.logprobs import chat_logprobs, prompt_logprob_maps
from loraplex_services.gateway.request import TextDelta
from loraplex_services.gateway.tools.reader import Delta, ToolCall

_CHUNK = "chat.completion.chunk"


class ChatFormatter:
    """Formats the answer to one conversation, streamed or complete."""

    def __init__(self, info: ResponseInfo) -> None:
        self._info = info
        self._begun: set[int] = set()
        """Indices of choices whose role has been sent."""
        self._unsent = UnsentSpans()
        self._answers = ChatAnswers(info)

    def chunks(self, text_delta: TextDelta) -> list[dict[str, Any]]:
        chunks = []
        self._unsent.add(text_delta)
        if text_delta.index not in self._begun:
            chunks.append(self._opening(text_delta))
            self._begun.add(text_delta.index)
        delta = _formatted(self._answers.read(text_delta), self._info.call.include_reasoning)
        shows_ids = self._info.call.return_token_ids or self._wants_logprobs(text_delta.index)
        if delta or text_delta.finish_reason or (shows_ids and text_delta.token_ids):
            if not delta and not text_delta.finish_reason:
                delta = {"content": ""}
            choice = self._choice(text_delta, "delta", delta)
            choice |= self._info.weights(text_delta.index, self._unsent.take(text_delta.index))
            chunks.append(self._chunk([choice]))
        return chunks

    def ending(self) -> list[dict[str, Any]]:
        if not self._info.call.include_usage:
            return []
        return [self._info.object(_CHUNK, []) | {"usage": self._answers.usage()}]

    def failure(self, error: LoraplexError) -> dict[str, Any]:
        return error_object(error)

    def full_body(self, choices: Sequence[TextDelta]) -> dict[str, Any]:
        formatted = [
            self._choice(
                text_delta,
                "message",
                self._message(self._answers.read(text_delta)),
                with_prompt=True,
            )
            | self._info.weights(text_delta.index, text_delta.spans)
            for text_delta in choices
        ]
        body = self._info.object("chat.completion", formatted) | {
            "usage": self._answers.usage(),
            "prompt_logprobs": prompt_logprob_maps(
                self._info.of_choice(0), choices[0].prompt_logprobs
            ),
        }
        return body | prompt_id_fields(self._info)

    def _message(self, delta: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if delta.calls and not delta.content else delta.content,
            "refusal": None,
        }
        if delta.reasoning and self._info.call.include_reasoning:
            message |= _thought(delta.reasoning)
        if delta.calls:
            message["tool_calls"] = [_call(call) for call in delta.calls]
        return message

    def _opening(self, text_delta: TextDelta) -> dict[str, Any]:
        index = text_delta.index
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if self._info.call.return_token_ids:
            choice["prompt_token_ids"] = list(self._info.of_choice(index).prompt_ids)
        chunk = self._chunk([choice], num_unsent=len(text_delta.token_ids))
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
        """`tool_calls` if the answer contains calls, unless the caller named the function."""
        if not self._info.call.tool_use.named and self._answers.ends_with_calls(text_delta):
            return "tool_calls"
        return text_delta.finish_reason

    def _chunk(self, choices: list[dict[str, Any]], num_unsent: int = 0) -> dict[str, Any]:
        return self._info.object(_CHUNK, choices) | self._info.chunk_usage(num_unsent)

    def _wants_logprobs(self, index: int) -> bool:
        return self._info.of_choice(index).call.sampling.logprobs is not None

    def _logprobs(self, text_delta: TextDelta) -> dict[str, Any] | None:
        prepared = self._info.of_choice(text_delta.index)
        if prepared.call.sampling.logprobs is None:
            return None
        return chat_logprobs(self._info.names(text_delta.index), text_delta)


def _formatted(delta: Delta, include_reasoning: bool) -> dict[str, Any]:
    """The delta object of a stream; empty if there is nothing new."""
    formatted: dict[str, Any] = {}
    if delta.reasoning and include_reasoning:
        formatted |= _thought(delta.reasoning)
    if delta.content:
        formatted["content"] = delta.content
    if delta.calls:
        formatted["tool_calls"] = [{"index": call.index, **_call(call)} for call in delta.calls]
    return formatted


def _thought(text: str) -> dict[str, Any]:
    """A thought under the name that vLLM gives it today and the one that it had before."""
    return {"reasoning": text, "reasoning_content": text}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}
