"""Gateways and workers under a virtual clock: the real gateway with simulated workers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from loraplex.api.tenants import TenantLimits
from loraplex.errors import LoraplexError
from loraplex.v1 import common_pb2, worker_pb2
from loraplex_services.common.grpc.channels import Channels
from loraplex_services.gateway.admission.concurrency import TenantConcurrency
from loraplex_services.gateway.admission.controller import AdmissionController
from loraplex_services.gateway.admission.dispatch_window import ready_workers
from loraplex_services.gateway.admission.queue import AdmissionLimits
from loraplex_services.gateway.admission.rate_limit_store import RedisRateLimitStore
from loraplex_services.gateway.admission.rates import TenantRates
from loraplex_services.gateway.pipeline.admission_steps import AdmissionSteps
from loraplex_services.gateway.pipeline.choice_text import ChoiceText
from loraplex_services.gateway.pipeline.generation import Generation
from loraplex_services.gateway.pipeline.live import LiveRequests
from loraplex_services.gateway.pipeline.prepared import PreparedRequest
from loraplex_services.gateway.registry.resolve import Resolver
from loraplex_services.gateway.registry.tenants import TenantDirectory
from loraplex_services.gateway.request import GenerateCall, TextDelta
from loraplex_services.gateway.routing.relay import Relay
from loraplex_services.gateway.text.adapter_text import AdapterText
from loraplex_services.gateway.text.template_pool import TemplatePool
from loraplex_services.gateway.workers.convert import job_to_wire, tokens_from_wire
from loraplex_services.gateway.workers.fleet import Fleet
from tests.gateway.simulated.network import Channel, Way
from tests.gateway.simulated.shared import SimulatedRedis, SimulatedRegistry
from tests.gateway.simulated.worker import SimulatedWorker, Speed, whole_answer

MAX_REQUEST_S = 600.0


class SimulatedChannels(Channels):
    """Opens the way to a worker."""

    def __init__(self, house: House) -> None:
        super().__init__()
        self._house = house

    def open(self, address: str) -> Any:
        worker = self._house.workers[address]
        return Channel(worker.way, worker)


class SimulatedGateway:
    """A gateway without its servers."""

    def __init__(self, house: House, name: str, limits: AdmissionLimits) -> None:
        self.name = name
        self.fleet = Fleet(
            sorted(house.workers),
            name,
            TemplatePool(),
            base_seen=lambda message: None,
            channels=SimulatedChannels(house),
        )
        self.resolver = Resolver(house.registry, self.fleet.bases)
        self.resolver.snapshot = house.registry.snapshot(house.known)
        self.controller = AdmissionController(limits, lambda: ready_workers(self.fleet.views()))
        client: Any = house.redis
        self.rate_limit_store = RedisRateLimitStore(client, name)
        self.concurrency = TenantConcurrency(self.rate_limit_store, self.controller)
        self.relay = Relay(self.fleet)
        self.generation = Generation(
            self.resolver,
            self.fleet,
            AdapterText(house.registry.read_files),
            self.relay,
            LiveRequests(self.resolver, self.fleet),
            AdmissionSteps(
                TenantDirectory(house.limits_of),
                TenantRates(self.rate_limit_store),
                self.concurrency,
                self.controller,
                self.fleet,
            ),
            max_request_s=MAX_REQUEST_S,
            draw_seed=lambda: house.rng.getrandbits(64),
        )
        self._tasks = [
            asyncio.create_task(run)
            for run in (
                self.fleet.run(),
                self.rate_limit_store.run(),
                self.concurrency.run(),
                self.controller.follow(self.fleet.next_change),
            )
        ]

    @property
    def num_ready(self) -> int:
        """Workers that it may send requests to."""
        return sum(view.takes_requests for view in self.fleet.views())

    async def close(self) -> None:
        """End its tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@dataclass(slots=True)
class Seen:
    """What one client got."""

    prepared: PreparedRequest | None = None
    text_deltas: list[TextDelta] = field(default_factory=list)
    error: BaseException | None = None
    left: bool = False
    """The client went away by itself."""
    num_ready: int = 0
    """Workers ready when the error came."""
    began_s: float = 0.0
    first_s: float = 0.0
    ended_s: float = 0.0

    @property
    def is_whole(self) -> bool:
        """True when every choice ended."""
        return self.error is None and not self.left


class House:
    """Owns everything of one run."""

    def __init__(
        self,
        seed: int,
        *,
        workers: Sequence[str],
        adapters: Sequence[str] = (),
        known: Sequence[str] | None = None,
        speed: Speed | None = None,
    ) -> None:
        """`known`: adapters of the gateways' first snapshot; None = all."""
        self.rng = random.Random(seed)
        self.workers = {
            name: SimulatedWorker(name, Way(random.Random(f"{seed}/{name}")), speed or Speed())
            for name in workers
        }
        self.gone: dict[str, float] = {}
        for worker in self.workers.values():
            worker.gone = self.gone
        self.registry = SimulatedRegistry(adapters)
        self.known = list(adapters if known is None else known)
        self.redis = SimulatedRedis()
        self.tenants: dict[str, TenantLimits] = {}
        self.gateways: list[SimulatedGateway] = []

    async def limits_of(self, tenant: str) -> TenantLimits:
        """A tenant as the registry knows it."""
        return self.tenants.get(tenant, TenantLimits(tenant))

    async def start(self, num_gateways: int, limits: AdmissionLimits) -> None:
        """Open the gateways and wait until every worker is ready at each."""
        self.gateways = [SimulatedGateway(self, f"g{i}", limits) for i in range(num_gateways)]
        while any(gateway.num_ready < len(self.workers) for gateway in self.gateways):
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """End everything."""
        for gateway in self.gateways:
            await gateway.close()
        for worker in self.workers.values():
            worker.kill()

    async def ask(
        self, gateway: SimulatedGateway, call: GenerateCall, leave_after: int | None = None
    ) -> Seen:
        """Run a call as a server would; the client leaves after some pieces."""
        loop = asyncio.get_running_loop()
        seen = Seen(began_s=loop.time())
        try:
            seen.prepared = await gateway.generation.prepare(call)
            async with aclosing(gateway.generation.run(seen.prepared)) as text_deltas:
                async for text_delta in text_deltas:
                    seen.first_s = seen.first_s or loop.time()
                    seen.text_deltas.append(text_delta)
                    if leave_after is not None and len(seen.text_deltas) >= leave_after:
                        seen.left = True
                        break
        except LoraplexError as error:
            seen.error, seen.num_ready = error, gateway.num_ready
        finally:
            seen.ended_s = self.gone[call.request_id] = loop.time()
        return seen


def undisturbed(prepared: PreparedRequest, index: int) -> TextDelta:
    """A whole choice as one piece, as a worker that nothing happens to would have given it."""
    job = prepared.job(index)
    request = job_to_wire(job, "", 0.0)
    ids = whole_answer(request)
    ends = ids[-1] in prepared.base.eos_token_ids
    event = worker_pb2.TokenEvent(token_ids=ids)
    event.finish_reason = common_pb2.FINISH_REASON_STOP if ends else common_pb2.FINISH_REASON_LENGTH
    if ends:
        event.stop_token_id = ids[-1]
    text = ChoiceText(index, prepared.tokens, prepared.resolved.text)
    return text.add(tokens_from_wire(event, ""), job.request.sampling.stop_token_ids)
