"""The calls of trainers around an update, as on vLLM: /pause, /resume and /is_paused for all models
or for one adapter, and /reset_prefix_cache.

A pause applies only to this gateway; trainers call every server that they know.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loraplex.errors import InvalidRequest, PermissionDenied
from loraplex.refs import parse_name
from loraplex_services.common.callers import Caller
from loraplex_services.gateway.http.answering import json_response
from loraplex_services.gateway.http.guard import check_origin
from loraplex_services.gateway.http.pages import check_parameters
from loraplex_services.gateway.pipeline.live import EVERYTHING, LiveRequests, PauseMode
from loraplex_services.gateway.registry.keyring import require_admin, sees_all_adapters
from loraplex_services.gateway.registry.snapshot import Adapter

_FLAGS = {"true": True, "1": True, "false": False, "0": False}
_PARAMETERS = ("mode", "model", "clear_cache", "wait_for_inflight_requests")


@dataclass(frozen=True, slots=True, eq=False)
class PauseEndpoints:
    """Endpoints over the running requests."""

    caller: Callable[[Request], Awaitable[Caller]]
    live: LiveRequests
    bases: Callable[[], Collection[str]]
    """Ids of the served bases."""

    def routes(self) -> list[Route]:
        return [
            Route("/pause", self.pause, methods=["POST"]),
            Route("/resume", self.resume, methods=["POST"]),
            Route("/is_paused", self.is_paused, methods=["GET"]),
            Route("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]),
        ]

    async def pause(self, request: Request) -> Response:
        """POST /pause?mode=abort|wait|keep&model=NAME: answers when the pause has begun."""
        scope = await self._scope(request)
        mode = _mode(request)
        _flag(request, "clear_cache")
        await self.live.pause(scope, mode)
        return json_response({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        """POST /resume?model=NAME."""
        self.live.resume(await self._scope(request))
        return json_response({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        """GET /is_paused?model=NAME. An adapter is paused together with all models as well."""
        scopes = {await self._scope(request), EVERYTHING}
        return json_response({"is_paused": not scopes.isdisjoint(self.live.paused())})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """POST /reset_prefix_cache: changes nothing. Every cache is keyed by the digest of the
        weights, so an update leaves nothing stale."""
        require_admin(await self.caller(request))
        check_origin(request)
        return json_response({"success": True})

    async def _scope(self, request: Request) -> Adapter:
        """The adapter that the caller names and may pause. The only base means all models, as on
        vLLM, which ignores `model`. Raises: PermissionDenied, InvalidRequest."""
        caller = await self.caller(request)
        require_admin(caller)
        check_origin(request)
        check_parameters(request.query_params, _PARAMETERS)
        model = request.query_params.get("model", "")
        bases = self.bases()
        if not model or (model in bases and len(bases) == 1):
            if not sees_all_adapters(caller):
                raise PermissionDenied(
                    "only the first admin key may pause all models; name one of yours with model="
                )
            return EVERYTHING
        if model in bases:
            why = "is one of several bases; name one adapter, or leave model out to mean all models"
            raise InvalidRequest.field("model", model, why)
        scope = _adapter(model, caller.tenant)
        if scope[0] != caller.tenant and not sees_all_adapters(caller):
            raise PermissionDenied("only its own tenant's admin may pause an adapter")
        return scope


def _adapter(model: str, tenant: str) -> Adapter:
    """The adapter that `model` names. Raises: InvalidRequest, also if it names a version or tag."""
    name = re.split("[:@]", model, maxsplit=1)[0]
    adapter = parse_name(name, tenant, field="model")
    if name != model:
        why = f"a pause applies to all versions of an adapter; try {name!r}"
        raise InvalidRequest.field("model", model[:256], why)
    return adapter


def _mode(request: Request) -> PauseMode:
    waits = _flag(request, "wait_for_inflight_requests")
    value = request.query_params.get("mode", PauseMode.WAIT if waits else PauseMode.ABORT)
    try:
        return PauseMode(value)
    except ValueError:
        known = ", ".join(PauseMode)
        raise InvalidRequest.field("mode", value[:32], f"must be one of {known}") from None


def _flag(request: Request, name: str) -> bool:
    """A boolean parameter. `clear_cache` has no effect, for the reason of `reset_prefix_cache`."""
    value = request.query_params.get(name, "false").lower()
    if value not in _FLAGS:
        raise InvalidRequest.field(name, value[:32], "must be true or false")
    return _FLAGS[value]
