"""Formats the responses of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NotRequired, TypedDict

from loraplex.api.output import WeightSpan
from loraplex_services.gateway.http.formatting import (
    ChunkUsage,
    CommonFields,
    Formatter,
    ResponseInfo,
    StreamedTokens,
    TokenIds,
    UsageInfo,
    WeightsField,
    prompt_id_fields,
    token_id_fields,
)
from loraplex_services.gateway.http.logprobs import (
    ChatLogprobs,
    PromptLogprobs,
    chat_logprobs,
    prompt_logprob_maps,
)
from loraplex_services.gateway.http.routed_experts import RoutedField, routed_field
from loraplex_services.gateway.request import TextDelta
from loraplex_services.gateway.tools.reader import Delta, ToolCall


class Function(TypedDict):
    name: str
    arguments: str


class ChatToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: Function
    index: NotRequired[int]


class Thought(TypedDict, total=False):
    """A thought under the name that vLLM gives it today and the one that it had before."""

    reasoning: str
    reasoning_content: str


class AssistantMessage(Thought):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ChatToolCall]]


class ChoiceDelta(Thought, total=False):
    role: Literal["assistant"]
    content: str
    tool_calls: list[ChatToolCall]


class ChoiceFields(TokenIds, WeightsField, RoutedField):
    index: int
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatChoice(ChoiceFields):
    message: AssistantMessage


class Chat(CommonFields):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_logprobs: PromptLogprobs | None


class ChatChunkChoice(ChoiceFields):
    delta: ChoiceDelta


class ChatChunk(CommonFields, ChunkUsage):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class ChatFormatter(Formatter):
    """Formats the answer to one conversation, streamed or complete."""

    def __init__(self, info: ResponseInfo) -> None:
        self._info = info
        self._begun: set[int] = set()
        """Indices of choices whose role has been sent."""
        self._tokens = StreamedTokens()
        self._answers = info.answers()

    def chunks(self, text_delta: TextDelta) -> list[ChatChunk]:
        chunks = []
        if text_delta.index not in self._begun:
            chunks.append(self._opening(text_delta.index))
            self._begun.add(text_delta.index)
        self._tokens.add(text_delta)
        delta = _formatted(self._answers.read(text_delta), self._info.call.include_reasoning)
        shows_ids = self._info.call.return_token_ids or self._wants_logprobs(text_delta.index)
        if delta or text_delta.finish_reason or (shows_ids and text_delta.token_ids):
            if not delta and not text_delta.finish_reason:
                delta = {"content": ""}
            spans = self._tokens.take(text_delta.index)
            fields = self._choice(text_delta, spans, with_prompt=False)
            chunks.append(self._chunk({**fields, "delta": delta}))
        return chunks

    def ending(self) -> list[ChatChunk]:
        if not self._info.call.include_usage:
            return []
        return [self._object([], {"usage": self._info.chat_usage(self._answers)})]

    def full_body(self, choices: Sequence[TextDelta]) -> Chat:
        messages = [self._message(self._answers.read(text_delta)) for text_delta in choices]
        return {
            **self._info.common_fields(),
            "object": "chat.completion",
            "choices": [
                {**self._choice(choice, choice.spans, with_prompt=True), "message": message}
                for choice, message in zip(choices, messages, strict=True)
            ],
            "usage": self._info.chat_usage(self._answers),
            "prompt_logprobs": prompt_logprob_maps(
                self._info.of_choice(0), choices[0].prompt_logprobs
            ),
            **prompt_id_fields(self._info),
        }

    def _message(self, delta: Delta) -> AssistantMessage:
        message: AssistantMessage = {
            "role": "assistant",
            "content": None if delta.calls and not delta.content else delta.content,
            "refusal": None,
        }
        if delta.reasoning and self._info.call.include_reasoning:
            message = {**message, **_thought(delta.reasoning)}
        if delta.calls:
            message["tool_calls"] = [_call(call) for call in delta.calls]
        return message

    def _opening(self, index: int) -> ChatChunk:
        choice: ChatChunkChoice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }
        if self._info.call.return_token_ids:
            choice["prompt_token_ids"] = list(self._info.of_choice(index).prompt_ids)
        chunk = self._chunk(choice)
        return chunk if self._begun else {**chunk, **prompt_id_fields(self._info)}

    def _choice(
        self, text_delta: TextDelta, spans: Iterable[WeightSpan], *, with_prompt: bool
    ) -> ChoiceFields:
        return {
            "index": text_delta.index,
            "logprobs": self._logprobs(text_delta),
            "finish_reason": self._finish_reason(text_delta),
            "stop_reason": text_delta.stop_reason,
            **token_id_fields(self._info, text_delta, with_prompt=with_prompt),
            **self._info.weights(text_delta.index, spans),
            **routed_field(self._info.call.experts, text_delta.routed_experts),
        }

    def _finish_reason(self, text_delta: TextDelta) -> str | None:
        """`tool_calls` if the answer contains calls, unless the caller named the function."""
        if not self._info.call.tool_use.named and self._answers.ends_with_calls(text_delta):
            return "tool_calls"
        return text_delta.finish_reason

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        index = choice["index"]
        usage = self._info.chunk_usage(index, self._tokens.num_tokens[index])
        return self._object([choice], usage)

    def _object(self, choices: list[ChatChunkChoice], usage: ChunkUsage) -> ChatChunk:
        return {
            **self._info.common_fields(),
            "object": "chat.completion.chunk",
            "choices": choices,
            **usage,
        }

    def _wants_logprobs(self, index: int) -> bool:
        return self._info.of_choice(index).call.sampling.logprobs is not None

    def _logprobs(self, text_delta: TextDelta) -> ChatLogprobs | None:
        prepared = self._info.of_choice(text_delta.index)
        if prepared.call.sampling.logprobs is None:
            return None
        return chat_logprobs(self._info.names(text_delta.index), text_delta)


def _formatted(delta: Delta, include_reasoning: bool) -> ChoiceDelta:
    """The delta object of a stream; empty if there is nothing new."""
    formatted: ChoiceDelta = {}
    if delta.reasoning and include_reasoning:
        formatted = {**formatted, **_thought(delta.reasoning)}
    if delta.content:
        formatted["content"] = delta.content
    if delta.calls:
        formatted["tool_calls"] = [{**_call(call), "index": call.index} for call in delta.calls]
    return formatted


def _thought(text: str) -> Thought:
    return {"reasoning": text, "reasoning_content": text}


def _call(call: ToolCall) -> ChatToolCall:
    function: Function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}
