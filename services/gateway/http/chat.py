"""Formats the responses of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loraplex.api.output import FinishReason
from loraplex_services.gateway.http.calls import OpenAICall
from loraplex_services.gateway.http.formatting import (
    ResponseInfo,
    UnsentSpans,
    prompt_id_fields,
    token_id_fields,
)
from loraplex_services.gateway.http.logprobs import chat_logprobs, prompt_logprob_maps
from loraplex_services.gateway.pipeline.prepared import PreparedRequest
from loraplex_services.gateway.request import TextDelta
from loraplex_services.gateway.text.detokenize import decode_all
from loraplex_services.gateway.tools.answer import AnswerParser
from loraplex_services.gateway.tools.reader import Delta, ToolCall
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
        self._unsent = UnsentSpans()
        self._answers: dict[int, AnswerParser] = {}
        self._offsets: dict[int, list[int]] = {}
        """Where the tokens of each choice begin, up to the end of its thought."""

    def chunks(self, text_delta: TextDelta) -> list[dict[str, Any]]:
        chunks = []
        self._unsent.add(text_delta)
        if text_delta.index not in self._begun:
            chunks.append(self._opening(text_delta))
            self._begun.add(text_delta.index)
        delta = _formatted(self._read(text_delta), self._info.call.include_reasoning)
        shows_ids = self._info.call.return_token_ids or self._wants_logprobs(text_delta.index)
        if delta or text_delta.finish_reason or (shows_ids and text_delta.token_ids):
            if not delta and not text_delta.finish_reason:
                delta = {"content": ""}
            choice = self._choice(text_delta, "delta", delta)
            choice |= self._info.weights(text_delta.index, self._unsent.take(text_delta.index))
            chunks.append(self._chunk([choice]))
        return chunks

    def usage_chunk(self) -> dict[str, Any]:
        return self._info.object(_CHUNK, []) | {"usage": self._usage()}

    def full_body(self, choices: Sequence[TextDelta]) -> dict[str, Any]:
        formatted = [
            self._choice(
                text_delta, "message", self._message(self._read(text_delta)), with_prompt=True
            )
            | self._info.weights(text_delta.index, text_delta.spans)
            for text_delta in choices
        ]
        body = self._info.object("chat.completion", formatted) | {
            "usage": self._usage(),
            "prompt_logprobs": prompt_logprob_maps(
                self._info.of_choice(0), choices[0].prompt_logprobs
            ),
        }
        return body | prompt_id_fields(self._info)

    def _read(self, text_delta: TextDelta) -> Delta:
        """The new parts of a choice's answer, by kind."""
        if text_delta.index not in self._answers:
            prepared = self._info.of_choice(text_delta.index)
            self._answers[text_delta.index] = answer_parser(prepared, self._info.call)
        reply = self._answers[text_delta.index]
        if reply.may_think:
            self._offsets.setdefault(text_delta.index, []).extend(text_delta.offsets)
        delta = reply.feed(text_delta.text)
        if text_delta.finish_reason is not None:
            rest = reply.finish()
            delta.content += rest.content
            delta.reasoning += rest.reasoning
            delta.calls += rest.calls
        return delta

    def _usage(self) -> dict[str, Any]:
        num_reasoning = 0
        for index, offsets in self._offsets.items():
            begin, end = self._answers[index].thought_chars
            num_reasoning += sum(begin <= offset < end for offset in offsets)
        details = {"reasoning_tokens": num_reasoning}
        return self._info.usage() | {"completion_tokens_details": details}

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
        reason = text_delta.finish_reason
        if reason is FinishReason.STOP and not self._info.call.tool_use.named:
            return "tool_calls" if self._answers[text_delta.index].num_calls else reason
        return reason

    def _chunk(self, choices: list[dict[str, Any]], num_unsent: int = 0) -> dict[str, Any]:
        return self._info.object(_CHUNK, choices) | self._info.chunk_usage(num_unsent)

    def _wants_logprobs(self, index: int) -> bool:
        return self._info.of_choice(index).call.sampling.logprobs is not None

    def _logprobs(self, text_delta: TextDelta) -> dict[str, Any] | None:
        prepared = self._info.of_choice(text_delta.index)
        num_top = prepared.call.sampling.logprobs
        if num_top is None:
            return None
        return chat_logprobs(self._info.names(text_delta.index), text_delta, num_top)


def answer_parser(prepared: PreparedRequest, call: OpenAICall) -> AnswerParser:
    """The parser of one answer. In a response format all of it is content or calls, and never a
    thought."""
    style = prepared.style
    thinks = style.thinks and call.grammar is None
    return AnswerParser(
        thinks=thinks,
        is_thinking=thinks and ends_in_thought(prepared),
        tools=reader_of(style.tool_format, call.tool_use),
    )


def ends_in_thought(prepared: PreparedRequest) -> bool:
    """Whether the prompt opened a thought, which the answer continues."""
    tail = prepared.prompt_ids[-_TAIL_TOKENS:]
    return decode_all(prepared.tokens, tail, skip_special=False).rstrip().endswith("<think>")


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
