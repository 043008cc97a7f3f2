"""POST /abort_requests: ends single requests of the caller's tenant, as on vLLM.

It reaches only the requests of this gateway; clients call every gateway that they know.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypedDict

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loraplex.errors import InvalidRequest
from loraplex_services.common.callers import Caller
from loraplex_services.gateway.http.answering import json_response
from loraplex_services.gateway.http.body import Body
from loraplex_services.gateway.http.json_body import read_json
from loraplex_services.gateway.pipeline.live import LiveRequests

PATHS = ("/abort_requests", "/inference/v1/abort_requests")


class Aborted(TypedDict):
    status: str
    aborted: int


def parse_abort(fields: dict[str, Any]) -> frozenset[str]:
    """Body of /abort_requests: the ids. Raises: InvalidRequest, Unsupported."""
    body = Body(fields)
    request_ids = body.texts("request_ids")
    body.finish()
    if not request_ids:
        why = "name at least one request; POST /pause ends all, until POST /resume"
        raise InvalidRequest.field("request_ids", "", why)
    return frozenset(request_ids)


@dataclass(frozen=True, slots=True, eq=False)
class AbortEndpoint:
    """The endpoint over the running requests."""

    caller: Callable[[Request], Awaitable[Caller]]
    live: LiveRequests

    def routes(self) -> list[Route]:
        return [Route(path, self.abort, methods=["POST"]) for path in PATHS]

    async def abort(self, request: Request) -> Response:
        """POST /abort_requests: ends requests with the output so far, and counts them."""
        caller = await self.caller(request)
        request_ids = parse_abort(await read_json(request, caller))
        answer: Aborted = {
            "status": "aborted",
            "aborted": self.live.abort(caller.tenant, request_ids),
        }
        return json_response(answer)
