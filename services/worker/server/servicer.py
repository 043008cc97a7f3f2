"""WorkerService over gRPC. It translates messages and leaves every decision to `ApiServer`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from loraplex.api.request_wire import worker_request_from_proto
from loraplex.api.wire import residency_to_proto
from loraplex.errors import InvalidRequest, LoraplexError
from loraplex.v1 import worker_pb2, worker_pb2_grpc
from loraplex_services.common.grpc import server as grpc_server
from loraplex_services.worker.config import WorkerConfig
from loraplex_services.worker.server.api_server import ApiServer
from loraplex_services.worker.server.convert import (
    events_to_wire,
    model_to_wire,
    status_to_wire,
    token_to_wire,
)
from loraplex_services.worker.server.sessions import GatewaySession, SessionUpdate

logger = logging.getLogger(__name__)

Context = Any
"""grpc.aio.ServicerContext."""


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """One instance for each worker; its methods run concurrently."""

    def __init__(self, config: WorkerConfig, api: ApiServer) -> None:
        self._config = config
        self._api = api

    async def Session(
        self, request_iterator: AsyncIterator[worker_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[worker_pb2.SessionResponse]:
        """All requests of one gateway; one StepEvents message a step comes back."""
        session = self._api.open_session(await _gateway_id(request_iterator))
        reader = asyncio.create_task(self._read(session, request_iterator))
        try:
            yield worker_pb2.SessionResponse(
                welcome=worker_pb2.SessionWelcome(
                    worker_id=self._config.worker_id, epoch=self._api.status.epoch
                )
            )
            while (update := await session.next()) is not None:
                yield worker_pb2.SessionResponse(events=events_to_wire(update))
        finally:
            reader.cancel()
            self._api.close_session(session)

    async def _read(
        self, session: GatewaySession, requests: AsyncIterator[worker_pb2.SessionRequest]
    ) -> None:
        """Carry out what the gateway sends until it closes its direction of the stream."""
        try:
            async for message in requests:
                self._handle(session, message)
            session.no_more_requests()
        except Exception:
            logger.exception("session broke", extra={"gateway": session.gateway_id})
            session.end(LoraplexError("internal error: the worker's log has the traceback"))

    def _handle(self, session: GatewaySession, message: worker_pb2.SessionRequest) -> None:
        kind = message.WhichOneof("message")
        if kind == "submit":
            self._submit(session, message.submit)
        elif kind == "cancel":
            self._api.cancel(session, message.cancel.request_id)
        elif kind == "hello":
            session.end(
                InvalidRequest.field("message", "hello", "must be sent once, as the first message")
            )

    def _submit(self, session: GatewaySession, message: worker_pb2.WorkerRequest) -> None:
        try:
            self._api.submit(session, worker_request_from_proto(message))
        except LoraplexError as error:
            session.push(SessionUpdate(0, failures=[(message.request_id, error)]))

    async def Generate(
        self, request: worker_pb2.WorkerServiceGenerateRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WorkerServiceGenerateResponse]:
        """One request, in a session of its own that ends with it."""
        session = self._api.open_session("generate")
        try:
            self._api.submit(session, worker_request_from_proto(request.request))
            session.no_more_requests()
            while (update := await session.next()) is not None:
                for _, error in update.failures:
                    raise error
                for request_id, output in update.tokens:
                    event = token_to_wire(request_id, output)
                    yield worker_pb2.WorkerServiceGenerateResponse(event=event)
        finally:
            self._api.close_session(session)

    async def WatchStatus(
        self, request: worker_pb2.WatchStatusRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WatchStatusResponse]:
        """A snapshot, then deltas."""
        async for update in self._api.status.watch():
            yield status_to_wire(update, self._config)

    async def GetModel(
        self, request: worker_pb2.GetModelRequest, context: Context
    ) -> worker_pb2.GetModelResponse:
        """The facts about this base that a gateway needs to translate between text and tokens."""
        info, bundle = self._api.model()
        return model_to_wire(self._config, info, bundle, with_tokenizer=request.include_tokenizer)

    async def LoadAdapter(
        self, request: worker_pb2.LoadAdapterRequest, context: Context
    ) -> worker_pb2.LoadAdapterResponse:
        """Returns when the adapter can be used in the next step."""
        early = request.when_fetched and not request.pin
        residency = await self._api.load(request.digest, request.pin, when_fetched=early)
        return worker_pb2.LoadAdapterResponse(residency=residency_to_proto(residency))

    async def UnloadAdapter(
        self, request: worker_pb2.UnloadAdapterRequest, context: Context
    ) -> worker_pb2.UnloadAdapterResponse:
        """Frees the adapter as soon as no request uses it."""
        self._api.unload(request.digest)
        return worker_pb2.UnloadAdapterResponse()

    async def PinAdapter(
        self, request: worker_pb2.PinAdapterRequest, context: Context
    ) -> worker_pb2.PinAdapterResponse:
        """Keeps an adapter resident, loading it if necessary, or releases it."""
        if request.pinned:
            residency = await self._api.load(request.digest, pin=True)
        else:
            residency = self._api.unpin(request.digest)
        return worker_pb2.PinAdapterResponse(residency=residency_to_proto(residency))

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: Context
    ) -> worker_pb2.DrainResponse:
        """Refuses new requests; running ones finish."""
        self._api.drain()
        return worker_pb2.DrainResponse(running_requests=self._api.num_live)


def worker_service(config: WorkerConfig, api: ApiServer) -> grpc_server.Service:
    """The service for `grpc_server.start`."""
    add = worker_pb2_grpc.add_WorkerServiceServicer_to_server
    return add, WorkerServicer(config, api), "loraplex.v1.WorkerService"


async def _gateway_id(requests: AsyncIterator[worker_pb2.SessionRequest]) -> str:
    async for message in requests:
        if message.WhichOneof("message") == "hello":
            return message.hello.gateway_id
        break
    raise InvalidRequest.field("message", "not hello", "the first message must be hello")
