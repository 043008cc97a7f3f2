"""The endpoints as batch jobs call them."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from loraplex_services.common.callers import LOCAL
from loraplex_services.gateway.http.in_process import InProcessEndpoints


async def test_a_crash_of_an_endpoint_is_the_answer_to_its_line_and_does_not_end_the_batch() -> (
    None
):
    async def crash(_: Request) -> None:
        raise ZeroDivisionError

    path = "/v1/completions"
    app = Starlette(routes=[Route(path, crash, methods=["POST"])])
    answer = await InProcessEndpoints(lambda: app).post(LOCAL, path, {}, "r")
    assert (answer.status, answer.retry_after_s) == (500, None)
