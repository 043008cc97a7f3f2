"""Parts that responses of completions and chat share: common fields, usage, collected choices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

from loraplex.api.output import WeightSpan, joined_spans
from loraplex.errors import LoraplexError
from loraplex_services.gateway.http.calls import OpenAICall
from loraplex_services.gateway.http.errors import error_object
from loraplex_services.gateway.http.logprobs import TokenNames
from loraplex_services.gateway.pipeline.chat_answers import ChatAnswers
from loraplex_services.gateway.pipeline.prepared import PreparedRequest
from loraplex_services.gateway.request import TextDelta


class PromptTokenDetails(TypedDict):
    cached_tokens: int


class CompletionTokenDetails(TypedDict):
    reasoning_tokens: int


class UsageInfo(TypedDict):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: NotRequired[int]
    prompt_tokens_details: NotRequired[PromptTokenDetails]
    completion_tokens_details: NotRequired[CompletionTokenDetails]


class ChunkUsage(TypedDict, total=False):
    usage: UsageInfo | None


class PromptIds(TypedDict, total=False):
    prompt_token_ids: list[int]


class TokenIds(PromptIds, total=False):
    token_ids: list[int]


class WeightsSpan(TypedDict):
    """The adapters that computed the tokens from `start` on."""

    start: int
    length: int
    adapters: list[str]
    digests: list[str]


class WeightsField(TypedDict, total=False):
    weights: list[WeightsSpan]


class CommonFields(PromptIds):
    """The fields that every response and every chunk of one answer have."""

    id: str
    created: int
    model: str


@dataclass(frozen=True, slots=True)
class ResponseInfo:
    """The fields that all objects of one response share."""

    completion_id: str
    created_unix_s: int
    call: OpenAICall
    prepared: Sequence[PreparedRequest]
    """One per prompt; choice i*n + j belongs to prompt i."""

    def of_choice(self, index: int) -> PreparedRequest:
        """The prompt that a choice belongs to."""
        return self.prepared[index // self.prepared[0].resolved.num_choices]

    def names(self, index: int) -> TokenNames:
        """How logprobs of a choice show its tokens."""
        return TokenNames(self.of_choice(index).tokens, self.call.tokens_as_ids)

    def common_fields(self) -> CommonFields:
        """The fields of a response or a chunk that do not depend on its choices."""
        return {
            "id": self.completion_id,
            "created": self.created_unix_s,
            "model": self.call.model,
        }

    def usage(self) -> UsageInfo:
        """Token counts over all prompts and choices."""
        cached = sum(p.usage.cached_tokens for p in self.prepared)
        counts = _counts(
            sum(p.usage.prompt_tokens for p in self.prepared),
            sum(p.usage.completion_tokens for p in self.prepared),
        )
        return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}

    def answers(self) -> ChatAnswers:
        """A reader of the answers, if the call is a chat."""
        return ChatAnswers(self.of_choice, self.call.tool_use, self.call.grammar)

    def chat_usage(self, answers: ChatAnswers) -> UsageInfo:
        """The same counts, with the tokens of reasoning."""
        details: CompletionTokenDetails = {"reasoning_tokens": answers.num_thought_tokens()}
        return {**self.usage(), "completion_tokens_details": details}

    def chunk_usage(self, index: int, num_tokens: int) -> ChunkUsage:
        """The `usage` of a chunk of one choice, if it has one: with continuous_usage_stats the
        tokens of its prompt and the `num_tokens` of the choice so far, as in vLLM, otherwise
        null."""
        if not self.call.include_usage:
            return {}
        if not self.call.continuous_usage:
            return {"usage": None}
        return {"usage": _counts(self.of_choice(index).usage.prompt_tokens, num_tokens)}

    def weights(self, index: int, spans: Iterable[WeightSpan]) -> WeightsField:
        """The field of a choice that names the weights of its tokens; none for the base."""
        labels = self.of_choice(index).labels
        if not labels:
            return {}
        return {
            "weights": [
                {
                    "start": span.start,
                    "length": span.num_tokens,
                    "adapters": [labels[digest] for digest in span.digests],
                    "digests": list(span.digests),
                }
                for span in joined_spans(spans)
            ]
        }

    def headers(self) -> dict[str, str]:
        """Headers of the whole call."""
        return headers_of(self.prepared[0])


def headers_of(prepared: PreparedRequest) -> dict[str, str]:
    """Headers that name what ran: the tokenizer and the adapters, if there are any."""
    adapters = prepared.target.adapters
    named = {
        "x-loraplex-adapter": ", ".join(adapter.label for adapter in adapters),
        "x-loraplex-digest": ", ".join(adapter.digest for adapter in adapters),
        "x-loraplex-tokenizer-digest": prepared.target.tokenizer_digest(prepared.base),
    }
    return {name: value for name, value in named.items() if value}


def _counts(prompt: int, completion: int) -> UsageInfo:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


class StreamedTokens:
    """The tokens of each choice of a stream: how many there are so far, and the adapters of those
    that no chunk has contained yet."""

    def __init__(self) -> None:
        self.num_tokens: Counter[int] = Counter()
        self._spans: dict[int, list[WeightSpan]] = {}

    def add(self, text_delta: TextDelta) -> None:
        """Note the tokens of a text delta."""
        self.num_tokens[text_delta.index] += len(text_delta.token_ids)
        self._spans.setdefault(text_delta.index, []).extend(text_delta.spans)

    def take(self, index: int) -> list[WeightSpan]:
        """The spans of a choice that were not sent yet. Mutates: they count as sent."""
        return self._spans.pop(index, [])


class Formatter(ABC):
    """Turns the output of one request into the objects of one API."""

    @abstractmethod
    def chunks(self, text_delta: TextDelta) -> Sequence[Mapping[str, object]]:
        """Stream objects for a text delta; empty if it contains nothing new for this caller."""

    @abstractmethod
    def ending(self) -> Sequence[Mapping[str, object]]:
        """Stream objects that follow the last text delta."""

    def failure(self, error: LoraplexError) -> Mapping[str, object]:
        """The last stream object of an answer that fails after its beginning was sent."""
        return error_object(error)

    @abstractmethod
    def full_body(self, choices: Sequence[TextDelta]) -> Mapping[str, object]:
        """The one object of a response that is not streamed; `choices` in order of index."""


def token_id_fields(info: ResponseInfo, text_delta: TextDelta, *, with_prompt: bool) -> TokenIds:
    """Extra fields of a choice with return_token_ids."""
    if not info.call.return_token_ids:
        return {}
    fields: TokenIds = {"token_ids": list(text_delta.token_ids)}
    if with_prompt:
        fields["prompt_token_ids"] = list(info.of_choice(text_delta.index).prompt_ids)
    return fields


def prompt_id_fields(info: ResponseInfo) -> PromptIds:
    """Extra field of a response to one prompt with return_token_ids."""
    if not info.call.return_token_ids or len(info.prepared) > 1:
        return {}
    return {"prompt_token_ids": list(info.prepared[0].prompt_ids)}
