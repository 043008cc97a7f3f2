"""All workers behind this gateway, and the bases that they serve."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from loraplex.errors import NotFound, Unavailable
from loraplex.v1 import worker_pb2
from loraplex_services.common.grpc.channels import PLAIN_CHANNELS, Channels
from loraplex_services.gateway.request import ServedModel, WorkerJob
from loraplex_services.gateway.text.template_pool import TemplatePool
from loraplex_services.gateway.text.tokenizer import BaseTokenizer, IdsOnly, ServedBase
from loraplex_services.gateway.workers.convert import base_from_wire
from loraplex_services.gateway.workers.link import Metadata, WorkerLink
from loraplex_services.gateway.workers.token_stream import TokenStream, WakeupPacer
from loraplex_services.gateway.workers.view import WorkerView

logger = logging.getLogger(__name__)

_DNS_REFRESH_S = 5.0
_SHARED_FACTS = (
    "geometry",
    "vocab_size",
    "eos_token_ids",
    "tokenizer_digest",
    "generation_config_json",
)
"""Facts that are the same for all workers of a base. The gateway uses those of the last one."""

BaseSeen = Callable[[worker_pb2.GetModelResponse], None]


class Fleet:
    """Owns one `WorkerLink` per address. A base stays known while its workers are unavailable."""

    def __init__(
        self,
        workers: Sequence[str],
        gateway_id: str,
        pool: TemplatePool,
        *,
        base_seen: BaseSeen,
        metadata: Metadata = (),
        channels: Channels = PLAIN_CHANNELS,
    ) -> None:
        """
        Args:
            workers: `HOST:PORT`, `unix:/path`, or `dns:NAME:PORT` for every address of a name; with
                TLS, the certificates of these workers contain NAME.
            base_seen: called when a base appears or is served otherwise than before.
        """
        self._static = [w for w in workers if not w.startswith("dns:")]
        self._names = [w.removeprefix("dns:").lstrip("/") for w in workers if w.startswith("dns:")]
        self._name_of: dict[str, str] = {}
        """Address -> the DNS name that it was found under."""
        self._gateway_id = gateway_id
        self._pool = pool
        self._base_seen = base_seen
        self._metadata = metadata
        self._channels = channels
        self._pacer = WakeupPacer()
        self._links: dict[str, tuple[WorkerLink, asyncio.Task[None]]] = {}
        self._models: dict[str, worker_pb2.GetModelResponse] = {}
        """The base of the worker at each address, as last reported, without the tokenizer."""
        self._bases: dict[str, ServedBase] = {}
        self._change = asyncio.Event()

    def bases(self) -> Mapping[str, ServedModel]:
        """Bases in the order they were first seen."""
        return {base_id: served.model for base_id, served in self._bases.items()}

    def served(self, base_id: str) -> ServedBase:
        """A base. Raises: NotFound."""
        try:
            return self._bases[base_id]
        except KeyError:
            raise NotFound(f"no base {base_id!r} is served here") from None

    def views(self, base_id: str | None = None) -> list[WorkerView]:
        """Views of a base's workers, or of all."""
        views = [link.view() for link, _ in self._links.values()]
        return [view for view in views if base_id is None or view.base_id == base_id]

    def submit(self, address: str, job: WorkerJob) -> TokenStream:
        """Start a job on the worker at an address. Raises: Unavailable."""
        link, _ = self._links[address]
        return link.submit(job)

    async def load(
        self, address: str, digest: str, timeout_s: float, *, when_fetched: bool = False
    ) -> None:
        """Load an adapter on the worker at an address: see `WorkerLink.load`. Raises:
        LoraplexError."""
        if address not in self._links:
            raise Unavailable(f"worker {address} has left")
        link, _ = self._links[address]
        await link.load(digest, timeout_s, when_fetched=when_fetched)

    async def next_change(self) -> None:
        """Wait until any view changed."""
        await self._change.wait()

    async def run(self) -> None:
        """Keep a link to every worker until cancelled; DNS names are resolved regularly."""
        try:
            while True:
                addresses = dict.fromkeys([*self._static, *await self._looked_up()])
                await self._keep(list(addresses))
                await asyncio.sleep(_DNS_REFRESH_S if self._names else 3600.0)
        finally:
            await self._keep([])

    async def _keep(self, addresses: list[str]) -> None:
        """Open missing links, and close those that are no longer wanted."""
        for address in addresses:
            if address not in self._links:
                name = self._name_of.get(address)
                link = WorkerLink(
                    address,
                    self._gateway_id,
                    model_seen=partial(self._model_seen, address),
                    changed=self._announce,
                    metadata=self._metadata,
                    channels=self._channels.to_name(name) if name else self._channels,
                    pacer=self._pacer,
                )
                self._links[address] = (link, asyncio.create_task(link.run()))
        for address in [known for known in self._links if known not in addresses]:
            link, task = self._links.pop(address)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await link.close()
            self._forget_model(address)
            self._announce()

    async def _looked_up(self) -> list[str]:
        """Addresses of the DNS names; a failed look-up keeps the previous addresses."""
        lookups: list[Awaitable[list[str]]] = [self._resolve(name) for name in self._names]
        return [address for found in await asyncio.gather(*lookups) for address in found]

    async def _resolve(self, name: str) -> list[str]:
        host, _, port = name.rpartition(":")
        try:
            infos = await asyncio.get_running_loop().getaddrinfo(
                host, int(port), type=socket.SOCK_STREAM
            )
        except OSError as error:
            logger.warning("DNS look-up failed", extra={"host": name, "error": str(error)})
            return [address for address in self._links if address not in self._static]
        addresses = sorted({_address(info[4][0], int(port)) for info in infos})
        self._name_of |= dict.fromkeys(addresses, host)
        return addresses

    async def _model_seen(self, address: str, message: worker_pb2.GetModelResponse) -> bool:
        """Record a base; returns False if its tokenizer files are needed too."""
        known = self._bases.get(message.base_id)
        if known is not None and known.model.tokenizer_digest == message.tokenizer_digest:
            tokenizer = known.tokenizer
        elif message.tokenizer_digest and not message.tokenizer_files:
            return False
        else:
            tokenizer = await asyncio.to_thread(_tokenizer, message, self._pool)
        message.ClearField("tokenizer_files")
        before = self._models.get(address)
        if before is not None and before.base_id != message.base_id:
            self._forget_model(address)
        self._models[address] = message
        self._serve(message, tokenizer)
        return True

    def _serve(
        self, message: worker_pb2.GetModelResponse, tokenizer: BaseTokenizer | IdsOnly
    ) -> None:
        """Serve a base as one of its workers describes it, within the limits of all of them,
        because any worker may get a request."""
        base_id = message.base_id
        served = worker_pb2.GetModelResponse()
        served.CopyFrom(message)
        workers = [each for each in self._models.values() if each.base_id == base_id]
        for each in workers:
            served.max_model_len = min(served.max_model_len, each.max_model_len)
            served.max_lora_rank = min(served.max_lora_rank, each.max_lora_rank)
            served.routing_bytes = min(served.routing_bytes, each.routing_bytes)
            served.caps_context |= each.caps_context
        _warn_if_unlike(message, workers)
        model, known = base_from_wire(served, time.time()), self._bases.get(base_id)
        if known is not None:
            model = replace(model, created_unix_s=known.model.created_unix_s)
        if known == ServedBase(model, tokenizer):
            return
        self._bases[base_id] = ServedBase(model, tokenizer)
        self._base_seen(served)
        fields = {"base": base_id, "max_model_len": model.max_model_len}
        logger.info("base available", extra=fields)

    def _forget_model(self, address: str) -> None:
        """Serve a base without the limits of a worker that has left it for good."""
        gone = self._models.pop(address, None)
        left = [m for m in self._models.values() if gone and m.base_id == gone.base_id]
        if left:
            self._serve(left[-1], self._bases[left[-1].base_id].tokenizer)

    def _announce(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


def _tokenizer(message: worker_pb2.GetModelResponse, pool: TemplatePool) -> BaseTokenizer | IdsOnly:
    files = {file.name: file.content for file in message.tokenizer_files}
    if "tokenizer.json" not in files:
        logger.warning("base without tokenizer.json", extra={"base": message.base_id})
        return IdsOnly()
    return BaseTokenizer(files, pool)


def _warn_if_unlike(
    message: worker_pb2.GetModelResponse, others: Sequence[worker_pb2.GetModelResponse]
) -> None:
    """Log what a worker reports differently from the other workers of its base."""
    unlike = [
        name
        for name in _SHARED_FACTS
        if any(getattr(message, name) != getattr(other, name) for other in others)
    ]
    if unlike:
        fields = {"base": message.base_id, "worker": message.worker_id, "fields": " ".join(unlike)}
        logger.warning("a worker differs from others of its base", extra=fields)


def _address(host: str | int, port: int) -> str:
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
