"""A worker at the wire whose tokens follow a script: a peer for gateway tests, with no model.

What a request answers is a function of its prompt, adapters, sample index and position only, as in
a real worker, so a request continued elsewhere must come out the same. Run as a program it is a
process of its own that can be killed for real.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from loraplex.api.error_wire import to_status
from loraplex.api.output import RoutedExperts, RoutingShape
from loraplex.api.wire import (
    logprobs_from_proto,
    routed_experts_to_proto,
    to_message,
)
from loraplex.errors import LoraplexError
from loraplex.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from tests.gateway.tiny_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, tokenizer_files
from tests.packing import packed_logprobs

ROUTING = RoutingShape(num_layers=3, num_active=2, expert_bytes=1)
Script = Callable[[worker_pb2.WorkerRequest], list[int]]


def answer_of(request: worker_pb2.WorkerRequest) -> list[int]:
    """A short text that depends on everything that identifies a sequence, then EOS."""
    prompt = bytes(i for i in request.prompt_ids if i < 256)
    who = ",".join(f"{a.digest[-4:]}*{a.weight:g}" for a in request.adapters) or "base"
    mark = hashlib.sha256(prompt + who.encode()).hexdigest()[:6]
    return [*f" {who}#{request.sample_index}:{mark} é€😀".encode(), EOS_ID]


def endless(request: worker_pb2.WorkerRequest) -> list[int]:
    """As many letters as anybody may ask for."""
    return [97 + position % 26 for position in range(request.sampling.max_tokens)]


def experts_of(start: int, end: int) -> RoutedExperts:
    """Of positions [start, end); they depend on the position alone."""
    size = ROUTING.token_bytes
    numbers = bytes((position + i) % 251 for position in range(start, end) for i in range(size))
    return RoutedExperts(start, ROUTING, numbers)


@dataclass(slots=True)
class _Live:
    """One running request of one session."""

    request: worker_pb2.WorkerRequest
    script: list[int]
    position: int


@dataclass(slots=True)
class _Peer:
    """One open session."""

    live: dict[str, _Live] = field(default_factory=dict)
    submitted: asyncio.Event = field(default_factory=asyncio.Event)
    acked_step: int = 0
    outbox: asyncio.Queue[worker_pb2.SessionResponse | None] = field(default_factory=asyncio.Queue)


class ScriptedWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Serves a script. Everything the tests look at or turn is a public attribute."""

    def __init__(
        self,
        worker_id: str = "w0",
        base_id: str = "base",
        *,
        script: Script = answer_of,
        step_s: float = 0.0,
        files: dict[str, bytes] | None = None,
        max_model_len: int = 512,
    ) -> None:
        self.worker_id = worker_id
        self.base_id = base_id
        self.script = script
        self.step_s = step_s
        self.files = tokenizer_files() if files is None else files
        self.max_model_len = max_model_len
        self.max_lora_rank = 256
        self.generation_config_json = ""
        self.quantization = ""
        self.has_experts = False
        self.ready = True
        self.draining = False
        self.held: tuple[worker_pb2.AdapterResidency, ...] = ()
        """Adapters that a new watcher hears of."""
        self.free_blocks = self.idle_blocks = self.total_blocks = self.queued_tokens = 0
        self.die_after_tokens: int | None = None
        """The sessions break once that many tokens were sent."""
        self.stands_at: int | None = None
        """Requests with that many output tokens get no more, until this is None again."""
        self.fail_next: list[common_pb2.ErrorDetail] = []
        """Failures for the next requests, first come first served."""
        self.requests: list[worker_pb2.WorkerRequest] = []
        self.cancelled: list[str] = []
        self.loads: list[str] = []
        """Digests that a gateway asked to load."""
        self.fail_loads: list[LoraplexError] = []
        """Errors for the next loads."""
        self.may_load = asyncio.Event()
        """While it is not set, loads do not end."""
        self.may_load.set()
        self.num_tokens_sent = 0
        self.num_tokenizers_sent = 0
        self._peers: list[_Peer] = []
        self._watchers: list[asyncio.Queue[worker_pb2.WatchStatusResponse]] = []
        self._sequence = 0
        self._step = 0

    @property
    def num_live(self) -> int:
        """Requests running now."""
        return sum(len(peer.live) for peer in self._peers)

    @property
    def is_all_acked(self) -> bool:
        """True when every gateway said that it has the newest step."""
        return all(peer.acked_step == self._step for peer in self._peers)

    async def GetModel(self, request: Any, context: Any) -> worker_pb2.GetModelResponse:
        self.num_tokenizers_sent += request.include_tokenizer
        files = [
            worker_pb2.TokenizerFile(name=name, content=content)
            for name, content in self.files.items()
            if request.include_tokenizer
        ]
        return worker_pb2.GetModelResponse(
            base_id=self.base_id,
            geometry=common_pb2.ModelGeometry(
                model_type="llama", fingerprint="sha256:" + "b" * 64, vocab_size=VOCAB_SIZE
            ),
            max_model_len=self.max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[EOS_ID],
            bos_token_id=BOS_ID,
            max_lora_rank=self.max_lora_rank,
            dtype="float32",
            kernels="torch",
            quantization=self.quantization,
            routing_bytes=ROUTING.token_bytes if self.has_experts else 0,
            numerics_fingerprint="scripted",
            tokenizer_digest=hashlib.sha256(b"".join(self.files.values())).hexdigest(),
            tokenizer_files=files,
            generation_config_json=self.generation_config_json,
            worker_id=self.worker_id,
            base_aliases=["org/base"],
        )

    async def WatchStatus(
        self, request: Any, context: Any
    ) -> AsyncGenerator[worker_pb2.WatchStatusResponse, None]:
        queue: asyncio.Queue[worker_pb2.WatchStatusResponse] = asyncio.Queue()
        self._watchers.append(queue)
        yield self._status(full=True)
        while True:
            yield await queue.get()

    def publish(self, *adapters: worker_pb2.AdapterResidency) -> None:
        """Tell the watchers how things are."""
        for queue in self._watchers:
            queue.put_nowait(self._status(full=False, adapters=adapters))

    def _status(
        self, *, full: bool, adapters: tuple[worker_pb2.AdapterResidency, ...] = ()
    ) -> worker_pb2.WatchStatusResponse:
        self._sequence += 1
        return worker_pb2.WatchStatusResponse(
            worker_id=self.worker_id,
            epoch=1,
            sequence=self._sequence,
            full=full,
            ready=self.ready,
            draining=self.draining,
            load=worker_pb2.WorkerLoad(
                running_requests=self.num_live,
                steps=self._step,
                free_blocks=self.free_blocks,
                idle_blocks=self.idle_blocks,
                total_blocks=self.total_blocks,
                step_s=self.step_s,
                queued_tokens=self.queued_tokens,
            ),
            adapters=self.held if full else adapters,
            base_id=self.base_id,
        )

    async def LoadAdapter(self, request: Any, context: Any) -> worker_pb2.LoadAdapterResponse:
        self.loads.append(request.digest)
        await self.may_load.wait()
        if self.fail_loads:
            status = to_status(self.fail_loads.pop(0))
            await context.abort(status.code, status.details, tuple(status.trailing_metadata))
        held = worker_pb2.AdapterResidency(
            digest=request.digest, tier=worker_pb2.ADAPTER_TIER_DEVICE
        )
        self.publish(held)
        return worker_pb2.LoadAdapterResponse(residency=held)

    async def Session(
        self, requests: Any, context: Any
    ) -> AsyncGenerator[worker_pb2.SessionResponse, None]:
        peer = _Peer()
        self._peers.append(peer)
        tasks = [
            asyncio.create_task(self._read(requests, peer)),
            asyncio.create_task(self._steps(peer)),
        ]
        try:
            while (message := await peer.outbox.get()) is not None:
                yield message
        finally:
            self._peers.remove(peer)
            for task in tasks:
                task.cancel()

    async def _read(self, requests: Any, peer: _Peer) -> None:
        async for message in requests:
            kind = message.WhichOneof("message")
            if kind == "hello":
                welcome = worker_pb2.SessionWelcome(worker_id=self.worker_id, epoch=1)
                peer.outbox.put_nowait(worker_pb2.SessionResponse(welcome=welcome))
            elif kind == "submit":
                self._submit(peer, message.submit)
            elif kind == "cancel":
                if peer.live.pop(message.cancel.request_id, None) is not None:
                    self.cancelled.append(message.cancel.request_id)
            else:
                peer.acked_step = message.ack.step

    def _submit(self, peer: _Peer, request: worker_pb2.WorkerRequest) -> None:
        self.requests.append(request)
        if self.fail_next:
            failure = worker_pb2.RequestFailure(
                request_id=request.request_id, error=self.fail_next.pop(0)
            )
            events = worker_pb2.StepEvents(step=self._step, failures=[failure])
            peer.outbox.put_nowait(worker_pb2.SessionResponse(events=events))
            return
        script = self.script(request)[: request.sampling.max_tokens]
        peer.live[request.request_id] = _Live(request, script, len(request.output_ids))
        peer.submitted.set()

    async def _steps(self, peer: _Peer) -> None:
        """One token for every live request a step."""
        while True:
            if not peer.live:
                peer.submitted.clear()
                await peer.submitted.wait()
            await asyncio.sleep(self.step_s or 0.001)
            moving = [(name, live) for name, live in peer.live.items() if not self._stands(live)]
            if not moving:
                continue
            self._step += 1
            events = worker_pb2.StepEvents(step=self._step)
            for request_id, live in moving:
                events.tokens.append(self._token(live))
                self.num_tokens_sent += 1
                if live.position == len(live.script):
                    del peer.live[request_id]
            peer.outbox.put_nowait(worker_pb2.SessionResponse(events=events))
            if self.die_after_tokens is not None and self.num_tokens_sent >= self.die_after_tokens:
                peer.outbox.put_nowait(None)
                return

    def _stands(self, live: _Live) -> bool:
        return self.stands_at is not None and live.position >= self.stands_at

    def _token(self, live: _Live) -> worker_pb2.TokenEvent:
        """Mutates: live."""
        request, token_id = live.request, live.script[live.position]
        event = worker_pb2.TokenEvent(
            request_id=request.request_id, token_ids=[token_id], output_position=live.position
        )
        if request.sampling.HasField("logprobs"):
            event.logprobs.append(_logprob(token_id, request.sampling.logprobs))
        if live.position == len(request.output_ids) and request.sampling.HasField(
            "prompt_logprobs"
        ):
            num_top = request.sampling.prompt_logprobs
            entries = [_logprob(prompt_id, num_top) for prompt_id in request.prompt_ids[1:]]
            packed = packed_logprobs(logprobs_from_proto(entries))
            event.prompt_logprobs.CopyFrom(to_message(packed, worker_pb2.PackedLogprobs))
        if request.HasField("routed_from") and self.has_experts:
            end = len(request.prompt_ids) + live.position
            is_first = live.position == len(request.output_ids)
            start = request.routed_from if is_first else end - 1
            event.routed_experts.CopyFrom(routed_experts_to_proto(experts_of(start, end)))
        live.position += 1
        if live.position == len(live.script):
            stops = token_id == EOS_ID or token_id in request.sampling.stop_token_ids
            event.finish_reason = (
                common_pb2.FINISH_REASON_STOP if stops else common_pb2.FINISH_REASON_LENGTH
            )
            event.timings.queue_s = 0.001
            if stops:
                event.stop_token_id = token_id
        return event


def _logprob(token_id: int, num_top: int) -> common_pb2.TokenLogprob:
    """The token itself is the likeliest, its neighbours follow."""
    entry = common_pb2.TokenLogprob(rank=1)
    entry.token.token_id, entry.token.logprob = token_id, -0.5
    for rank in range(num_top):
        entry.top.add(token_id=(token_id + rank) % VOCAB_SIZE, logprob=-0.5 - rank)
    return entry


async def start_worker(
    worker: ScriptedWorker, listen: str, credentials: grpc.ServerCredentials | None = None
) -> grpc.aio.Server:
    """Serve it at an address, over TLS with `credentials`."""
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    if credentials is None:
        server.add_insecure_port(listen)
    else:
        server.add_secure_port(listen, credentials)
    await server.start()
    return server


async def _serve(listen: str, worker_id: str, step_s: float) -> None:
    server = await start_worker(ScriptedWorker(worker_id, step_s=step_s), listen)
    await server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--worker-id", default="w0")
    parser.add_argument("--step-s", type=float, default=0.0)
    arguments = parser.parse_args()
    asyncio.run(_serve(arguments.listen, arguments.worker_id, arguments.step_s))
