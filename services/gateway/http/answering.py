"""Runs one parsed request and sends its answer, complete or as a stream, for every API."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from loraplex.errors import LoraplexError
from loraplex_services.gateway.http.calls import OpenAICall
from loraplex_services.gateway.http.collected import CollectedChoice, LargeAnswers
from loraplex_services.gateway.http.formatting import Formatter, ResponseInfo
from loraplex_services.gateway.http.guard import api_key_of
from loraplex_services.gateway.http.lora_folders import LoraFolders
from loraplex_services.gateway.http.sse import (
    EventStream,
    Renamed,
    StreamFormat,
    compact_json,
    json_in_parts,
    until_gone,
)
from loraplex_services.gateway.metrics import REQUESTS
from loraplex_services.gateway.pipeline.chat_answers import ends_in_thought, with_marks
from loraplex_services.gateway.pipeline.collected_bytes import Note
from loraplex_services.gateway.pipeline.generation import Generation
from loraplex_services.gateway.pipeline.interleaving import TextDeltas, interleaved
from loraplex_services.gateway.pipeline.prepared import PreparedRequest
from loraplex_services.gateway.request import with_names
from loraplex_services.gateway.tools.call_grammar import call_grammar
from loraplex_services.gateway.tools.thought_budget import ThoughtBudget

_MAX_DELTAS_AT_ONCE = 256
"""Answers of more text deltas, and those with logprobs, are formatted in a thread. Thousands of
logprobs would stop the event loop for tenths of a second."""


class Responder:
    """The one path of generated text from the pipeline to HTTP."""

    def __init__(
        self, generation: Generation, large: LargeAnswers, folders: LoraFolders | None
    ) -> None:
        """`folders` are published when a request names them; None = there are none."""
        self._folders = folders
        self._generation = generation
        self._large = large
        self.collected = generation.collected

    async def answer(
        self,
        request: Request,
        call: OpenAICall,
        answer_id: str,
        formatter_of: Callable[[ResponseInfo], Formatter],
        stream_format: StreamFormat,
    ) -> Any:
        """An ASGI response. Raises: what `Generation.prepare` and `Generation.run` raise."""
        call = await self._adopted(request, call)

        def renamed(error: LoraplexError) -> LoraplexError:
            return with_names(error, call.field_names)

        try:
            prepared = await self._generation.prepare_all(call.calls)
            prepared = [_read_as(each, call) for each in prepared]
        except LoraplexError as error:
            raise renamed(error) from None
        info = ResponseInfo(answer_id, int(time.time()), call, prepared)
        formatter = formatter_of(info)
        text_deltas = self._text_deltas(prepared)
        if call.stream:
            chunks = _with_outcome_counted(_chunks(text_deltas, formatter))
            return EventStream(chunks, info.headers(), stream_format, renamed, formatter.failure)
        with self.collected.counted(request.state.caller) as note:
            choices = await _collected(request, text_deltas, renamed, note)
            return await self._complete(request, choices, info, formatter)

    async def _complete(
        self,
        request: Request,
        choices: Sequence[CollectedChoice],
        info: ResponseInfo,
        formatter: Formatter,
    ) -> Response:
        """The answer with all choices. A large one is formatted in a thread."""
        sampling = info.call.calls[0].sampling
        has_logprobs = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        is_large = has_logprobs or info.call.experts.start is not None
        num_deltas = sum(choice.num_deltas for choice in choices)
        if not is_large and num_deltas <= _MAX_DELTAS_AT_ONCE:
            return json_response(formatter.full_body([c.sum() for c in choices]), info.headers())

        def formatted() -> bytes:
            return json_in_parts(formatter.full_body([c.sum() for c in choices]))

        body = await self._large.formatted(request.state.caller.tenant, formatted)
        return Response(body, media_type="application/json", headers=info.headers())

    async def _adopted(self, request: Request, call: OpenAICall) -> OpenAICall:
        """The call for an adapter, if it named a folder."""
        if self._folders is None:
            return call
        caller = request.state.caller
        model = await self._folders.adopted(api_key_of(request), caller, call.model)
        return replace(call, calls=tuple(replace(each, model=model) for each in call.calls))

    def _text_deltas(self, prepared: Sequence[PreparedRequest]) -> TextDeltas:
        """Text deltas of all prompts, with choices numbered prompt-major."""
        if len(prepared) == 1:
            return self._generation.run(prepared[0])
        count = prepared[0].resolved.num_choices
        runs = [
            _shifted(self._generation.run(each), index * count)
            for index, each in enumerate(prepared)
        ]
        return interleaved(runs)


def _read_as(prepared: PreparedRequest, call: OpenAICall) -> PreparedRequest:
    """The request whose answer is read for calls and reasoning, with a grammar that constrains
    calls to their schemas and the reasoning to its budget. Raises: InvalidRequest, Unsupported."""
    offers_tools = bool(call.tool_use.tools)
    prepared = with_marks(prepared, is_chat=call.is_chat, offers_tools=offers_tools)
    budget = None
    if (num_tokens := call.thinking_budget) is not None:
        if num_tokens < prepared.resolved.sampling.max_tokens:
            budget = ThoughtBudget(num_tokens, prepared.base.eos_token_ids)
    if not offers_tools and budget is None:
        return prepared
    grammar = call_grammar(
        prepared.style,
        call.tool_use,
        call.grammar,
        prepared.base_token,
        is_thinking=prepared.style.thinks and ends_in_thought(prepared),
        budget=budget,
    )
    return prepared.kept_to(grammar)


def json_response(body: Mapping[str, Any], headers: dict[str, str] | None = None) -> Response:
    """A body as compact UTF-8."""
    return Response(compact_json(body).encode(), media_type="application/json", headers=headers)


async def _shifted(text_deltas: TextDeltas, by: int) -> TextDeltas:
    async with aclosing(text_deltas):
        async for text_delta in text_deltas:
            yield replace(text_delta, index=text_delta.index + by)


async def _chunks(
    text_deltas: TextDeltas, formatter: Formatter
) -> AsyncGenerator[Mapping[str, Any]]:
    async with aclosing(text_deltas):
        async for text_delta in text_deltas:
            for chunk in formatter.chunks(text_delta):
                yield chunk
    for chunk in formatter.ending():
        yield chunk


async def _with_outcome_counted(
    chunks: AsyncGenerator[Mapping[str, Any]],
) -> AsyncGenerator[Mapping[str, Any]]:
    """Count the outcome of a stream. An error is counted where it is answered."""
    outcome = "cancelled"
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk
        outcome = "ok"
    except Exception:
        outcome = ""
        raise
    finally:
        if outcome:
            REQUESTS.labels("http", outcome).inc()


async def _collected(
    request: Request,
    text_deltas: TextDeltas,
    renamed: Renamed,
    note: Note,
) -> list[CollectedChoice]:
    """All choices in order. Ends early if the client leaves."""
    choices: dict[int, CollectedChoice] = {}

    async def collect() -> None:
        async with aclosing(text_deltas):
            async for text_delta in text_deltas:
                note(text_delta)
                if (choice := choices.get(text_delta.index)) is not None:
                    choice.add(text_delta)
                else:
                    choices[text_delta.index] = CollectedChoice(text_delta)

    try:
        await until_gone(request.receive, collect())
    except LoraplexError as error:
        raise renamed(error) from None
    REQUESTS.labels("http", "ok").inc()
    return [choices[index] for index in sorted(choices)]
