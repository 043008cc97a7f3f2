"""Errors name the fields that clients sent, not those that the gateway made of them."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError

from loraplex.errors import InvalidRequest, Unavailable
from loraplex.v1 import common_pb2
from loraplex_services.gateway.workers.session import with_client_fields
from tests.gateway.conftest import Stack


@pytest.mark.parametrize(
    ("workers", "clients"),
    [
        ("prompt_ids[3]", "prompt"),
        ("sampling.max_tokens", "max_tokens"),
        ("sampling.logit_bias[0]", "logit_bias"),
        ("adapters", "adapters"),
    ],
)
def test_fields_of_a_workers_refusal_are_those_of_the_client(workers: str, clients: str) -> None:
    error = with_client_fields(InvalidRequest.field(workers, "out of range", "must be smaller"))
    assert error.violations[0].field == clients
    assert str(error) == error.message == f"{clients}: must be smaller"


def test_other_errors_stay_as_they_are() -> None:
    error = Unavailable("no engine", reason="ENGINE_LOST")
    assert with_client_fields(error) is error
    assert error.message == "no engine"


@pytest.mark.parametrize(
    ("path", "sent", "param"),
    [
        ("completions", {"prompt": "x"}, "prompt"),
        ("embeddings", {"input": "x"}, "input"),
    ],
)
async def test_param_names_what_the_caller_of_http_sent(
    stack: Stack, path: str, sent: dict[str, Any], param: str
) -> None:
    await stack.start()
    stack.workers[0].fail_next = [
        common_pb2.ErrorDetail(
            code=3,
            reason="INVALID_REQUEST",
            message="prompt_ids[0]: too large",
            violations=[common_pb2.FieldViolation(field="prompt_ids[0]", description="too large")],
        )
    ]
    client: Any = getattr(stack.openai(), path)
    with pytest.raises(BadRequestError) as refused:
        await client.create(model="base", **sent)
    assert refused.value.param == param
    assert f"{param}: too large" in str(refused.value)
