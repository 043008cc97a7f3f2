"""GET /v1/usage: the usage of the caller's tenant."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loraplex.api.registry import UsageEntry
from loraplex.errors import LoraplexError
from loraplex_services.common.callers import Caller
from loraplex_services.gateway.http.answering import json_response
from loraplex_services.gateway.http.pages import check_parameters
from loraplex_services.gateway.request import with_names

Read = Callable[[str, str, str], Awaitable[list[UsageEntry]]]
"""Usage of a tenant, of one model ("" = all), since a day ("" = 30 days ago)."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class UsageEndpoint:
    """The endpoint over the registry's counts."""

    caller: Callable[[Request], Awaitable[Caller]]
    read: Read

    def routes(self) -> list[Route]:
        return [Route("/v1/usage", self.usage, methods=["GET"])]

    async def usage(self, request: Request) -> Response:
        """GET /v1/usage?since=YYYY-MM-DD&adapter=NAME."""
        tenant = (await self.caller(request)).tenant
        check_parameters(request.query_params, ("since", "adapter"))
        adapter = request.query_params.get("adapter", "")
        try:
            found = await self.read(tenant, adapter, request.query_params.get("since", ""))
        except LoraplexError as error:
            raise with_names(error, {"model": "adapter"}) from None
        data = [dataclasses.asdict(entry) for entry in found]
        return json_response({"object": "list", "data": data})
