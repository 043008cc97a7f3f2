"""The connection to one worker: its model, its status and its session. Reconnects until closed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc

from loraplex.api.error_wire import from_rpc_error
from loraplex.api.wire import load_from_proto, residency_from_proto
from loraplex.errors import LoraplexError, Unavailable
from loraplex.v1 import worker_pb2, worker_pb2_grpc
from loraplex_services.common.grpc.channels import PLAIN_CHANNELS, Channels
from loraplex_services.gateway.clock import now_s
from loraplex_services.gateway.request import WorkerJob
from loraplex_services.gateway.workers.session import OPEN_TIMEOUT_S, WorkerSession
from loraplex_services.gateway.workers.token_stream import TokenStream, WakeupPacer
from loraplex_services.gateway.workers.view import WorkerView

logger = logging.getLogger(__name__)

STALE_S = 5.0
"""A worker with our requests that sends nothing for this long is chosen last."""
SILENT_CHECKS = 10
"""Checks, one second apart, without a message in between before a worker counts as lost: its API
server reports every second, whatever its engine does."""
_CHECK_S = 1.0
_TOKENIZER_TIMEOUT_S = 30.0
"""Its files may have many megabytes; everything else is answered within the time of a handshake."""
_RETRY_S = (0.05, 0.1, 0.2, 0.3, 0.5)

ModelSeen = Callable[[worker_pb2.GetModelResponse], Awaitable[bool]]
"""Receives a model; if it returns False, the model is requested again with its tokenizer files."""
Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class _Shown:
    """The last view that includes this gateway's requests; cached because one request reads it
    several times."""

    base: WorkerView
    own: dict[str, Any]
    """The fields that differ from `base`."""
    view: WorkerView


class WorkerLink:
    """Connection, view and session of one worker address."""

    def __init__(
        self,
        address: str,
        gateway_id: str,
        *,
        model_seen: ModelSeen,
        changed: Callable[[], None],
        metadata: Metadata = (),
        channels: Channels = PLAIN_CHANNELS,
        pacer: WakeupPacer | None = None,
    ) -> None:
        """`model_seen` is awaited for each connection, `changed` called when the view changed."""
        self._channels = channels
        self._open(address)
        self._gateway_id = gateway_id
        self._model_seen = model_seen
        self._changed = changed
        self._metadata = metadata
        self._pacer = pacer or WakeupPacer()
        self._session: WorkerSession | None = None
        self._last_message_s = 0.0
        self._view = WorkerView(worker_id=address, address=address, base_id="")
        self._shown = _Shown(self._view, {}, self._view)

    def _open(self, address: str) -> None:
        self._channel_version = self._channels.version
        self._channel = self._channels.open(address)
        self._stub = worker_pb2_grpc.WorkerServiceStub(self._channel)

    def view(self) -> WorkerView:
        """The current view, with our own requests counted."""
        session = self._session
        if session is None:
            return self._view
        silent_s = now_s() - self._last_message_s
        own: dict[str, Any] = {
            "connected": session.is_open,
            "in_flight": session.in_flight,
            "in_flight_tokens": session.in_flight_tokens,
            "stale": session.in_flight > 0 and silent_s > STALE_S,
            "requested": session.adapters,
        }
        if self._shown.base is not self._view or self._shown.own != own:
            self._shown = _Shown(self._view, own, replace(self._view, **own))
        return self._shown.view

    def submit(self, job: WorkerJob) -> TokenStream:
        """Start a job. Raises: Unavailable if the worker is not connected."""
        if self._session is None:
            raise Unavailable(f"worker {self._view.worker_id} is not connected")
        return self._session.submit(job)

    async def load(self, digest: str, timeout_s: float, *, when_fetched: bool = False) -> None:
        """Load an adapter; returns when a step could use it, or as `when_fetched` in worker.proto
        says. Raises: LoraplexError."""
        try:
            await self._stub.LoadAdapter(
                worker_pb2.LoadAdapterRequest(digest=digest, when_fetched=when_fetched),
                timeout=timeout_s,
                metadata=self._metadata,
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def run(self) -> None:
        """Connect and serve until the connection breaks; repeat until cancelled."""
        failures, problem = 0, ""
        while True:
            try:
                await self._connected()
            except LoraplexError as error:
                if self._view.connected:
                    failures = 0
                    logger.warning("worker lost", extra=self._log_fields(error))
                elif error.message != problem:
                    logger.info("worker not reachable", extra=self._log_fields(error))
                problem = error.message
            except Exception:
                logger.exception("worker connection failed", extra=self._log_fields(None))
            self._disconnect()
            await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
            failures += 1

    async def close(self) -> None:
        """Close the channel; running requests there fail."""
        self._disconnect()
        await self._channel.close(None)

    async def _connected(self) -> None:
        """Run one connection from its first call to its end. Raises: LoraplexError."""
        if self._channel_version != self._channels.version:
            await self._channel.close(None)
            self._open(self._view.address)
        model = await self._get_model(include_tokenizer=False)
        if not await self._model_seen(model):
            await self._model_seen(await self._get_model(include_tokenizer=True))
        session = WorkerSession(self._stub, self._metadata, self._pacer)
        await session.open(self._gateway_id)
        self._session = session
        self._view = replace(
            self._view,
            worker_id=session.worker_id or model.worker_id or self._view.address,
            base_id=model.base_id,
            epoch=session.epoch,
            connected=True,
        )
        self._view = _with_arithmetic(self._view, model)
        self._note_message()
        self._changed()
        logger.info("worker connected", extra=self._log_fields(None))
        await _first_failure(session.run(self._note_message), self._watch(), self._detect_silence())

    async def _get_model(self, *, include_tokenizer: bool) -> worker_pb2.GetModelResponse:
        try:
            model: worker_pb2.GetModelResponse = await self._stub.GetModel(
                worker_pb2.GetModelRequest(include_tokenizer=include_tokenizer),
                timeout=_TOKENIZER_TIMEOUT_S if include_tokenizer else OPEN_TIMEOUT_S,
                metadata=self._metadata,
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return model

    async def _watch(self) -> None:
        call = self._stub.WatchStatus(worker_pb2.WatchStatusRequest(), metadata=self._metadata)
        try:
            async for message in call:
                self._note_message()
                if message.epoch != self._view.epoch:  # another engine: it may compute otherwise
                    model = await self._get_model(include_tokenizer=False)
                    self._view = _with_arithmetic(self._view, model)
                self._view = updated(self._view, message)
                self._changed()
            raise Unavailable(f"worker {self._view.worker_id} ended its status stream")
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()

    async def _detect_silence(self) -> None:
        """Raises: Unavailable if the worker sends nothing for long although it is connected.

        Counts checks instead of seconds, because a gateway that was suspended received nothing.
        """
        silent, last_message_s = 0, self._last_message_s
        while silent < SILENT_CHECKS:
            await asyncio.sleep(_CHECK_S)
            silent = silent + 1 if last_message_s == self._last_message_s else 0
            last_message_s = self._last_message_s
        raise Unavailable(f"worker {self._view.worker_id} is unresponsive", reason="WORKER_SILENT")

    def _note_message(self) -> None:
        self._last_message_s = now_s()

    def _disconnect(self) -> None:
        was_connected = self._view.connected
        self._session = None
        self._view = replace(self._view, connected=False, ready=False, adapters={})
        if was_connected:
            self._changed()

    def _log_fields(self, error: LoraplexError | None) -> dict[str, str]:
        fields = {"address": self._view.address, "worker": self._view.worker_id}
        if error is not None:
            fields |= {"reason": error.reason, "problem": error.message}
        return fields


def updated(view: WorkerView, message: worker_pb2.WatchStatusResponse) -> WorkerView:
    """The view after a status message: a snapshot replaces the adapters, a delta changes some."""
    adapters = {} if message.full else dict(view.adapters)
    for entry in message.adapters:
        if entry.tier == worker_pb2.ADAPTER_TIER_UNSPECIFIED:
            adapters.pop(entry.digest, None)
        else:
            adapters[entry.digest] = residency_from_proto(entry)
    return replace(
        view,
        epoch=message.epoch,
        ready=message.ready,
        draining=message.draining,
        load=load_from_proto(message.load) if message.HasField("load") else view.load,
        adapters=adapters,
    )


def _with_arithmetic(view: WorkerView, model: worker_pb2.GetModelResponse) -> WorkerView:
    """The view with what the worker computes with."""
    return replace(
        view,
        numerics=model.numerics_fingerprint,
        dtype=model.dtype,
        kernels=model.kernels,
        quantization=model.quantization,
    )


async def _first_failure(*runs: Awaitable[None]) -> None:
    """Run all until one ends, cancel the others, and raise what that one raised.

    Raises: Unavailable if one was cancelled from within, as calls are when this side closes them.
    With `FIRST_EXCEPTION`, the wait would continue, and the worker would look connected without a
    session.
    """
    tasks = [asyncio.ensure_future(run) for run in runs]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task.cancelled():
                raise Unavailable("a call to the worker was cancelled", reason="WORKER_LOST")
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
