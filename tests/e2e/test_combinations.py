"""Several adapters in one request: what does not add up is refused by name, over HTTP and gRPC."""

from __future__ import annotations

import grpc
import pytest

from loraplex.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.stack import BASE_ID, Stack

DORA, PLAIN = "next", "upper"


def test_http_refuses_a_dora_adapter_with_another(stack: Stack) -> None:
    adapters = [{"ref": name, "weight": 1.0} for name in (PLAIN, DORA)]
    body = {"model": BASE_ID, "prompt": "x", "max_tokens": 4, "adapters": adapters}
    status, answer = stack.post("/v1/completions", body)
    assert status == 400, answer
    assert answer["error"]["param"] == "adapters"
    assert f"default/{DORA}:v1" in answer["error"]["message"]
    assert "uses DoRA" in answer["error"]["message"]


def test_http_refuses_a_weight_that_dora_gains_are_not_for(stack: Stack) -> None:
    adapters = [{"ref": DORA, "weight": 0.5}]
    body = {"model": BASE_ID, "prompt": "x", "max_tokens": 4, "adapters": adapters}
    status, answer = stack.post("/v1/completions", body)
    assert status == 400, answer
    assert "DoRA" in answer["error"]["message"]


def test_grpc_refuses_a_dora_adapter_with_another(stack: Stack) -> None:
    request = inference_pb2.GenerateRequest(
        model=BASE_ID,
        text="x",
        adapters=[inference_pb2.WeightedAdapter(ref=name, weight=1.0) for name in (PLAIN, DORA)],
    )
    with grpc.insecure_channel(stack.grpc) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(request))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert f"default/{DORA}:v1 cannot be combined" in str(caught.value.details())


def test_adapters_that_add_up_still_run_together(stack: Stack) -> None:
    adapters = [{"ref": name, "weight": 0.5} for name in (PLAIN, "twice")]
    body = {"model": BASE_ID, "prompt": "x", "max_tokens": 4, "adapters": adapters}
    status, answer = stack.post("/v1/completions", body)
    assert status == 200, answer
