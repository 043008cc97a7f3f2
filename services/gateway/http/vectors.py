"""Endpoints that read prompts without generating: vectors, classes, scores, rankings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
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
from loraplex_services.gateway.http.sse import until_gone
from loraplex_services.gateway.metrics import REQUESTS
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
        work = embed_all(self.generation, call.calls, call.finish)
        pooled = await _answered(request, work, call.field_names)
        return _response(embeddings_body(call, pooled), pooled)

    async def classify(self, request: Request) -> Response:
        """POST /classify."""
        fields, origin = await self._read(request)
        call = parse_classify(fields, origin)
        work = score_all(self.generation, call.calls)
        pooled, scores = await _answered(request, work, call.field_names)
        return _response(classes_body(call, origin.request_id, pooled, scores), pooled)

    async def pooling(self, request: Request) -> Response:
        """POST /pooling: classes of an adapter with a head, otherwise vectors."""
        fields, origin = await self._read(request)
        task = task_of(fields)
        has_head = not task and await self._has_head(fields, origin)
        name = origin.request_id
        if task == "classify" or has_head:
            classes = parse_classify(fields, origin)
            scoring = score_all(self.generation, classes.calls)
            pooled, scores = await _answered(request, scoring, classes.field_names)
            shown = [shown_scores(classes, score) for score in scores]
            return _response(
                pooling_body(classes.model, name, pooled, shown, is_base64=False), pooled
            )
        call = parse_embeddings(fields, origin)
        work = embed_all(self.generation, call.calls, call.finish)
        pooled = await _answered(request, work, call.field_names)
        body = pooling_body(call.model, name, pooled, pooled.vectors, is_base64=call.is_base64)
        return _response(body, pooled)

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
            return vector_calls(fields, origin, call.model, prompts, pooling, None)

        target = await self._target(call.model, origin)
        ranking = rank_all(
            self.generation, target, call.pairs, calls, use_activation=call.use_activation
        )
        return await _answered(request, ranking, call.field_names)

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


def _response(body: Mapping[str, Any], pooled: Pooled) -> Response:
    REQUESTS.labels("http", "ok").inc()
    return json_response(body, headers_of(pooled.prepared[0]))
