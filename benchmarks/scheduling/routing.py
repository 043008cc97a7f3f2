"""Simulated: share of requests that the router sends to a worker that holds their adapter.

    python -m benchmarks run scheduling.routing [--requests 20000] [--seed 0]

Four workers with eight adapter slots each serve 64 adapters of Zipf popularity. A full worker
evicts the least recently used adapter, or the one that was used least in the recent past. A request
whose adapter is not resident waits for a load. Compared are the router, round robin, and random
choice. Prints the share of requests that reach a worker that holds their adapter, the same over the
best possible share, and first-token times, also over round robin. The best possible share is that
of the 32 most popular adapters: what one copy of each could serve if no other adapter were ever
loaded. The oracle knows the future and has all slots on one worker, which is an upper bound.
Deterministic: the machine's clock is not read.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.machine import options_of
from loraplex.api.residency import AdapterResidency, Tier, WorkerLoad
from loraplex_services.gateway.routing.router import ReplicaCounts, RoutingRequest, choose
from loraplex_services.gateway.workers.view import WorkerView

NUM_WORKERS, NUM_SLOTS, NUM_ADAPTERS = 4, 8, 64
EXPONENTS = (1.0, 1.2, 1.5, 2.0)
STEP_S, LOAD_S, PREFILL_TOKENS_PER_S = 0.025, 0.1, 4000.0
PROMPT_TOKENS, OUTPUT_TOKENS, BATCH = 64, 24, 16
ARRIVALS_PER_S = 60.0
FORGET_S = 60.0
"""The weight of a use decays with its age: to 1/e after this many seconds."""


@dataclass(slots=True)
class Request:
    """One request and when it came."""

    adapter: str
    arrival_s: float


@dataclass(slots=True)
class Worker:
    """A batch of sequences, slots of adapters used last, one load at a time."""

    name: str
    keeps_popular: bool = False
    slots: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """Adapter -> when it is loaded; used longest ago first."""
    heat: dict[str, float] = field(default_factory=dict)
    """Logarithm of each adapter's uses, each grown by its time: comparable at any moment."""
    users: dict[str, int] = field(default_factory=dict)
    ends: list[float] = field(default_factory=list)
    """When running sequences end; a heap."""
    copying_until_s: float = 0.0

    def view(self, now_s: float) -> WorkerView:
        """The worker's state as a gateway receives it."""
        held = {
            name: AdapterResidency(name, Tier.DEVICE if loaded_s <= now_s else Tier.LOADING)
            for name, loaded_s in self.slots.items()
        }
        load = WorkerLoad(prefill_tokens_per_s=PREFILL_TOKENS_PER_S, step_s=STEP_S)
        return WorkerView(
            self.name,
            self.name,
            "base",
            connected=True,
            ready=True,
            load=load,
            adapters=held,
            in_flight=sum(end_s > now_s for end_s in self.ends),
        )

    def first_token_at(self, request: Request) -> float:
        """Take a request in; returns when its first token comes. Mutates: self."""
        now_s = request.arrival_s
        while self.ends and self.ends[0] <= now_s:
            heapq.heappop(self.ends)
        # With a full batch it waits for the sequence that makes room.
        behind = len(self.ends) - BATCH
        start_s = sorted(self.ends)[behind] if behind >= 0 else now_s
        start_s = max(start_s, self._loaded_at(request.adapter, now_s))
        first_s = start_s + PROMPT_TOKENS / PREFILL_TOKENS_PER_S + STEP_S
        heapq.heappush(self.ends, first_s + OUTPUT_TOKENS * STEP_S)
        return first_s

    def _loaded_at(self, adapter: str, now_s: float) -> float:
        if adapter not in self.slots:
            while len(self.slots) >= NUM_SLOTS:
                by_heat = min(self.slots, key=self.heat.__getitem__)
                del self.slots[by_heat if self.keeps_popular else next(iter(self.slots))]
            self.copying_until_s = max(self.copying_until_s, now_s) + LOAD_S
            self.slots[adapter] = self.copying_until_s
        self.slots.move_to_end(adapter)
        before, use = self.heat.get(adapter, -math.inf), now_s / FORGET_S
        self.heat[adapter] = max(before, use) + math.log1p(math.exp(-abs(before - use)))
        return self.slots[adapter]


Route = Callable[[list[WorkerView], Request, int], str]
"""Views, request, home set size -> worker name."""


def by_router(views: list[WorkerView], request: Request, num_replicas: int) -> str:
    """The real thing."""
    chosen = choose(
        views, RoutingRequest(request.adapter, (request.adapter,), PROMPT_TOKENS, num_replicas)
    )
    assert chosen is not None, "all workers take requests"
    return chosen.worker_id


def at_random(seed: int) -> Route:
    """Any worker."""
    rng = random.Random(seed)
    return lambda views, request, num_replicas: rng.choice(views).worker_id


def round_robin() -> Route:
    """One after the other."""
    numbers = itertools.count()
    return lambda views, request, num_replicas: views[next(numbers) % len(views)].worker_id


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a run, without its first quarter, which warms it up."""

    holder_share: float
    """Share of the requests that reached a worker which had their adapter, or was loading it."""
    median_s: float
    p99_s: float
    """Time to the first token."""


def popularity(num_adapters: int, exponent: float) -> list[float]:
    """Zipf weights, the most popular first."""
    return [(rank + 1) ** -exponent for rank in range(num_adapters)]


def ideal(weights: list[float]) -> float:
    """Share of the requests for as many adapters as there are slots."""
    return sum(weights[: NUM_WORKERS * NUM_SLOTS]) / sum(weights)


def fewest_misses(asked: Sequence[int], num_slots: int) -> int:
    """Loads that any order of eviction needs: evict what is requested last (Belady, 1966)."""
    never = len(asked)
    next_use = [never] * never
    later: dict[int, int] = {}
    for index in range(never - 1, -1, -1):
        next_use[index] = later.get(asked[index], never)
        later[asked[index]] = index
    slots: dict[int, int] = {}
    misses = 0
    for index, adapter in enumerate(asked):
        misses += adapter not in slots
        slots[adapter] = next_use[index]
        if len(slots) > num_slots:
            del slots[max(slots, key=slots.__getitem__)]
    return misses


def oracle(weights: list[float], num_requests: int, seed: int) -> float:
    """Share of requests that find their adapter, if one worker had all slots and the future were
    known."""
    rng = random.Random(seed)
    asked = rng.choices(range(len(weights)), weights, k=num_requests)
    warm = num_requests // 4
    num_slots = NUM_WORKERS * NUM_SLOTS
    counted = fewest_misses(asked, num_slots) - fewest_misses(asked[:warm], num_slots)
    return 1 - counted / (num_requests - warm)


def simulate(
    route: Route,
    weights: list[float],
    num_requests: int,
    seed: int,
    *,
    keeps_popular: bool = False,
) -> Outcome:
    """One run; the same requests for every route with the same seed."""
    rng = random.Random(seed)
    names = [f"sha256:{number:064x}" for number in range(len(weights))]
    workers = {f"w{n}": Worker(f"w{n}", keeps_popular) for n in range(NUM_WORKERS)}
    replica_counts, now_s = ReplicaCounts(), 0.0
    running: list[tuple[float, str]] = []
    hits: list[bool] = []
    waits: list[float] = []
    for _ in range(num_requests):
        now_s += rng.expovariate(ARRIVALS_PER_S)
        while running and running[0][0] <= now_s:
            replica_counts.end(heapq.heappop(running)[1])
        request = Request(rng.choices(names, weights)[0], now_s)
        views = [worker.view(now_s) for worker in workers.values()]
        name = route(views, request, replica_counts.start(request.adapter, NUM_WORKERS))
        hits.append(request.adapter in workers[name].slots)
        first_s = workers[name].first_token_at(request)
        waits.append(first_s - now_s)
        heapq.heappush(running, (first_s + OUTPUT_TOKENS * STEP_S, request.adapter))
    counted = sorted(waits[num_requests // 4 :])
    hits = hits[num_requests // 4 :]
    return Outcome(
        sum(hits) / len(hits), counted[len(counted) // 2], counted[int(0.99 * len(counted))]
    )


def main() -> None:
    """Entry point."""
    parser = options_of(__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(
        f"{'zipf':>5} {'evicts':10} {'':8} {'holder':>7} {'of best':>8} {'p99 s':>7} {'ratio':>6}"
    )
    for exponent in EXPONENTS:
        share = oracle(popularity(NUM_ADAPTERS, exponent), args.requests, args.seed)
        print(f"{exponent:5} {'':10} {'oracle':8} {share:7.3f}")
    for exponent, keeps_popular in itertools.product(EXPONENTS, (False, True)):
        weights = popularity(NUM_ADAPTERS, exponent)
        routes = {"round robin": round_robin(), "random": at_random(args.seed), "router": by_router}
        turns_s = 0.0
        for name, route in routes.items():
            found = simulate(route, weights, args.requests, args.seed, keeps_popular=keeps_popular)
            turns_s = turns_s or found.p99_s
            of_best = found.holder_share / ideal(weights)
            shown = f"{found.holder_share:7.3f} {of_best:8.2f} {found.p99_s:7.3f}"
            evicts = "least used" if keeps_popular else "last used"
            print(f"{exponent:5} {evicts:10} {name:8} {shown} {found.p99_s / turns_s:6.2f}")


if __name__ == "__main__":
    main()
