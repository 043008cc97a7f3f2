"""One seeded run: what clients ask, what goes wrong meanwhile, and what must be true after it."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from dataclasses import dataclass

from loraplex.api.request import TokenPrompt
from loraplex.api.sampling import Sampling
from loraplex.api.tenants import TenantLimits
from loraplex.errors import LoraplexError, Unavailable
from loraplex_services.gateway.admission.queue import AdmissionLimits
from loraplex_services.gateway.request import GenerateCall
from loraplex_services.gateway.workers.link import SILENT_CHECKS
from tests.gateway.simulated.house import House, Seen, SimulatedGateway, undisturbed
from tests.gateway.simulated.worker import BASE_ID, SimulatedWorker, Speed

NUM_ADAPTERS = 6
BUSY_S = 2.0
"""Requests arrive and faults begin in this time."""
RATE = 6.0
"""Requests a second of the tenant that has a limit."""
PLACES = 3
"""Sequences at once of the tenant that is capped."""
FAULTS = (
    *("kill", "kill", "kill", "cut", "restart", "give up", "drain"),
    *("slow", "stall", "silence", "full", "registry", "redis"),
)
_HOLD_UP = ("stall", "silence", "slow")
"""A cancel comes late there."""
REFUSALS = {
    "QUEUE_FULL",
    "TENANT_QUEUE_FULL",
    "TENANT_REQUESTS_PER_S",
    "TENANT_TOKENS_PER_S",
    "DEADLINE_INFEASIBLE",
    "REGISTRY_UNAVAILABLE",
    "ADAPTER_NOT_FOUND",
    "DRAINING",
}
"""Reasons for which a request may be refused before any work."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong with one worker for a while."""

    at_s: float
    kind: str
    worker: str
    lasts_s: float


class Chaos:
    """Everything of a run follows from its seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"chaos/{seed}")
        names = [f"w{number}" for number in range(self.rng.randint(1, 4))]
        adapters = [f"a{number}" for number in range(NUM_ADAPTERS)]
        self.house = House(
            seed,
            workers=names,
            adapters=adapters,
            known=adapters[: NUM_ADAPTERS - 2],
            speed=Speed(batch=self.rng.choice([2, 8]), slots=self.rng.choice([3, 8])),
        )
        self.house.tenants["limited"] = TenantLimits("limited", requests_per_s=RATE)
        self.house.tenants["capped"] = TenantLimits("capped", max_concurrent=PLACES)
        self.most_capped = 0
        self.limits = AdmissionLimits(
            max_running=self.rng.choice([4, 64]), max_waiting=self.rng.choice([4, 64])
        )
        self.num_gateways = self.rng.choice([1, 1, 2])
        self.faults = sorted(
            (self._fault(names) for _ in range(self.rng.randint(0, 5))), key=lambda f: f.at_s
        )
        self.seen: list[Seen] = []

    def _fault(self, names: list[str]) -> Fault:
        kind = self.rng.choice(FAULTS)
        at_s, lasts_s = self.rng.uniform(0.0, BUSY_S), self.rng.uniform(0.05, 2.0)
        if kind == "silence":
            lasts_s += SILENT_CHECKS + 2.0
        return Fault(at_s, kind, self.rng.choice(names), lasts_s)

    async def run(self) -> None:
        """The whole run. Raises: AssertionError."""
        house = self.house
        await house.start(self.num_gateways, self.limits)
        faults = [asyncio.create_task(self._happen(fault)) for fault in self.faults]
        clients = [asyncio.create_task(self._client(n)) for n in range(self.rng.randint(8, 24))]
        watching = asyncio.create_task(self._watch_places())
        self.seen = await asyncio.gather(*clients)
        watching.cancel()
        await asyncio.gather(*faults)
        await asyncio.sleep(1.0)
        try:
            self.check()
        finally:
            await house.close()

    async def _client(self, number: int) -> Seen:
        rng = random.Random(self.rng.getrandbits(32))
        await asyncio.sleep(rng.uniform(0.0, BUSY_S))
        gateway = rng.choice(self.house.gateways)
        leaves = rng.randint(1, 6) if rng.random() < 0.15 else None
        asking = self.house.ask(gateway, _call(rng, number), leaves)
        if rng.random() > 0.15:
            return await asking
        # Its connection breaks, wherever the request is by then; several at the same moment.
        try:
            loop = asyncio.get_running_loop()
            async with asyncio.timeout_at(math.ceil(loop.time() * 4 + rng.random()) / 4):
                return await asking
        except TimeoutError:
            return Seen(left=True)

    async def _watch_places(self) -> None:
        while True:
            running = sum(g.controller.queue.num_running_of("capped") for g in self.house.gateways)
            self.most_capped = max(self.most_capped, running)
            await asyncio.sleep(0.01)

    async def _happen(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_s)
        worker = self.house.workers[fault.worker]
        match fault.kind:
            case "registry":
                self.house.registry.is_away = True
            case "redis":
                self.house.redis.is_away = True
            case "restart":
                worker.fail_rows(Unavailable("the engine restarts"))
            case "give up":
                worker.fail_rows(None)
            case "cut":
                worker.way.break_all()
            case "stall" | "silence":
                until_s = asyncio.get_running_loop().time() + fault.lasts_s
                worker.way.stalled_until_s = until_s
            case _ if worker.is_up:
                _begin(worker, fault.kind)
        await asyncio.sleep(fault.lasts_s)
        if fault.kind in ("registry", "redis"):
            self.house.registry.is_away = self.house.redis.is_away = False
        _end(worker, fault.kind)

    # What must be true.

    def check(self) -> None:
        """Raises: AssertionError."""
        for seen in self.seen:
            self._check_stream(seen)
        for gateway in self.house.gateways:
            _check_quiet(gateway)
        for worker in self.house.workers.values():
            assert worker.num_live == 0, f"{worker.name} still runs {worker.num_live}"
            if not any(f.kind in _HOLD_UP and f.worker == worker.name for f in self.faults):
                assert worker.num_overrun == 0, "computed for clients that had gone"
        self._check_rate()
        if not any(fault.kind == "redis" for fault in self.faults):
            assert self.most_capped <= PLACES, f"{self.most_capped} places of {PLACES}"

    def _check_stream(self, seen: Seen) -> None:
        if seen.error is not None:
            self._check_error(seen)
        if seen.prepared is None:
            return
        for index in range(seen.prepared.resolved.num_choices):
            text_deltas = [
                text_delta for text_delta in seen.text_deltas if text_delta.index == index
            ]
            ids = tuple(i for text_delta in text_deltas for i in text_delta.token_ids)
            text = "".join(text_delta.text for text_delta in text_deltas)
            whole = undisturbed(seen.prepared, index)
            assert ids == whole.token_ids[: len(ids)], "other tokens than undisturbed"
            assert whole.text.startswith(text), "other text than undisturbed"
            if seen.is_whole:
                assert (ids, text) == (whole.token_ids, whole.text), "cut short"
                end = (text_deltas[-1].finish_reason, text_deltas[-1].stop_reason)
                assert end == (whole.finish_reason, whole.stop_reason)

    def _check_error(self, seen: Seen) -> None:
        error = seen.error
        assert isinstance(error, LoraplexError)
        reason = error.reason
        has_deadline = seen.prepared is not None and seen.prepared.call.timeout_s is not None
        if reason == "DEADLINE_EXCEEDED":
            assert has_deadline, "nobody asked for a deadline"
        elif reason == "NO_READY_WORKER":
            assert seen.num_ready == 0, "a worker was ready"
            assert not seen.text_deltas, "a stream that had begun was lost"
        else:
            assert reason in REFUSALS, f"{reason}: {error}"
            assert not seen.text_deltas, f"a stream that had begun was lost: {reason}"

    def _check_rate(self) -> None:
        """Away or not, the metadata server bounds what a limited tenant gets."""
        num_run = sum(
            seen.prepared is not None
            and seen.prepared.call.tenant == "limited"
            and getattr(seen.error, "reason", "") != "TENANT_REQUESTS_PER_S"
            for seen in self.seen
        )
        most = RATE * BUSY_S + RATE + len(self.house.gateways) * 2 * RATE
        assert num_run <= most, f"{num_run} requests of a tenant that may have {most}"

    def outcomes(self) -> Counter[str]:
        """How many requests ended how."""
        return Counter("left" if s.left else getattr(s.error, "reason", "whole") for s in self.seen)


def _begin(worker: SimulatedWorker, kind: str) -> None:
    match kind:
        case "kill":
            worker.kill()
        case "slow":
            worker.slow = 20.0
        case "drain":
            worker.drain()
        case "full":
            worker.max_waiting = 0


def _end(worker: SimulatedWorker, kind: str) -> None:
    worker.slow, worker.max_waiting = 1.0, None
    if kind == "drain" and worker.is_up:
        worker.kill()
    if not worker.is_up:
        worker.start()


def _check_quiet(gateway: SimulatedGateway) -> None:
    queue = gateway.controller.queue
    assert queue.num_running == 0, f"{queue.num_running} places leaked"
    assert queue.num_waiting == 0, "somebody still waits"
    for view in gateway.fleet.views():
        assert (view.in_flight, view.in_flight_tokens) == (0, 0), f"{view.worker_id} leaks"
    assert gateway.relay.num_running == 0, "home sets leak"


def _call(rng: random.Random, number: int) -> GenerateCall:
    """Any request."""
    tenant = rng.choice(["default", "default", "other", "limited", "capped"])
    adapter = rng.choice([f"default/a{rng.randrange(NUM_ADAPTERS)}", BASE_ID, "default/a0"])
    sampling = Sampling(
        max_tokens=rng.randint(1, 40),
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.choice([None, rng.getrandbits(32)]),
        n=rng.choice([None, None, 2]) if tenant != "capped" else None,
        ignore_eos=rng.random() < 0.3,
        stop=rng.choice([(), (), (chr(rng.randrange(32, 127)), "ab")]),
    )
    return GenerateCall(
        request_id=f"r{number}",
        tenant=tenant,
        model="default/nobody" if rng.random() < 0.03 else adapter,
        prompt=TokenPrompt(tuple(rng.randrange(256) for _ in range(rng.choice([3, 30, 300])))),
        sampling=sampling,
        priority=rng.choice([0, 0, -1]),
        timeout_s=rng.uniform(0.1, 3.0) if rng.random() < 0.2 else None,
    )
