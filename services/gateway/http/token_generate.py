"""POST /inference/v1/generate: takes and returns token ids, as vLLM's training clients expect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NotRequired, TypedDict

from loraplex.api.output import TokenLogprob
from loraplex.api.request import Prompt, TokenPrompt
from loraplex.errors import InvalidRequest, Unsupported
from loraplex_services.gateway.http.body import Body, bad_type
from loraplex_services.gateway.http.calls import OpenAICall, Origin, call_of, read_sampling
from loraplex_services.gateway.http.formatting import (
    Formatter,
    ResponseInfo,
    UsageInfo,
    WeightsField,
)
from loraplex_services.gateway.http.logprobs import (
    PromptLogprobs,
    Token,
    finite,
    prompt_logprob_maps,
)
from loraplex_services.gateway.http.routed_experts import (
    RoutedField,
    read_experts_request,
    routed_field,
)
from loraplex_services.gateway.request import TextDelta

_PREFIX = "sampling_params."
_OF_VLLM_S_ENGINE = ("output_kind", "detokenize", "flat_logprobs", "skip_clone")
"""Sampling parameters that only say how vLLM's engine hands tokens to its own server. The answer is
the same for every value: token ids without text."""


def parse_generate(fields: dict[str, Any], origin: Origin) -> OpenAICall:
    """Body of /inference/v1/generate. Raises: InvalidRequest, Unsupported."""
    body = Body(fields)
    ids = body.ids("token_ids")
    if not ids:
        raise InvalidRequest.field("token_ids", "", "send at least one token id")
    params = body.raw("sampling_params", {"type": "object"})
    if not isinstance(params, dict):
        raise bad_type("sampling_params", params, "an object")
    options = Body(params, _PREFIX)
    for name in _OF_VLLM_S_ENGINE:
        options.raw(name)
    sampling = read_sampling(
        options, max_tokens=options.integer("max_tokens"), logprobs=options.count("logprobs")
    )
    if sampling.echo:
        raise Unsupported.field(_PREFIX + "echo", True, "prompt_logprobs cover the prompt")
    experts = read_experts_request(options)
    options.finish()
    prompts: list[Prompt] = [TokenPrompt(ids)]
    call = call_of(body, fields, origin, prompts, sampling, is_chat=False, experts=experts)
    names = {name: _PREFIX + name for name in params}
    return replace(call, field_names={**call.field_names, **names, "prompt": "token_ids"})


class IdLogprob(Token):
    """A token with its id in the two forms that versions of vLLM have used."""

    token_id: int


class IdLogprobEntry(IdLogprob):
    top_logprobs: list[IdLogprob]


class IdLogprobs(TypedDict):
    content: list[IdLogprobEntry]


class TokenChoice(WeightsField, RoutedField):
    index: int
    logprobs: IdLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int]


class Generated(TypedDict):
    request_id: str
    model: str
    choices: list[TokenChoice]
    prompt_logprobs: NotRequired[PromptLogprobs | None]
    usage: NotRequired[UsageInfo]


class GenerateFormatter(Formatter):
    """Formats the output of one request, streamed or complete."""

    def __init__(self, info: ResponseInfo) -> None:
        self._info = info

    def chunks(self, text_delta: TextDelta) -> list[Generated]:
        if not text_delta.token_ids and text_delta.finish_reason is None:
            return []
        return [self._body([self._choice(text_delta)])]

    def ending(self) -> list[Generated]:
        if not self._info.call.include_usage:
            return []
        return [{**self._body([]), "usage": self._info.usage()}]

    def full_body(self, choices: Sequence[TextDelta]) -> Generated:
        prompt = prompt_logprob_maps(self._info.of_choice(0), choices[0].prompt_logprobs)
        return {
            **self._body([self._choice(choice) for choice in choices]),
            "prompt_logprobs": prompt,
            "usage": self._info.usage(),
        }

    def _body(self, choices: list[TokenChoice]) -> Generated:
        return {
            "request_id": self._info.prepared[0].call.request_id,
            "model": self._info.call.model,
            "choices": choices,
        }

    def _choice(self, text_delta: TextDelta) -> TokenChoice:
        num_top = self._info.of_choice(text_delta.index).call.sampling.logprobs
        entries = [_entry(entry) for entry in text_delta.logprobs]
        return {
            "index": text_delta.index,
            "logprobs": None if num_top is None else {"content": entries},
            "finish_reason": text_delta.finish_reason,
            "stop_reason": text_delta.stop_reason,
            "token_ids": list(text_delta.token_ids),
            **self._info.weights(text_delta.index, text_delta.spans),
            **routed_field(self._info.call.experts, text_delta.routed_experts),
        }


def _entry(entry: TokenLogprob) -> IdLogprobEntry:
    top = [_token(token_id, logprob) for token_id, logprob in entry.top]
    return {**_token(entry.token_id, entry.logprob), "top_logprobs": top}


def _token(token_id: int, logprob: float) -> IdLogprob:
    name = f"token_id:{token_id}"
    return {"token": name, "token_id": token_id, "logprob": finite(logprob), "bytes": None}
