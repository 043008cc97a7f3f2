"""`registry certify --follow`: which versions it measures, again and again, and where tags move."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from loraplex.api.registry import AdapterVersion, Certificate
from loraplex.client import certifier
from loraplex.client.certifier import Certifier
from loraplex.client.inference_client import InferenceClient
from loraplex.client.registry_client import RegistryClient
from loraplex.errors import (
    AdapterNotFound,
    InvalidAdapter,
    LoraplexError,
    NotFound,
    Unavailable,
)
from loraplex.v1 import admin_pb2, admin_pb2_grpc, common_pb2, inference_pb2_grpc
from loraplex.v1 import inference_pb2 as pb
from loraplex_services.common.grpc.server import start
from tests.registry.conftest import ServedRegistry
from tests.registry.house import BASE_ID, publish

Outcome = tuple[str, Certificate | LoraplexError]


class ScoringGateway(
    inference_pb2_grpc.InferenceServiceServicer, admin_pb2_grpc.AdminServiceServicer
):
    """A gateway on the public protocol whose answers are set; on both sides of a measurement."""

    def __init__(self) -> None:
        self.logprobs: dict[str, float] = {}
        """Of the likelier of two tokens at the second position, by model; others are unknown."""
        self.priorities: set[int] = set()

    async def GetStatus(self, request: Any, context: Any) -> admin_pb2.GetStatusResponse:
        worker = admin_pb2.WorkerState(worker_id="w", base_id=BASE_ID, ready=True)
        return admin_pb2.GetStatusResponse(ready=True, workers=[worker])

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.priorities.add(request.priority)
        if request.model not in self.logprobs:
            raise AdapterNotFound(request.model)
        likely = common_pb2.TokenCandidate(token_id=1, logprob=self.logprobs[request.model])
        rare = common_pb2.TokenCandidate(token_id=2, logprob=-5.0)
        first = common_pb2.TokenLogprob()
        second = common_pb2.TokenLogprob(token=likely, top=[likely, rare])
        yield pb.GenerateResponse(prompt_logprobs=[first, second])


@asynccontextmanager
async def serving(gateway: ScoringGateway) -> AsyncIterator[InferenceClient]:
    adders = (
        (inference_pb2_grpc.add_InferenceServiceServicer_to_server, "InferenceService"),
        (admin_pb2_grpc.add_AdminServiceServicer_to_server, "AdminService"),
    )
    services = [(add, gateway, f"loraplex.v1.{name}") for add, name in adders]
    running = await start(services, ["127.0.0.1:0"])
    try:
        async with InferenceClient(f"127.0.0.1:{running.port}") as client:
            yield client
    finally:
        await running.stop(0)


@asynccontextmanager
async def following(
    served: ServedRegistry, ours: ScoringGateway, theirs: ScoringGateway, max_kl: float
) -> AsyncIterator[asyncio.Queue[Outcome]]:
    """What the certifier reports."""
    outcomes: asyncio.Queue[Outcome] = asyncio.Queue()

    def report(version: AdapterVersion, outcome: Certificate | LoraplexError) -> None:
        outcomes.put_nowait((version.ref, outcome))

    async with serving(ours) as own, serving(theirs) as reference:
        one = Certifier(served.client, own, reference, "reference:1", ("text",), max_kl, "prod")
        task = asyncio.create_task(one.follow(report))
        try:
            yield outcomes
        finally:
            task.cancel()


async def tagged(served: ServedRegistry) -> int:
    return (await served.client.get("acme/a:prod")).version.version


async def test_versions_are_measured_when_they_are_published_and_tags_move_forward(
    served: ServedRegistry,
) -> None:
    ours, theirs = ScoringGateway(), ScoringGateway()
    for gateway in (ours, theirs):
        gateway.logprobs = {f"acme/a:v{number}": -0.1 for number in range(1, 6)}
    ours.logprobs["acme/a:v3"] = -2.0
    await publish(served.registry, "acme/a", 1)
    await publish(served.registry, "acme/a", 2)
    async with following(served, ours, theirs, 0.01) as outcomes:
        assert [(await outcomes.get())[0] for _ in range(2)] == ["acme/a:v2", "acme/a:v1"]
        assert await tagged(served) == 2
        await publish(served.registry, "acme/a", 3)
        ref, refused = await outcomes.get()
        assert ref == "acme/a:v3"
        assert isinstance(refused, InvalidAdapter)
        assert refused.violations[0].field == "mean_kl"
        assert await tagged(served) == 2
        await publish(served.registry, "acme/a", 4)
        assert isinstance((await outcomes.get())[1], Certificate)
        assert await tagged(served) == 4
    await served.client.rollback("acme/a", "prod")
    async with following(served, ours, theirs, 0.01) as outcomes:
        await publish(served.registry, "acme/b", 1)
        ours.logprobs["acme/b:v1"] = theirs.logprobs["acme/b:v1"] = -0.1
        while (found := await outcomes.get())[0] != "acme/b:v1":
            raise AssertionError(f"{found} was measured again")
        assert await tagged(served) == 2
    assert ours.priorities == {1_000_000}


async def test_a_version_that_the_reference_does_not_have_yet_is_tried_again(
    served: ServedRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certifier, "RETRY_S", 0.02)
    ours, theirs = ScoringGateway(), ScoringGateway()
    ours.logprobs = {"acme/a:v1": -0.1, "acme/a:v2": -0.1}
    await publish(served.registry, "acme/a", 1)
    await publish(served.registry, "acme/a", 2)
    async with following(served, ours, theirs, 0.01) as outcomes:
        first = [await outcomes.get() for _ in range(2)]
        for _, outcome in first:
            assert isinstance(outcome, NotFound)
            assert "is not on the reference: " in outcome.message
        await served.client.delete("acme/a:v1")
        theirs.logprobs = dict(ours.logprobs)
        ref, found = await outcomes.get()
        assert ref == "acme/a:v2"
        assert isinstance(found, Certificate)
        assert outcomes.empty()


async def test_an_address_at_which_no_registry_answers_ends_it_at_once() -> None:
    async with serving(ScoringGateway()) as own, RegistryClient("127.0.0.1:1") as nowhere:
        one = Certifier(nowhere, own, own, "reference:1", ("text",))
        with pytest.raises(Unavailable, match="no registry answers"):
            await one.follow(lambda version, outcome: None)
