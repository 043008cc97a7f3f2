"""Endpoints that read prompts without generating: vectors, classes, scores, rankings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loraplex.api.pooling import Pooling
from loraplex.api.request import Prompt, TextPrompt
from loraplex.errors import LoraplexError
from loraplex_services.common.callers import Caller
from loraplex_services.gateway.http.answering import json_response
from loraplex_services.gateway.http.calls import Origin, origin_of
from loraplex_services.gateway.http.classify import classes_body, parse_classify, shown_scores
from loraplex_services.gateway.http.collected import LargeAnswers
from loraplex_services.gateway.http.embeddings import (
    embeddings_body,
    parse_embeddings,
    vector_calls,
)
from loraplex_services.gateway.http.formatting import headers_of
from loraplex_services.gateway.http.json_body import read_json
from loraplex_services.gateway.http.pooling import pooling_body, task_of
from loraplex_services.gateway.http.ranking import (
    RankingCall,
    parse_rerank,
    parse_score,
    ranking_body,
    scores_body,
)
from loraplex_services.gateway.http.sse import json_in_parts, until_gone
from loraplex_services.gateway.metrics import REQUESTS
from loraplex_services.gateway.pipeline.collected_bytes import Note
from loraplex_services.gateway.pipeline.embedding import Pooled, embed_all
from loraplex_services.gateway.pipeline.generation import Generation
from loraplex_services.gateway.pipeline.ranking import rank_all
from loraplex_services.gateway.pipeline.scoring import score_all
from loraplex_services.gateway.registry.resolve import Resolver
from loraplex_services.gateway.request import GenerateCall, Target, with_names

T = TypeVar("T")
Fields = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class VectorEndpoints:
    """The endpoints on top of the pipeline."""

    caller: Callable[[Request], Awaitable[Caller]]
    generation: Generation
    large: LargeAnswers
    resolver: Resolver

    def routes(self) -> list[Route]:
        paths = {
            self.embeddings: ("/v1/embeddings",),
            self.classify: ("/classify",),
            self.pooling: ("/pooling",),
            self.score: ("/v1/score", "/score"),
            self.rerank: ("/v1/rerank", "/v2/rerank", "/rerank"),
        }
        return [
            Route(path, endpoint, methods=["POST"])
            for endpoint, all_paths in paths.items()
            for path in all_paths
        ]

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        fields, origin = await self._read(request)
        call = parse_embeddings(fields, origin)
        with self._counted(request) as note:
            work = embed_all(self.generation, call.calls, call.finish, note)
            pooled = await _answered(request, work, call.field_names)
            return await self._vectors(request, pooled, lambda: embeddings_body(call, pooled))

    async def classify(self, request: Request) -> Response:
        """POST /classify."""
        fields, origin = await self._read(request)
        call = parse_classify(fields, origin)
        name = origin.request_id
        with self._counted(request) as note:
            work = score_all(self.generation, call.calls, note)
            pooled, scores = await _answered(request, work, call.field_names)
            return await self._vectors(
                request, pooled, lambda: classes_body(call, name, pooled, scores)
            )

    async def pooling(self, request: Request) -> Response:
        """POST /pooling: classes of an adapter with a head, otherwise vectors."""
        fields, origin = await self._read(request)
        task = task_of(fields)
        has_head = not task and await self._has_head(fields, origin)
        with self._counted(request) as note:
            if task == "classify" or has_head:
                classes = parse_classify(fields, origin)
                scoring = score_all(self.generation, classes.calls, note)
                pooled, scores = await _answered(request, scoring, classes.field_names)
                model, is_base64 = classes.model, False
                shown = [shown_scores(classes, score) for score in scores]
            else:
                call = parse_embeddings(fields, origin)
                work = embed_all(self.generation, call.calls, call.finish, note)
                pooled = await _answered(request, work, call.field_names)
                model, is_base64, shown = call.model, call.is_base64, list(pooled.vectors)

            def body() -> Mapping[str, Any]:
                name = origin.request_id
                return pooling_body(model, name, pooled, shown, is_base64=is_base64)

            return await self._vectors(request, pooled, body)

    async def score(self, request: Request) -> Response:
        """POST /v1/score."""
        fields, origin = await self._read(request)
        call = parse_score(fields)
        pooled, scores = await self._ranked(request, call, fields, origin)
        return _response(scores_body(call, origin.request_id, pooled, scores), pooled)

    async def rerank(self, request: Request) -> Response:
        """POST /v1/rerank."""
        fields, origin = await self._read(request)
        call = parse_rerank(fields)
        pooled, scores = await self._ranked(request, call, fields, origin)
        return _response(ranking_body(call, origin.request_id, pooled, scores), pooled)

    async def _ranked(
        self, request: Request, call: RankingCall, fields: Fields, origin: Origin
    ) -> tuple[Pooled, list[float]]:
        def calls(prompts: Sequence[Prompt], pooling: Pooling) -> Sequence[GenerateCall]:
            return vector_calls(
                fields, origin, call.model, prompts, pooling, call.truncate_prompt_tokens
            )

        target = await self._target(call.model, origin)
        use_activation = call.use_activation
        with self._counted(request) as note:
            ranking = rank_all(
                self.generation, target, call.pairs, calls, note, use_activation=use_activation
            )
            return await _answered(request, ranking, call.field_names)

    def _counted(self, request: Request) -> AbstractContextManager[Note]:
        return self.generation.collected.counted(request.state.caller)

    async def _vectors(
        self, request: Request, pooled: Pooled, body: Callable[[], Mapping[str, Any]]
    ) -> Response:
        """A response with vectors as `data`. A large one is formatted in a thread."""

        def formatted() -> bytes:
            return vectors_json(body())

        if pooled.is_large:
            content = await self.large.formatted(request.state.caller.tenant, formatted)
        else:
            content = formatted()
        REQUESTS.labels("http", "ok").inc()
        headers = headers_of(pooled.prepared[0])
        return Response(content, media_type="application/json", headers=headers)

    async def _has_head(self, fields: Fields, origin: Origin) -> bool:
        model = fields.get("model")
        if not isinstance(model, str) or not model:
            return False
        target = await self._target(model, origin)
        return any(adapter.pooling.num_labels for adapter in target.adapters)

    async def _target(self, model: str, origin: Origin) -> Target:
        """The adapters that a model string means now. Raises: NotFound, Unavailable."""
        call = GenerateCall(
            model=model, prompt=TextPrompt(""), tenant=origin.tenant, runs_all=origin.runs_all
        )
        return await self.resolver.target(call)

    async def _read(self, request: Request) -> tuple[Fields, Origin]:
        caller = await self.caller(request)
        return await read_json(request, caller), origin_of(request, caller)


async def _answered(
    request: Request, work: Coroutine[Any, Any, T], field_names: Mapping[str, str]
) -> T:
    try:
        return await until_gone(request.receive, work)
    except LoraplexError as error:
        raise with_names(error, field_names) from None


def vectors_json(body: Mapping[str, Any]) -> bytes:
    """JSON of a body whose `data` is a list of objects with arrays of numbers.

    Raises: LoraplexError if one of the numbers is not finite.
    """
    parts: list[bytes] = []
    for name, value in body.items():
        parts += [b"," if parts else b"{", json_in_parts(name), b":"]
        if name == "data":
            items = (
                (b"," if index else b"[", json_in_parts(each)) for index, each in enumerate(value)
            )
            parts += [*chain.from_iterable(items), b"]" if value else b"[]"]
        else:
            parts.append(json_in_parts(value))
    return b"".join([*parts, b"}"])  # once: to copy a large answer takes milliseconds


def _response(body: Mapping[str, Any], pooled: Pooled) -> Response:
    REQUESTS.labels("http", "ok").inc()
    return json_response(body, headers_of(pooled.prepared[0]))
