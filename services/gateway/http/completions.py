"""Formats the responses of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NotRequired

from loraplex_services.gateway.http.formatting import (
    ChunkUsage,
    CommonFields,
    Formatter,
    PromptIds,
    ResponseInfo,
    StreamedTokens,
    TokenIds,
    WeightsField,
    prompt_id_fields,
    token_id_fields,
)
from loraplex_services.gateway.http.logprobs import (
    CompletionLogprobs,
    PromptLogprobs,
    completion_logprobs,
    joined,
    prompt_logprob_maps,
    prompt_logprobs,
)
from loraplex_services.gateway.http.routed_experts import RoutedField, routed_field
from loraplex_services.gateway.request import TextDelta


class CompletionChoice(TokenIds, WeightsField, RoutedField):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: NotRequired[PromptLogprobs | None]


class CompletionResponse(CommonFields, ChunkUsage):
    """A complete answer, or a chunk of a stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionFormatter(Formatter):
    """Formats the output of one request, streamed or complete."""

    def __init__(self, info: ResponseInfo) -> None:
        self._info = info
        self._begun: set[int] = set()
        """Indices of the choices that have been started."""
        self._tokens = StreamedTokens()

    def chunks(self, text_delta: TextDelta) -> list[CompletionResponse]:
        self._tokens.add(text_delta)
        choice = self._choice(text_delta, is_first=text_delta.index not in self._begun)
        says_nothing = not (
            choice["text"] or choice["finish_reason"] or choice["logprobs"] or text_delta.token_ids
        )
        hides_ids = not self._info.call.return_token_ids and choice["logprobs"] is None
        if says_nothing or (hides_ids and not choice["text"] and not choice["finish_reason"]):
            return []
        index = text_delta.index
        weights = self._info.weights(index, self._tokens.take(index))
        prompt_ids: PromptIds = {} if self._begun else prompt_id_fields(self._info)
        self._begun.add(index)
        usage = self._info.chunk_usage(index, self._tokens.num_tokens[index])
        chunk = self._answer([{**choice, **weights}], usage)
        return [{**chunk, **prompt_ids}]

    def ending(self) -> list[CompletionResponse]:
        if not self._info.call.include_usage:
            return []
        return [self._answer([], {"usage": self._info.usage()})]

    def full_body(self, choices: Sequence[TextDelta]) -> CompletionResponse:
        formatted = [self._full_choice(text_delta) for text_delta in choices]
        answer = self._answer(formatted, {"usage": self._info.usage()})
        return {**answer, **prompt_id_fields(self._info)}

    def _answer(self, choices: list[CompletionChoice], usage: ChunkUsage) -> CompletionResponse:
        return {
            **self._info.common_fields(),
            "object": "text_completion",
            "choices": choices,
            **usage,
        }

    def _full_choice(self, text_delta: TextDelta) -> CompletionChoice:
        choice = self._choice(text_delta, is_first=True)
        prepared = self._info.of_choice(text_delta.index)
        choice["prompt_logprobs"] = prompt_logprob_maps(prepared, text_delta.prompt_logprobs)
        routed = routed_field(self._info.call.experts, text_delta.routed_experts)
        return {**choice, **self._info.weights(text_delta.index, text_delta.spans), **routed}

    def _choice(self, text_delta: TextDelta, *, is_first: bool) -> CompletionChoice:
        echo = self._echo(text_delta.index) if is_first else ""
        choice: CompletionChoice = {
            "index": text_delta.index,
            "text": echo + text_delta.text,
            "logprobs": self._logprobs(text_delta, is_first=is_first),
            "finish_reason": text_delta.finish_reason,
            "stop_reason": text_delta.stop_reason,
        }
        return {**choice, **token_id_fields(self._info, text_delta, with_prompt=is_first)}

    def _echo(self, index: int) -> str:
        prepared = self._info.of_choice(index)
        return prepared.prompt_text() if prepared.resolved.echo else ""

    def _logprobs(self, text_delta: TextDelta, *, is_first: bool) -> CompletionLogprobs | None:
        prepared = self._info.of_choice(text_delta.index)
        if prepared.call.sampling.logprobs is None:
            return None
        shift = len(self._echo(text_delta.index))
        offsets = [shift + offset for offset in text_delta.offsets]
        names = self._info.names(text_delta.index)
        lists = completion_logprobs(names, text_delta.logprobs, offsets)
        if not (is_first and prepared.resolved.echo):
            return lists
        prompt = prompt_logprobs(
            names,
            prepared.prompt_ids,
            text_delta.prompt_logprobs,
            skip_special=prepared.resolved.text.skip_special,
        )
        return joined(prompt, lists)
