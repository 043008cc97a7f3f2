"""InferenceService of the gateway."""

from __future__ import annotations

import asyncio
import secrets
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractContextManager, aclosing, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import grpc

from loraplex.api.fields import same_fields
from loraplex.api.request import ChatPrompt, GenerateRequest
from loraplex.api.request_wire import generate_request_from_proto
from loraplex.api.wire import (
    finish_reason_to_proto,
    logprob_to_proto,
    routed_experts_to_proto,
    to_message,
)
from loraplex.errors import InvalidRequest, LoraplexError
from loraplex.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from loraplex_services.common.callers import current_caller
from loraplex_services.common.grpc import server as grpc_server
from loraplex_services.gateway.grpc.vectors import (
    embed_calls,
    embed_response,
    field_names,
    score_calls,
    score_response,
)
from loraplex_services.gateway.metrics import REQUESTS
from loraplex_services.gateway.pipeline.chat_answers import ChatAnswers, with_marks
from loraplex_services.gateway.pipeline.collected_bytes import Note
from loraplex_services.gateway.pipeline.embedding import Pooled, embed_all
from loraplex_services.gateway.pipeline.generation import Generation
from loraplex_services.gateway.pipeline.prepared import PreparedRequest
from loraplex_services.gateway.pipeline.scoring import score_all
from loraplex_services.gateway.registry.keyring import runs_all_adapters
from loraplex_services.gateway.registry.resolve import Resolver, model_id
from loraplex_services.gateway.registry.snapshot import Version
from loraplex_services.gateway.request import (
    GenerateCall,
    ServedModel,
    TextDelta,
    beginning_hash,
    with_names,
)
from loraplex_services.gateway.tools.tool_use import ToolUse

Context = grpc.aio.ServicerContext[Any, Any]

T = TypeVar("T")
NAME = "loraplex.v1.InferenceService"
DEFAULT_PAGE = 100
MAX_PAGE = 1000


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """InferenceService on top of the pipeline."""

    def __init__(self, generation: Generation, resolver: Resolver) -> None:
        self._generation = generation
        self._resolver = resolver

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[inference_pb2.GenerateResponse]:
        """Stream the output of one prompt; an error ends the call with its status."""
        outcome = "cancelled"
        try:
            call = call_from_wire(request, context.time_remaining(), _traceparent(context))
            is_chat = isinstance(call.prompt, ChatPrompt)
            prepared = with_marks(await self._generation.prepare(call), is_chat=is_chat)
            writer = ResponseWriter(prepared)
            async with aclosing(self._generation.run(prepared)) as text_deltas:
                async for text_delta in text_deltas:
                    if text_delta.prompt_logprobs is None:
                        message = writer.message(text_delta)
                    else:  # up to 262,144, which would stop the event loop for a second
                        message = await asyncio.to_thread(writer.message, text_delta)
                    if message is not None:
                        yield message
            outcome = "ok"
        except LoraplexError as error:
            outcome = error.reason.lower()
            raise
        finally:
            REQUESTS.labels("grpc", outcome).inc()

    async def Embed(
        self, request: inference_pb2.EmbedRequest, context: Context
    ) -> inference_pb2.EmbedResponse:
        """One vector per input."""
        calls, finish = embed_calls(request, context.time_remaining(), _traceparent(context))
        with self._collected() as note:
            async with _counted(field_names(request)):
                pooled = await embed_all(self._generation, calls, finish, note)
                return await _made(pooled, partial(embed_response, pooled))

    async def Score(
        self, request: inference_pb2.ScoreRequest, context: Context
    ) -> inference_pb2.ScoreResponse:
        """The outputs of an adapter's head, per input."""
        calls = score_calls(request, context.time_remaining(), _traceparent(context))
        with self._collected() as note:
            async with _counted(field_names(request)):
                pooled, scores = await score_all(self._generation, calls, note)
                return await _made(pooled, partial(score_response, pooled, scores))

    def _collected(self) -> AbstractContextManager[Note]:
        return self._generation.collected.counted(current_caller.get())

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """Bases first, then adapters; a page token is the last id of the page before, whose adapter
        may have been deleted since."""
        size = request.page_size or DEFAULT_PAGE
        if size > MAX_PAGE:
            raise InvalidRequest.field("page_size", size, f"must be at most {MAX_PAGE}")
        tenant = current_caller.get().tenant
        models = list(self._resolver.models(tenant))
        ids = [model_id(model, tenant) for model in models]
        last, num_bases = request.page_token, len(self._resolver.bases())
        start = _after(last, ids[:num_bases], ids[num_bases:]) if last else 0
        page = [_model(model, tenant) for model in models[start : start + size]]
        more = start + size < len(models)
        return inference_pb2.ListModelsResponse(
            models=page, next_page_token=page[-1].id if page and more else ""
        )


@asynccontextmanager
async def _counted(field_names: Mapping[str, str]) -> AsyncGenerator[None]:
    """Count the outcome of a unary call, and name fields as its caller does in errors."""
    try:
        yield
    except LoraplexError as error:
        REQUESTS.labels("grpc", error.reason.lower()).inc()
        raise with_names(error, field_names) from None
    REQUESTS.labels("grpc", "ok").inc()


class ResponseWriter:
    """Converts the text deltas of one request to messages."""

    def __init__(self, prepared: PreparedRequest) -> None:
        self._prepared = prepared
        grammar = prepared.call.sampling.grammar
        is_chat = isinstance(prepared.call.prompt, ChatPrompt)
        self._answers = ChatAnswers(lambda _: prepared, ToolUse(), grammar) if is_chat else None
        self._begun: set[int] = set()
        self._digests: dict[int, tuple[str, ...]] = {}
        """The adapters that computed the last tokens of each choice."""
        self._num_finished = 0

    def message(self, text_delta: TextDelta) -> inference_pb2.GenerateResponse | None:
        """The message for a text delta; None if it contains nothing."""
        is_first = text_delta.index not in self._begun
        digests = text_delta.spans[0].digests if text_delta.spans else ()
        is_other = self._digests.get(text_delta.index) != digests
        text, reasoning = self._read(text_delta)
        has_text = bool(text or reasoning)
        if not (is_first or has_text or text_delta.token_ids or text_delta.finish_reason):
            return None
        message = inference_pb2.GenerateResponse(
            request_id=self._prepared.call.request_id,
            index=text_delta.index,
            text=text,
            reasoning=reasoning,
            token_ids=text_delta.token_ids,
            logprobs=[logprob_to_proto(entry) for entry in text_delta.logprobs],
            digests=digests,
        )
        if text_delta.routed_experts is not None:
            message.routed_experts.CopyFrom(routed_experts_to_proto(text_delta.routed_experts))
        if text_delta.spans and is_other:
            self._digests[text_delta.index] = digests
            served_by = self._prepared.served_by(text_delta.worker_id, digests)
            message.served_by.CopyFrom(to_message(served_by, inference_pb2.ServedBy))
        if is_first:
            self._begin(message, text_delta)
        if text_delta.finish_reason is not None:
            self._finish(message, text_delta)
        return message

    def _read(self, text_delta: TextDelta) -> tuple[str, str]:
        """New content and reasoning."""
        if self._answers is None:
            return text_delta.text, ""
        delta = self._answers.read(text_delta)
        return delta.content, delta.reasoning

    def _begin(self, message: inference_pb2.GenerateResponse, text_delta: TextDelta) -> None:
        """Mutates: message."""
        prepared = self._prepared
        self._begun.add(text_delta.index)
        if not message.HasField("served_by"):
            served_by = prepared.served_by(text_delta.worker_id)
            message.served_by.CopyFrom(to_message(served_by, inference_pb2.ServedBy))
        if prepared.resolved.echo:
            message.text = prepared.prompt_text() + message.text
        if text_delta.index == 0:
            message.prompt_token_ids.extend(prepared.prompt_ids)
            if text_delta.prompt_logprobs is not None:
                entries = text_delta.prompt_logprobs.entries()
                message.prompt_logprobs.extend(map(logprob_to_proto, entries))

    def _finish(self, message: inference_pb2.GenerateResponse, text_delta: TextDelta) -> None:
        """Mutates: message."""
        message.finish_reason = finish_reason_to_proto(text_delta.finish_reason)
        if text_delta.stop_reason is not None:
            message.stop_reason = str(text_delta.stop_reason)
        if text_delta.timings is not None:
            message.timings.CopyFrom(to_message(text_delta.timings, common_pb2.Timings))
        self._num_finished += 1
        if self._num_finished == self._prepared.resolved.num_choices:
            if self._answers is not None:
                self._prepared.usage.reasoning_tokens = self._answers.num_thought_tokens()
            message.usage.CopyFrom(to_message(self._prepared.usage, common_pb2.Usage))


def call_from_wire(
    request: inference_pb2.GenerateRequest, timeout_s: float | None, trace: str
) -> GenerateCall:
    """Convert a request of the current caller. Raises: InvalidRequest without a prompt."""
    asked = generate_request_from_proto(request)
    values = same_fields(asked, GenerateRequest)
    values["request_id"] = asked.request_id or secrets.token_hex(12)
    values["split_key"] = asked.split_key or beginning_hash(asked.prompt)
    caller = current_caller.get()
    values |= {"tenant": caller.tenant, "runs_all": runs_all_adapters(caller)}
    return GenerateCall(**values, timeout_s=timeout_s, trace=trace)


def _after(last: str, bases: list[str], adapters: list[str]) -> int:
    """The index of what follows the model `last` in a list of bases and then adapters."""
    if last in bases:
        return bases.index(last) + 1
    return len(bases) + bisect_right(adapters, _order(last), key=_order)


def _order(adapter_id: str) -> tuple[bool, str, str]:
    """A key for the order of adapters: own ones, then those of others by tenant and name."""
    owner, slash, name = adapter_id.rpartition("/")
    return bool(slash), owner, name.lower()


def _model(model: ServedModel | Version, tenant: str) -> inference_pb2.Model:
    shown = inference_pb2.Model(id=model_id(model, tenant), base_id=model.base_id)
    if isinstance(model, ServedModel):
        shown.max_model_len = model.max_model_len
    else:
        shown.digest = model.digest
    shown.created_unix_s = int(model.created_unix_s)
    return shown


async def _made(pooled: Pooled, work: Callable[[], T]) -> T:
    """Run `work` on vectors, in a thread if there are many."""
    return await asyncio.to_thread(work) if pooled.is_large else work()


def _traceparent(context: Context) -> str:
    metadata = context.invocation_metadata() or ()
    return next((str(value) for key, value in metadata if key == "traceparent"), "")


def service(generation: Generation, resolver: Resolver) -> grpc_server.Service:
    """The service for `grpc_server.start`."""
    add = inference_pb2_grpc.add_InferenceServiceServicer_to_server
    return add, InferenceServicer(generation, resolver), NAME
