"""The HTTP app: its routes, and the path of a completion from request body to response."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

import loraplex
from loraplex.errors import LoraplexError, codes_of
from loraplex_services.common.callers import LOCAL, Caller
from loraplex_services.common.grpc.call_rates import CallRates, DelayedRefusals
from loraplex_services.common.limits import (
    CALL_BURST,
    LIST_CALLS,
    OBJECTS_PER_CALL,
    TEXT_BYTES_PER_CALL,
)
from loraplex_services.gateway.http.aliases import LOADS, UNLOADS
from loraplex_services.gateway.http.answering import Responder, json_response
from loraplex_services.gateway.http.calls import (
    OpenAICall,
    Origin,
    origin_of,
    parse_chat,
    parse_completion,
)
from loraplex_services.gateway.http.chat import ChatFormatter
from loraplex_services.gateway.http.completions import CompletionFormatter
from loraplex_services.gateway.http.errors import MESSAGES_PATH, error_body, error_headers
from loraplex_services.gateway.http.formatting import Formatter, ResponseInfo
from loraplex_services.gateway.http.guard import Guard, HostRule, authorization_of
from loraplex_services.gateway.http.json_body import body_bytes, read_json
from loraplex_services.gateway.http.models import list_models, show_model
from loraplex_services.gateway.http.openapi import OpenApiEndpoint, VersionResponse
from loraplex_services.gateway.http.sse import CHUNKS
from loraplex_services.gateway.http.token_generate import GenerateFormatter, parse_generate
from loraplex_services.gateway.metrics import REQUESTS
from loraplex_services.gateway.registry.keyring import KeyRing, require_admin, runs_all_adapters
from loraplex_services.gateway.registry.resolve import Resolver

logger = logging.getLogger(__name__)

NOT_SERVED = {
    "/v1/batches": "set LORAPLEX_OBJECTS at the gateway: batch jobs are kept in an object store",
    "/v1/messages/batches": "use /v1/batches, or send the requests with the priority 2147483647",
    "/v1/files": "set LORAPLEX_OBJECTS at the gateway: files are kept in an object store",
    "/v1/responses/compact": "send the conversation as input and ask for a summary",
    "/v1/conversations": "use previous_response_id, or send the conversation as input",
    "/v1/audio": "only text is served",
    "/v1/images": "only text is served",
    "/v1/moderations": "use /classify with an adapter that was trained for it",
    "/v1/fine_tuning": "train with PEFT and publish the adapter with `registry upload`",
    "/v1/chat/completions/render": "use /tokenize with messages",
    **dict.fromkeys(
        ("/get_world_size", "/init_weights_update_group", "/update_weights", "/collective_rpc"),
        "the base does not change; publish adapters with /v1/load_lora_adapter",
    ),
    **dict.fromkeys(("/sleep", "/wake_up"), "a worker keeps its memory; use /pause and /resume"),
    **dict.fromkeys(
        (*LOADS, *UNLOADS, "/server_info"),
        "set LORAPLEX_LORA_ROOT at the gateway, or publish adapters with `registry upload`",
    ),
    **dict.fromkeys(
        ("/", "/generate", "/generate_stream", "/completion", "/api"),
        "use /v1/completions or /v1/chat/completions, with the name of the adapter as model",
    ),
    "/abort_request": "POST the ids to /abort_requests as request_ids",
    **dict.fromkeys(("/info", "/get_model_info", "/model_info"), "use /v1/models"),
}
"""Paths that clients of other servers know, and what to do instead. Some of them are served if a
setting allows it."""

Parse = Callable[[dict[str, Any], Origin], OpenAICall]
_FORMATTERS: dict[Parse, Callable[[ResponseInfo], Formatter]] = {
    parse_completion: CompletionFormatter,
    parse_chat: ChatFormatter,
    parse_generate: GenerateFormatter,
}


@dataclass(frozen=True, slots=True)
class AppContext:
    """The parts of the gateway that the HTTP endpoints use."""

    not_ready_reason: Callable[[], str]
    """Returns "" if the gateway is ready."""
    shows_metrics: bool
    keys: KeyRing | None
    """None if callers need no key."""
    rates: CallRates = field(default_factory=CallRates)
    """Call rates of reads."""
    refusals: DelayedRefusals = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "refusals", DelayedRefusals(self.rates))

    async def caller(self, request: Request) -> Caller:
        """The caller of a request, which is in its state from then on.

        Raises: Unauthenticated, PermissionDenied, ResourceExhausted after too many wrong keys.
        """
        keys = self.keys
        if (known := getattr(request.state, "acts_for", None)) is not None:
            request.state.caller = known
            return cast(Caller, known)
        caller = LOCAL if keys is None else await keys.caller(authorization_of(request))
        request.state.caller = caller
        return caller

    async def reader(self, request: Request, num_calls: int) -> Caller:
        """The caller of a request that reads lists and reports, once it is within its tenant's
        rate. Raises as `caller`, and ResourceExhausted for too many reads."""
        caller = await self.caller(request)
        await self.rates.wait(caller, num_calls)
        return caller

    async def looked_at(self, caller: Caller, num_objects: int) -> None:
        """Charge what a call read from the object store to the rate of its tenant. Raises as
        `reader`."""
        await self.rates.wait(caller, min(num_objects // OBJECTS_PER_CALL, CALL_BURST))

    async def text_reader(self, request: Request) -> Caller:
        """The caller of a request for the tokens of its body, or for their text. A longer body
        counts as more calls. Raises as `reader`."""
        num_calls = 1 + body_bytes(request) // TEXT_BYTES_PER_CALL
        return await self.reader(request, min(num_calls, CALL_BURST))


@dataclass(frozen=True, slots=True, eq=False)
class OpenAIEndpoints:
    """OpenAI's endpoints, health and metrics on top of the pipeline."""

    responder: Responder
    resolver: Resolver
    context: AppContext

    def app(self, hosts: HostRule | None, others: Sequence[Route] = ()) -> ASGIApp:
        """The app behind its guard; `others` are routes of other endpoints."""
        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/inference/v1/generate", self.generate, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/", self.models, methods=["GET"]),
            Route("/v1/models/{ref:path}", self.model, methods=["GET"]),
            Route("/healthz", self.healthz, methods=["GET"]),
            Route("/health", self.healthz, methods=["GET"]),
            Route("/readyz", self.readyz, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            *others,
        ]
        routes.append(OpenApiEndpoint(tuple(routes)).route())
        if self.context.shows_metrics:
            routes.append(Route("/metrics", self.metrics, methods=["GET"]))
        handlers: dict[Any, Any] = {
            LoraplexError: self._on_refusal,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_disconnect,
            Exception: _on_crash,
        }
        app = Starlette(routes=routes, exception_handlers=handlers)
        return Guard(app, hosts, self.responder.collected)

    async def completions(self, request: Request) -> Any:
        """POST /v1/completions."""
        return await self._complete(request, parse_completion)

    async def chat(self, request: Request) -> Any:
        """POST /v1/chat/completions."""
        return await self._complete(request, parse_chat)

    async def generate(self, request: Request) -> Any:
        """POST /inference/v1/generate."""
        return await self._complete(request, parse_generate)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        tenant = (await self.context.reader(request, LIST_CALLS)).tenant
        return json_response(
            list_models(self.resolver.models(tenant), request.query_params, tenant)
        )

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{ref}."""
        ref, caller = request.path_params["ref"], await self.context.reader(request, 1)
        runs_all = runs_all_adapters(caller)
        model = await self.resolver.model(ref, caller.tenant, runs_all=runs_all)
        return json_response(show_model(model, ref))

    async def healthz(self, _: Request) -> Response:
        """GET /healthz."""
        return PlainTextResponse("ok\n")

    async def readyz(self, _: Request) -> Response:
        """GET /readyz."""
        reason = self.context.not_ready_reason()
        return PlainTextResponse(f"{reason or 'ok'}\n", status_code=503 if reason else 200)

    async def version(self, _: Request) -> Response:
        """GET /version, as in vLLM."""
        response: VersionResponse = {"version": loraplex.__version__}
        return json_response(response)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics; if keys are required, for admins only."""
        require_admin(await self.context.caller(request))
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    async def _on_refusal(self, request: Request, error: Exception) -> Response:
        await self.context.refusals.delay(error, getattr(request.state, "caller", None))
        return await _on_error(request, error)

    async def _complete(self, request: Request, parse: Parse) -> Any:
        caller = await self.context.caller(request)
        call = parse(await read_json(request, caller), origin_of(request, caller))
        return await self.responder.answer(
            request, call, _completion_id(call), _FORMATTERS[parse], CHUNKS
        )


def _completion_id(call: OpenAICall) -> str:
    return f"{'chatcmpl' if call.is_chat else 'cmpl'}-{call.request_id}"


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, LoraplexError), type(error)
    REQUESTS.labels("http", error.reason.lower()).inc()
    if codes_of(error).http >= 500:
        fields = {"request_id": request.state.request_id, "reason": error.reason}
        logger.warning("request failed", extra=fields)
    return Response(
        error_body(error, request.url.path),
        status_code=codes_of(error).http,
        media_type="application/json",
        headers=error_headers(error),
    )


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer unknown paths and methods."""
    assert isinstance(error, HTTPException), type(error)
    path = request.url.path
    message = f"{error.detail}: see /v1/models, /v1/completions, /v1/chat/completions"
    headers = dict(error.headers or {})
    if error.status_code == 405:
        allowed = _allowed_methods(request)
        headers["Allow"] = ", ".join(allowed)
        use = " or ".join(method for method in allowed if method != "HEAD")
        message = f"{path} does not take {request.method}: use {use}"
    is_path_unknown = error.status_code == 404 or path == "/"  # lorax-client posts to /
    for prefix, instead in NOT_SERVED.items() if is_path_unknown else ():
        if path == prefix or path.startswith(f"{prefix}/"):
            message = f"{path} is not served: {instead}"
            break
    if path.startswith(MESSAGES_PATH):
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        fault = {"type": kind, "message": message}
        body: dict[str, Any] = {"type": "error", "error": fault}
    else:
        fields = {"param": None, "code": None}
        body = {"error": {"message": message, "type": "invalid_request_error", **fields}}
    response = json_response(body, headers)
    response.status_code = error.status_code
    return response


def _allowed_methods(request: Request) -> list[str]:
    """The methods of a path, each of which may have a route of its own."""
    routes = [route for route in request.app.routes if route.path_regex.match(request.url.path)]
    return sorted({method for route in routes for method in route.methods})


async def _on_disconnect(_: Request, __: Exception) -> Response:
    """The client is gone: the 499 appears in logs only."""
    REQUESTS.labels("http", "cancelled").inc()
    return Response(status_code=499)


async def _on_crash(request: Request, error: Exception) -> Response:
    logger.error("request failed", exc_info=error, extra={"request_id": request.state.request_id})
    return await _on_error(request, LoraplexError("internal error; see the log of the gateway"))
