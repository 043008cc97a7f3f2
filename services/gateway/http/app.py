"""The HTTP app: its routes, and one completion from request body to response."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

import loraplex
from loraplex.errors import LoraplexError, ResourceExhausted, codes_of
from loraplex_services.common.call_rates import CallRates, DelayedRefusals
from loraplex_services.common.callers import LOCAL, Caller
from loraplex_services.common.limits import LIST_CALLS
from loraplex_services.gateway.http.calls import OpenAICall, Origin, parse_chat, parse_completion
from loraplex_services.gateway.http.chat import ChatFormatter, ends_in_thought
from loraplex_services.gateway.http.classify import classes_body, parse_classify
from loraplex_services.gateway.http.completions import CompletionFormatter
from loraplex_services.gateway.http.embeddings import embeddings_body, parse_embeddings
from loraplex_services.gateway.http.errors import error_body, error_headers
from loraplex_services.gateway.http.formatting import (
    CollectedChoice,
    Formatter,
    ResponseInfo,
    headers_of,
)
from loraplex_services.gateway.http.guard import Guard, HostRule
from loraplex_services.gateway.http.json_body import read_json
from loraplex_services.gateway.http.models import list_models, show_model
from loraplex_services.gateway.http.sse import EventStream, until_gone
from loraplex_services.gateway.metrics import REQUESTS
from loraplex_services.gateway.pipeline.embedding import embed_all
from loraplex_services.gateway.pipeline.generation import Generation, TextDeltas, interleaved
from loraplex_services.gateway.pipeline.prepared import PreparedRequest
from loraplex_services.gateway.pipeline.scoring import score_all
from loraplex_services.gateway.registry.keyring import KeyRing, require_admin
from loraplex_services.gateway.registry.resolve import Resolver
from loraplex_services.gateway.request import TextDelta, with_names
from loraplex_services.gateway.text.chat_style import overridden
from loraplex_services.gateway.tools.call_grammar import call_grammar

logger = logging.getLogger(__name__)

Parse = Callable[[dict[str, Any], Origin], OpenAICall]


@dataclass(frozen=True, slots=True)
class AppContext:
    """The parts of the gateway that the HTTP endpoints use."""

    not_ready_reason: Callable[[], str]
    """Returns "" if the gateway is ready."""
    shows_metrics: bool
    keys: KeyRing | None
    """None if callers need no key."""
    tool_format: str = "auto"
    reasoning: str = "auto"
    """How answers are parsed; "auto" = as each base's chat template shows."""
    rates: CallRates = field(default_factory=CallRates)
    """Of reads."""
    refusals: DelayedRefusals = field(default_factory=DelayedRefusals)

    async def caller(self, request: Request) -> Caller:
        """The caller of a request.

        Raises: Unauthenticated, PermissionDenied, ResourceExhausted after too many wrong keys.
        """
        if self.keys is None:
            return LOCAL
        try:
            return await self.keys.caller(request.headers.get("authorization", ""))
        except ResourceExhausted as error:
            await self.refusals.delay(error)
            raise

    async def reader(self, request: Request, num_calls: int) -> Caller:
        """The caller of a request that reads lists and reports, once it is within its tenant's
        rate. Raises as `caller`, and ResourceExhausted for too many reads."""
        caller = await self.caller(request)
        try:
            await self.rates.wait(caller, num_calls)
        except ResourceExhausted as error:
            await self.refusals.delay(error)
            raise
        return caller


class OpenAIEndpoints:
    """OpenAI's endpoints, health and metrics on top of the pipeline."""

    def __init__(self, generation: Generation, resolver: Resolver, context: AppContext) -> None:
        self._generation = generation
        self._resolver = resolver
        self._context = context

    def app(self, hosts: HostRule | None, others: Sequence[Route] = ()) -> ASGIApp:
        """The app behind its guard; `others` are routes of other endpoints."""
        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/classify", self.classify, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/", self.models, methods=["GET"]),
            Route("/v1/models/{ref:path}", self.model, methods=["GET"]),
            Route("/healthz", self.healthz, methods=["GET"]),
            Route("/health", self.healthz, methods=["GET"]),
            Route("/readyz", self.readyz, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            *others,
        ]
        if self._context.shows_metrics:
            routes.append(Route("/metrics", self.metrics, methods=["GET"]))
        handlers: dict[Any, Any] = {
            LoraplexError: _on_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_disconnect,
            Exception: _on_crash,
        }
        return Guard(Starlette(routes=routes, exception_handlers=handlers), hosts)

    async def completions(self, request: Request) -> Any:
        """POST /v1/completions."""
        return await self._complete(request, parse_completion)

    async def chat(self, request: Request) -> Any:
        """POST /v1/chat/completions."""
        return await self._complete(request, parse_chat)

    async def embeddings(self, request: Request) -> Any:
        """POST /v1/embeddings."""
        caller = await self._context.caller(request)
        call = parse_embeddings(
            await read_json(request, caller.tenant), _origin(request, caller.tenant)
        )
        try:
            embed = embed_all(self._generation, call.calls, call.finish)
            pooled = await until_gone(request.receive, embed)
        except LoraplexError as error:
            raise with_names(error, call.field_names) from None
        REQUESTS.labels("http", "ok").inc()
        return _json(embeddings_body(call, pooled), headers_of(pooled.prepared[0].target))

    async def classify(self, request: Request) -> Any:
        """POST /classify."""
        caller = await self._context.caller(request)
        call = parse_classify(
            await read_json(request, caller.tenant), _origin(request, caller.tenant)
        )
        try:
            score = score_all(self._generation, call.calls)
            pooled, scores = await until_gone(request.receive, score)
        except LoraplexError as error:
            raise with_names(error, call.field_names) from None
        REQUESTS.labels("http", "ok").inc()
        body = classes_body(call, request.state.request_id, pooled, scores)
        return _json(body, headers_of(pooled.prepared[0].target))

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        tenant = (await self._context.reader(request, LIST_CALLS)).tenant
        return _json(list_models(self._resolver.models(tenant), request.query_params, tenant))

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{ref}."""
        ref, tenant = request.path_params["ref"], (await self._context.reader(request, 1)).tenant
        return _json(show_model(await self._resolver.model(ref, tenant), ref))

    async def healthz(self, _: Request) -> Response:
        """GET /healthz."""
        return PlainTextResponse("ok\n")

    async def readyz(self, _: Request) -> Response:
        """GET /readyz."""
        reason = self._context.not_ready_reason()
        return PlainTextResponse(f"{reason or 'ok'}\n", status_code=503 if reason else 200)

    async def version(self, _: Request) -> Response:
        """GET /version, as in vLLM."""
        return _json({"version": loraplex.__version__})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics; if keys are required, for admins only."""
        require_admin(await self._context.caller(request))
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    async def _complete(self, request: Request, parse: Parse) -> Any:
        caller = await self._context.caller(request)
        call = parse(await read_json(request, caller.tenant), _origin(request, caller.tenant))
        try:
            prepared = await self._generation.prepare_all(call.calls)
            prepared = [self._styled(each, call) for each in prepared]
        except LoraplexError as error:
            raise with_names(error, call.field_names) from None
        info = ResponseInfo(_completion_id(call, request), int(time.time()), call, prepared)
        formatter = ChatFormatter(info) if call.is_chat else CompletionFormatter(info)
        text_deltas = self._text_deltas(prepared)
        if call.stream:
            chunks = _with_outcome_counted(_chunks(text_deltas, formatter, call.include_usage))
            return EventStream(
                chunks, info.headers(), lambda error: with_names(error, call.field_names)
            )
        return await _complete_response(request, text_deltas, info, formatter)

    def _styled(self, prepared: PreparedRequest, call: OpenAICall) -> PreparedRequest:
        """Apply the settings for tool calls and reasoning; constrain calls to their schemas.

        If marks of tool calls are special tokens, the text keeps them. Raises: InvalidRequest.
        """
        style = overridden(prepared.style, self._context.tool_format, self._context.reasoning)
        resolved = prepared.resolved
        if call.tool_use.tools and style.marks_are_special:
            text = replace(resolved.text, skip_special=False)
            resolved = replace(resolved, text=text)
        prepared = replace(prepared, style=style, resolved=resolved)
        if not call.tool_use.tools:
            return prepared
        grammar = call_grammar(
            style,
            call.tool_use,
            call.grammar,
            prepared.tokens.added_id,
            is_thinking=style.thinks and ends_in_thought(prepared),
        )
        return prepared.kept_to(grammar)

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


async def _shifted(text_deltas: TextDeltas, by: int) -> TextDeltas:
    async with aclosing(text_deltas):
        async for text_delta in text_deltas:
            yield replace(text_delta, index=text_delta.index + by)


async def _chunks(
    text_deltas: TextDeltas, formatter: Formatter, include_usage: bool
) -> AsyncGenerator[bytes]:
    async with aclosing(text_deltas):
        async for text_delta in text_deltas:
            for chunk in formatter.chunks(text_delta):
                yield _encoded(chunk)
    if include_usage:
        yield _encoded(formatter.usage_chunk())


async def _with_outcome_counted(chunks: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Count the outcome of a stream."""
    outcome = "cancelled"
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk
        outcome = "ok"
    except LoraplexError as error:
        outcome = error.reason.lower()
        raise
    finally:
        REQUESTS.labels("http", outcome).inc()


async def _complete_response(
    request: Request, text_deltas: TextDeltas, info: ResponseInfo, formatter: Formatter
) -> Response:
    choices: dict[int, CollectedChoice] = {}

    async def collect() -> None:
        async with aclosing(text_deltas):
            async for text_delta in text_deltas:
                choices.setdefault(text_delta.index, CollectedChoice()).text_deltas.append(
                    text_delta
                )

    try:
        await until_gone(request.receive, collect())
    except LoraplexError as error:
        raise with_names(error, info.call.field_names) from None
    summed: list[TextDelta] = [choices[index].sum() for index in sorted(choices)]
    REQUESTS.labels("http", "ok").inc()
    return _json(formatter.full_body(summed), info.headers())


def _origin(request: Request, tenant: str) -> Origin:
    return Origin(
        request_id=request.state.request_id,
        tenant=tenant,
        split_key=request.headers.get("x-loraplex-split-key", ""),
        trace=request.headers.get("traceparent", ""),
    )


def _completion_id(call: OpenAICall, request: Request) -> str:
    return f"{'chatcmpl' if call.is_chat else 'cmpl'}-{request.state.request_id}"


def _encoded(body: dict[str, Any]) -> bytes:
    """JSON, which has no NaN. Raises: LoraplexError if a number is not finite."""
    try:
        text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        raise LoraplexError(
            "the answer has a number that is not finite: the adapter's weights are too large",
            reason="NOT_FINITE",
        ) from None
    return text.encode()


def _json(body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(_encoded(body), media_type="application/json", headers=headers)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, LoraplexError), type(error)
    REQUESTS.labels("http", error.reason.lower()).inc()
    if codes_of(error).http >= 500:
        fields = {"request_id": request.state.request_id, "reason": error.reason}
        logger.warning("request failed", extra=fields)
    return Response(
        error_body(error),
        status_code=codes_of(error).http,
        media_type="application/json",
        headers=error_headers(error),
    )


async def _on_http_error(_: Request, error: Exception) -> Response:
    """Answer unknown paths and methods."""
    assert isinstance(error, HTTPException), type(error)
    body = {
        "error": {
            "message": f"{error.detail}: see /v1/models, /v1/completions, /v1/chat/completions",
            "type": "invalid_request_error",
            "param": None,
            "code": None,
        }
    }
    return Response(
        _encoded(body), error.status_code, dict(error.headers or {}), "application/json"
    )


async def _on_disconnect(_: Request, __: Exception) -> Response:
    """The client is gone: the 499 appears in logs only."""
    REQUESTS.labels("http", "cancelled").inc()
    return Response(status_code=499)


async def _on_crash(request: Request, error: Exception) -> Response:
    logger.error("request failed", exc_info=error, extra={"request_id": request.state.request_id})
    return await _on_error(request, LoraplexError("internal error; see the log of the gateway"))
