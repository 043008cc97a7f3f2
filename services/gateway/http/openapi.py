"""GET /openapi.json: generates the document of all endpoints from the code that serves them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import loraplex
from loraplex_services.common.callers import LOCAL
from loraplex_services.common.limits import FILE_LIFETIME_S, NumberLimits
from loraplex_services.gateway.http.aborts import Aborted, parse_abort
from loraplex_services.gateway.http.aliases import ServerInfo, parse_load, parse_unload
from loraplex_services.gateway.http.answering import json_response
from loraplex_services.gateway.http.calls import Origin, parse_chat, parse_completion
from loraplex_services.gateway.http.chat import Chat, ChatChunk
from loraplex_services.gateway.http.classify import Classes, parse_classify
from loraplex_services.gateway.http.completions import CompletionResponse
from loraplex_services.gateway.http.embeddings import EmbeddingResponse, parse_embeddings
from loraplex_services.gateway.http.errors import Error
from loraplex_services.gateway.http.messages.parse import parse_messages
from loraplex_services.gateway.http.models import ModelCard
from loraplex_services.gateway.http.pages import Page
from loraplex_services.gateway.http.ranking import Ranking, ScoreList, parse_rerank, parse_score
from loraplex_services.gateway.http.responses.parse import parse_responses
from loraplex_services.gateway.http.schemas import Parse, request_schema, response_schema
from loraplex_services.gateway.http.stored_objects import (
    BatchObject,
    DeletedFile,
    FileObject,
    parse_batch,
)
from loraplex_services.gateway.http.token_generate import Generated, parse_generate
from loraplex_services.gateway.http.tokenize import (
    DetokenizeResponse,
    TokenizeResponse,
    TokenizerInfo,
    parse_detokenize,
    parse_tokenize,
)

_ORIGIN = Origin("openapi", "default", "", "")
_CONSOLE = ("/", "/console")


class VersionResponse(TypedDict):
    version: str


@dataclass(frozen=True, slots=True)
class _Body:
    """A body that a POST takes: its parser, and examples that reach all that it reads."""

    parse: Parse
    examples: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Answer:
    """The type of a response, and of a stream's events."""

    whole: Any
    event: Any = None


def _call(parse: Callable[..., object], *examples: dict[str, Any]) -> _Body:
    return _Body(lambda fields: parse(fields, _ORIGIN), examples)


def _range(limits: NumberLimits) -> dict[str, float]:
    return {"minimum": limits.least, "maximum": limits.most}


_FUNCTION = {"name": "f", "description": "", "parameters": {"type": "object"}}
_COMMON = {
    "model": "m",
    "stream": True,
    "stream_options": {"include_usage": True},
    "adapters": [{"ref": "a", "weight": 1.0}],
}
_USER = {"role": "user", "content": "hello"}
_INPUT = {"model": "m", "input": "hello"}
_MESSAGES = {"model": "m", "messages": [_USER]}
_BODIES: Mapping[str, _Body] = {
    "/v1/completions": _call(
        parse_completion, {**_COMMON, "prompt": "hello"}, {"model": "m", "prompt": "hello"}
    ),
    "/v1/chat/completions": _call(
        parse_chat,
        {
            **_COMMON,
            "messages": [_USER],
            "tools": [{"type": "function", "function": _FUNCTION}],
        },
        {**_MESSAGES, "structured_outputs": {"regex": "a"}},
    ),
    "/inference/v1/generate": _call(
        parse_generate,
        {**_COMMON, "token_ids": [1], "sampling_params": {}},
        {"model": "m", "token_ids": [1], "sampling_params": {}},
    ),
    "/v1/embeddings": _call(parse_embeddings, _INPUT, _MESSAGES),
    "/classify": _call(parse_classify, _INPUT, _MESSAGES),
    "/v1/score": _Body(
        parse_score,
        [
            {"model": "m", "text_1": "a", "text_2": "b"},
            {"model": "m", "queries": "a", "documents": "b"},
        ],
    ),
    "/v1/rerank": _Body(parse_rerank, [{"model": "m", "query": "a", "documents": ["b"]}]),
    "/tokenize": _Body(parse_tokenize, [{"prompt": "a"}, {"messages": [_USER]}]),
    "/detokenize": _Body(parse_detokenize, [{"tokens": [1]}]),
    "/v1/responses": _call(
        parse_responses,
        _INPUT,
        {
            **_COMMON,
            "input": [{**_USER, "type": "message"}],
            "tools": [{"type": "function", **_FUNCTION}],
            "tool_choice": {"type": "function", "name": "f"},
            "text": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
            "reasoning": {"effort": "low"},
        },
    ),
    "/v1/messages": _call(
        parse_messages,
        {
            "model": "m",
            "max_tokens": 8,
            "system": "s",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "disabled"},
            "metadata": {"user_id": "u"},
        },
        {
            "model": "m",
            "max_tokens": 8,
            "messages": [_USER],
            "output_config": {
                "effort": "low",
                "format": {"type": "json_schema", "schema": {"type": "object"}},
            },
            "thinking": {"type": "enabled", "budget_tokens": 8},
        },
    ),
    "/v1/batches": _Body(
        lambda fields: parse_batch(fields, LOCAL),
        [
            {
                "input_file_id": "file-1",
                "endpoint": "/v1/completions",
                "completion_window": "24h",
                "metadata": {"a": "b"},
                "output_expires_after": {"anchor": "created_at", "seconds": 3600},
            }
        ],
    ),
    "/abort_requests": _Body(parse_abort, [{"request_ids": ["a"]}]),
    "/v1/load_lora_adapter": _Body(parse_load, [{"lora_name": "a", "lora_path": "p"}]),
    "/v1/unload_lora_adapter": _Body(parse_unload, [{"lora_name": "a"}]),
}
_SAME: Mapping[str, str] = {
    "/score": "/v1/score",
    "/rerank": "/v1/rerank",
    "/v2/rerank": "/v1/rerank",
    "/v1/responses/input_tokens": "/v1/responses",
    "/load_lora_adapter": "/v1/load_lora_adapter",
    "/skyrl/v1/load_lora_adapter": "/v1/load_lora_adapter",
    "/unload_lora_adapter": "/v1/unload_lora_adapter",
    "/inference/v1/abort_requests": "/abort_requests",
}
"""Paths with the body of another one."""

_FORMS: Mapping[str, dict[str, Any]] = {
    "/v1/files": {
        "type": "object",
        "properties": {
            "file": {"type": "string", "contentMediaType": "application/octet-stream"},
            "purpose": {"const": "batch"},
            "expires_after[anchor]": {"const": "created_at"},
            "expires_after[seconds]": {"type": "integer", **_range(FILE_LIFETIME_S)},
        },
        "required": ["file", "purpose"],
        "additionalProperties": False,
    },
}
"""Forms that a POST takes."""

_ANSWERS: Mapping[str, _Answer] = {
    "/v1/completions": _Answer(CompletionResponse, CompletionResponse),
    "/v1/chat/completions": _Answer(Chat, ChatChunk),
    "/inference/v1/generate": _Answer(Generated, Generated),
    "/v1/embeddings": _Answer(EmbeddingResponse),
    "/classify": _Answer(Classes),
    "/v1/score": _Answer(ScoreList),
    "/v1/rerank": _Answer(Ranking),
    "/tokenize": _Answer(TokenizeResponse),
    "/detokenize": _Answer(DetokenizeResponse),
    "/tokenizer_info": _Answer(TokenizerInfo),
    "/v1/models": _Answer(Page[ModelCard]),
    "/v1/models/{ref}": _Answer(ModelCard),
    "/abort_requests": _Answer(Aborted),
    "/version": _Answer(VersionResponse),
    "/server_info": _Answer(ServerInfo),
    "GET /v1/batches": _Answer(Page[BatchObject]),
    "POST /v1/batches": _Answer(BatchObject),
    "GET /v1/batches/{batch_id}": _Answer(BatchObject),
    "POST /v1/batches/{batch_id}/cancel": _Answer(BatchObject),
    "GET /v1/files": _Answer(Page[FileObject]),
    "POST /v1/files": _Answer(FileObject),
    "GET /v1/files/{file_id}": _Answer(FileObject),
    "DELETE /v1/files/{file_id}": _Answer(DeletedFile),
}


class OpenApiEndpoint:
    """The document of an app's routes."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = routes

    def route(self) -> Route:
        """Its path."""
        return Route("/openapi.json", self.read, methods=["GET"])

    async def read(self, _: Request) -> Response:
        """GET /openapi.json: this document."""
        return json_response(self._document)

    @functools.cached_property
    def _document(self) -> dict[str, Any]:
        return document([*self._routes, self.route()])


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of routes, without the console's."""
    components: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        if path in _CONSOLE or path.startswith("/console/") or path == "/v1/models/":
            continue
        methods = sorted((route.methods or set()) - {"HEAD"})
        for method in methods:
            paths.setdefault(path, {})[method.lower()] = _operation(route, method, path, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Loraplex", "version": loraplex.__version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(route: Route, method: str, path: str, components: dict[str, Any]) -> dict[str, Any]:
    same = _SAME.get(path, path)
    operation: dict[str, Any] = {"summary": _summary(route)}
    if names := list(route.param_convertors):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if method == "POST" and (content := _request_content(same)):
        operation["requestBody"] = {"required": True, "content": content}
    error = {"application/json": {"schema": response_schema(Error, components)}}
    good: dict[str, Any] = {"description": "The answer."}
    if (answer := _ANSWERS.get(f"{method} {same}") or _ANSWERS.get(same)) is not None:
        good["content"] = _content(answer, components)
    operation["responses"] = {
        "200": good,
        "default": {"description": "A refusal.", "content": error},
    }
    return operation


def _request_content(path: str) -> dict[str, Any]:
    if (body := _BODIES.get(path)) is not None:
        return {"application/json": {"schema": request_schema(body.parse, body.examples)}}
    if (form := _FORMS.get(path)) is not None:
        return {"multipart/form-data": {"schema": form}}
    return {}


def _content(answer: _Answer, components: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": response_schema(answer.whole, components)}}
    if answer.event is not None:
        content["text/event-stream"] = {"schema": response_schema(answer.event, components)}
    return content


def _summary(route: Route) -> str:
    """The first line of the endpoint's docstring, without the path."""
    endpoint = route.endpoint
    text = (getattr(endpoint, "func", endpoint).__doc__ or route.path).strip().splitlines()[0]
    _, colon, about = text.partition(": ")
    return about if colon else text
