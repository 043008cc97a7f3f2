"""Scripted gRPC servers on the public protocol, for what a real one does only when it fails."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from loraplex.errors import Unavailable
from loraplex.v1 import inference_pb2, inference_pb2_grpc, registry_pb2_grpc
from loraplex.v1 import registry_pb2 as pb
from loraplex_services.common.grpc.server import Service, start

REGISTRY = "loraplex.v1.RegistryService"
INFERENCE = "loraplex.v1.InferenceService"


@asynccontextmanager
async def serving(servicer: Any, **options: Any) -> AsyncIterator[str]:
    """The address of a server with this servicer."""
    service: Service
    if isinstance(servicer, registry_pb2_grpc.RegistryServiceServicer):
        service = (registry_pb2_grpc.add_RegistryServiceServicer_to_server, servicer, REGISTRY)
    else:
        add = inference_pb2_grpc.add_InferenceServiceServicer_to_server
        service = (add, servicer, INFERENCE)
    running = await start([service], ["127.0.0.1:0"], **options)
    try:
        yield f"127.0.0.1:{running.port}"
    finally:
        await running.stop(0)


class FlakyRegistry(registry_pb2_grpc.RegistryServiceServicer):
    """Takes uploads, but breaks the first `num_breaks` of their streams after `break_at` bytes."""

    def __init__(self, num_breaks: int = 0, break_at: int = 0) -> None:
        self.num_breaks = num_breaks
        self.break_at = break_at
        self.stored: dict[str, bytearray] = {}
        self.offsets: list[int] = []
        """First offset of each stream."""

    async def CreateUpload(self, request: Any, context: Any) -> pb.CreateUploadResponse:
        progress = []
        for spec in request.files:
            content = self.stored.setdefault(spec.path, bytearray())
            complete = hashlib.sha256(content).hexdigest() == spec.sha256
            progress.append(
                pb.FileProgress(path=spec.path, committed_bytes=len(content), complete=complete)
            )
        return pb.CreateUploadResponse(upload_id="u1", progress=progress)

    async def UploadPart(self, request_iterator: Any, context: Any) -> pb.UploadPartResponse:
        path = ""
        received = 0
        async for part in request_iterator:
            if not path:
                path = part.path
                self.offsets.append(part.offset)
            assert part.offset == len(self.stored[path])
            assert part.crc32 == zlib.crc32(part.data)
            self.stored[path] += part.data
            received += len(part.data)
            if self.num_breaks and received >= self.break_at:
                self.num_breaks -= 1
                raise Unavailable("going away", retry_after_s=0.01)
        return pb.UploadPartResponse()

    async def FinishUpload(self, request: Any, context: Any) -> pb.FinishUploadResponse:
        version = pb.AdapterVersion(tenant="default", name="a", version=1, digest="sha256:00")
        return pb.FinishUploadResponse(version=version, created=True)


class ScriptedDownload(registry_pb2_grpc.RegistryServiceServicer):
    """Declares `files` and sends `chunks`, whether they fit or not."""

    def __init__(self, files: Sequence[pb.FileSpec], chunks: Sequence[pb.FileChunk]) -> None:
        self._files = files
        self._chunks = chunks

    async def DownloadAdapter(
        self, request: Any, context: Any
    ) -> AsyncIterator[pb.DownloadAdapterResponse]:
        version = pb.AdapterVersion(tenant="default", name="a", version=1, files=self._files)
        yield pb.DownloadAdapterResponse(version=version)
        for chunk in self._chunks:
            yield pb.DownloadAdapterResponse(chunk=chunk)


class ScriptedGateway(inference_pb2_grpc.InferenceServiceServicer):
    """Remembers requests and streams `responses`; then waits if told to."""

    def __init__(
        self, responses: Sequence[inference_pb2.GenerateResponse], error: Exception | None = None
    ) -> None:
        self._responses = responses
        self._error = error
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.cancelled = False

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        try:
            for response in self._responses:
                yield response
            if self._error is not None:
                raise self._error
        except GeneratorExit:
            self.cancelled = True
            raise

    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        index = int(request.page_token or 0)
        model = inference_pb2.Model(id=f"m{index}", base_id="m0")
        token = "" if index == 2 else str(index + 1)
        return inference_pb2.ListModelsResponse(models=[model], next_page_token=token)
