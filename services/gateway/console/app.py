"""Serves the console's page and the state it polls."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loraplex.errors import InvalidRequest, PermissionDenied
from loraplex_services.common.callers import Caller
from loraplex_services.gateway.admission.controller import AdmissionController
from loraplex_services.gateway.console import state
from loraplex_services.gateway.console.adapters import NO_STORE
from loraplex_services.gateway.http.answering import json_response
from loraplex_services.gateway.pipeline.history import RANGES, LoadHistory
from loraplex_services.gateway.registry.keyring import is_admin, sees_all_adapters
from loraplex_services.gateway.registry.resolve import Resolver
from loraplex_services.gateway.workers.fleet import Fleet
from loraplex_services.gateway.workers.view import no_worker_reason

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True, eq=False)
class ConsoleEndpoints:
    """Endpoints of the console. The page is public; its data needs a key if keys are required."""

    caller: Callable[[Request], Awaitable[Caller]]
    resolver: Resolver
    fleet: Fleet
    controller: AdmissionController
    not_ready_reason: Callable[[], str]
    loads: LoadHistory

    def routes(self) -> list[Route]:
        """`/` and everything under `/console/`."""
        folder = resources.files("loraplex_services.gateway.console") / "static"
        files = {each.name: each.read_bytes() for each in folder.iterdir()}
        pages = [_page(f"/console/{name}", name, content) for name, content in files.items()]
        return [
            _page("/", "index.html", files["index.html"]),
            Route("/console/state", self.state, methods=["GET"]),
            Route("/console/history", self.history, methods=["GET"]),
            *pages,
        ]

    async def state(self, request: Request) -> Response:
        """Current state. Only admins see workers, whose load reveals other tenants."""
        caller = await self.caller(request)
        reason = self.not_ready_reason() or no_worker_reason(self.fleet.views())
        shown: dict[str, Any] = {
            "time_s": time.time(),
            "not_ready_reason": reason,
            "tenant": caller.tenant,
            "bases": [
                state.base_state(base, self.fleet.served(base.base_id).tokenizer.can_chat)
                for base in self.resolver.bases().values()
            ],
            "workers": None,
        }
        if is_admin(caller):
            sees_all = sees_all_adapters(caller)
            viewer = None if sees_all else caller.tenant
            labels = self.resolver.snapshot.labels(viewer)
            recent = self.loads.last_minute(viewer)
            requests = {each.model: each.requests for each in recent.models}
            views = sorted(self.fleet.views(), key=lambda view: (view.worker_id, view.address))
            shown |= {
                "workers": [state.worker_state(view, labels, requests, sees_all) for view in views],
                "num_resident": state.num_resident(views),
                "num_adapters": self.resolver.snapshot.num_adapters,
                "running": self.controller.queue.num_running,
                "waiting": self.controller.queue.num_waiting,
                "recent": state.recent_state(recent, sees_all),
            }
        return json_response(shown, NO_STORE)

    async def history(self, request: Request) -> Response:
        """The data of the charts of a range. Only admins see it."""
        caller = await self.caller(request)
        if not is_admin(caller):
            raise PermissionDenied("the load is shown to keys with the scope 'admin'; use one")
        name = request.query_params.get("range", "5m")
        if name not in RANGES:
            raise InvalidRequest.field("range", name[:32], f"must be one of {', '.join(RANGES)}")
        shown = state.history_state(self.loads, name, sees_all_adapters(caller))
        return json_response(shown, NO_STORE)


def _page(path: str, name: str, content: bytes) -> Route:
    media_type = _TYPES[name.rpartition(".")[2]]

    async def serve(_: Request) -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return Route(path, serve, methods=["GET"])
